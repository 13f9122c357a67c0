"""Explain in one sentence why a command cannot even be imported."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained_imports() -> Iterator[None]:
    """End the process if a package is not installed, or if a foreign one has the name of one of the engine's own."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"error: the package {error.name} is not installed; pip install ulysses-engine brings all that is needed"
        ) from None
    except ImportError as error:
        raise SystemExit(f"error: {error}") from None
