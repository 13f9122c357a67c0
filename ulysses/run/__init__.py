"""The engine: configuration, stages, the loop, checkpoints. It needs our own `losses` and `models` next to `ulysses`.

Both names are common for folders of other projects, and Python takes the first one on its path: refuse a foreign one
here, by its file, instead of failing on a name that it does not have. As a library `ulysses` alone needs neither.
"""

from importlib.util import find_spec
from pathlib import Path


def _refuse_foreign_packages() -> None:
    home = Path(__file__).resolve().parents[2]
    for name in ("losses", "models"):
        spec = find_spec(name)
        if spec is None:
            raise ImportError(
                f"there is no package {name} next to {home / 'ulysses'}; install ulysses-engine again"
            )
        file = Path(spec.origin or next(iter(spec.submodule_search_locations or []), ""))
        if file.resolve() != home / name / "__init__.py":
            raise ImportError(
                f"{file} shadows the engine's own package {name} ({home / name}); rename it, or start from another "
                "folder and take it off PYTHONPATH"
            )


_refuse_foreign_packages()
