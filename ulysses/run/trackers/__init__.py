"""What a tracker is: a service or a file that takes the metrics of a run. Every tracker is one file in this folder.

`run.trackers` names them, by the names in ulysses/options.py or as module:Class for the user's own. Only rank 0 has
trackers. A tracker raises DiskError for a file that cannot be written: the run then ends after a checkpoint. After any
other error the run goes on without that tracker.
"""

from pathlib import Path
from typing import NamedTuple

Values = dict[str, float | None]  # metrics by name; those that are not finite are None


class TrackedRun(NamedTuple):
    """What a tracker is told of the run that it follows.

    folder: of the run, which is named after it.
    project: under which services file the run.
    run_id: the id that the checkpoints have too.
    step: the last step whose metrics stay; a resumed run logs the later ones again.
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
    """The four methods of a tracker. It is constructed without arguments, and need not be derived from this class."""

    def start(self, run: TrackedRun) -> None:
        """Open what the metrics go to; an error refuses the run."""

    def log(self, step: int, values: Values) -> None:
        """Take the metrics of a step."""

    def fail(self) -> None:
        """Note that an error ends the run; `close` is called next."""

    def close(self) -> None:
        """Send what is left, and end."""
