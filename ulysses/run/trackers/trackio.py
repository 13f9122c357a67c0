"""trackio, which keeps runs in a local database or, with TRACKIO_SPACE_ID, in a Space of the Hugging Face hub."""

import trackio

from ulysses.run.trackers import TrackedRun, Tracker, Values, finite


class Trackio(Tracker):
    """Log the metrics to a run of the project; a resumed run goes on under its name."""

    def start(self, run: TrackedRun) -> None:
        trackio.init(
            project=run.project, name=run.folder.name, config=run.settings, resume="allow"
        )

    def log(self, step: int, values: Values) -> None:
        trackio.log(finite(values), step=step)

    def fail(self) -> None:
        trackio.log({"failed": 1})

    def close(self) -> None:
        trackio.finish()
