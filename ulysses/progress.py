"""Show how far something has come: by a bar on a terminal, and by plain lines where the output is a file."""

import sys
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 10.0  # between the lines of a file


class _Lines:
    """Make a line of its own of whatever a bar draws."""

    def write(self, text: str) -> None:
        if text := text.strip():
            print(text, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress(*counted: Any, seconds: float = LINE_SECONDS, **options: Any) -> tqdm:
    """Return tqdm's bar with these options; in a file it becomes a line every so many seconds.

    `refresh` draws the bar, or writes a line, at once.
    """
    if sys.stderr.isatty():
        return tqdm(*counted, dynamic_ncols=True, **options)
    plain = "{desc}{n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
    how = {"file": _Lines(), "leave": False, "mininterval": seconds, "delay": seconds}
    return tqdm(*counted, **options | how, bar_format=plain)
