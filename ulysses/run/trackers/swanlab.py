"""SwanLab; SWANLAB_MODE and its other environment variables choose cloud or local and hold the key."""

import swanlab

from ulysses.run.trackers import TrackedRun, Tracker, Values, finite


class Swanlab(Tracker):
    """Log the metrics to an experiment of the project."""

    def start(self, run: TrackedRun) -> None:
        swanlab.init(
            project=run.project, experiment_name=run.folder.name, config=run.settings,
            logdir=str(run.folder / "swanlab"),
        )  # fmt: skip

    def log(self, step: int, values: Values) -> None:
        swanlab.log(finite(values), step=step)

    def fail(self) -> None:
        swanlab.log({"failed": 1})

    def close(self) -> None:
        swanlab.finish()
