"""Show how far something has come: by a bar on a terminal, and by plain lines where the output is a file."""

import sys
from io import TextIOBase
from typing import Any

from tqdm import tqdm


class _Lines(TextIOBase):
    """Make a line of its own of whatever a bar draws."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


def progress(*counted: Any, seconds: float = 10.0, **options: Any) -> tqdm:
    """Return tqdm's bar with these options; in a file it becomes a line every so many seconds.

    `refresh` draws the bar, or writes a line, at once.
    """
    if not sys.stderr.isatty():
        plain = "{desc}{n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
        options |= {"bar_format": plain, "file": _Lines(), "leave": False}
        options |= {"mininterval": seconds, "delay": seconds}
    return tqdm(*counted, dynamic_ncols=True, **options)
