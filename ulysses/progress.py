"""Progress: a bar on a terminal, plain lines in a file."""

import sys
from types import SimpleNamespace

from tqdm import tqdm


def _line(text: str) -> None:
    """Print what a bar draws as a line of its own."""
    if text.strip():
        print(text.strip(), file=sys.stderr, flush=True)


def progress(
    *counted: object, desc: str = "", seconds: float = 10.0, **options: object
) -> tqdm:
    """Return tqdm's bar with these options; where the output is a file, it prints a line after so many seconds.

    The bar's `refresh` draws it, or prints a line, at once.
    """
    if not sys.stderr.isatty():
        plain = "{desc}{n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
        options |= {"bar_format": plain, "file": SimpleNamespace(write=_line), "leave": False}
        # position 0, because a bar below another one would move the cursor
        options |= {"mininterval": seconds, "delay": seconds, "position": 0}
    bar = tqdm(
        *counted, desc=desc and f"{desc.removesuffix(': ')}: ", dynamic_ncols=True, **options
    )
    # without a total tqdm cannot tell the time that remains
    if not bar.disable and bar.total is None and bar.bar_format:
        bar.bar_format = bar.bar_format.replace("{remaining}", "?")
    return bar
