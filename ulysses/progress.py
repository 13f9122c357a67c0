"""Show how far something has come: by a bar on a terminal, and by plain lines where the output is a file."""

import sys
from types import SimpleNamespace

from tqdm import tqdm


def _line(text: str) -> None:
    """Make a line of its own of whatever a bar draws."""
    if text.strip():
        print(text.strip(), file=sys.stderr, flush=True)


def progress(
    *counted: object, desc: str = "", seconds: float = 10.0, **options: object
) -> tqdm:
    """Return tqdm's bar with these options; in a file it becomes a line every so many seconds.

    `refresh` draws the bar, or writes a line, at once.
    """
    if not sys.stderr.isatty():
        plain = "{desc}{n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
        options |= {"bar_format": plain, "file": SimpleNamespace(write=_line), "leave": False}
        # a bar beside another one would move the cursor
        options |= {"mininterval": seconds, "delay": seconds, "position": 0}
    bar = tqdm(
        *counted, desc=desc and f"{desc.removesuffix(': ')}: ", dynamic_ncols=True, **options
    )
    # nobody knows how long it will take
    if not bar.disable and bar.total is None and bar.bar_format:
        bar.bar_format = bar.bar_format.replace("{remaining}", "?")
    return bar
