"""What a tracker is: a service or a file that is given the metrics of a run. Every tracker is one file in this folder.

`run.trackers` names them, as ulysses/options.py does or as module:Class of one's own. They live on rank 0 alone. A
tracker raises DiskError for a file that cannot be written: the run then ends after a checkpoint. Any other error takes
the tracker out of the run, which goes on.
"""

from pathlib import Path
from typing import NamedTuple

Values = dict[str, float | None]  # metrics by name; those that are not finite are None


class TrackedRun(NamedTuple):
    """What a tracker is told of the run that it follows.

    folder: of the run; its name is the run's. project: under which the services file it.
    run_id: stands in the checkpoints too. step: the last one whose metrics stay; a resumed run logs later ones again.
    settings: the whole configuration as plain JSON, with `run_id`. It holds no secret: the checks refuse credentials in
        it, and environment variables are no part of it.
    """

    folder: Path
    project: str
    run_id: str
    step: int
    settings: dict[str, object]


def finite(values: Values) -> dict[str, float]:
    """Return the metrics that are numbers, for services that take nothing else."""
    return {name: value for name, value in values.items() if value is not None}


class Tracker:
    """The four calls that a tracker answers; it is made without arguments, and need not be derived from this."""

    def start(self, run: TrackedRun) -> None:
        """Open what the metrics go to; an error refuses the run."""

    def log(self, step: int, values: Values) -> None:
        """Take the metrics of a step."""

    def fail(self) -> None:
        """Note that an error ends the run; `close` follows."""

    def close(self) -> None:
        """Send what is left, and end."""
