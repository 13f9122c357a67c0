"""Weights & Biases; its own environment variables, such as WANDB_MODE, choose entity, server and key."""

import wandb

from ulysses.run.trackers import TrackedRun, Tracker, Values


class Wandb(Tracker):
    """Send the metrics to a run of Weights & Biases."""

    exit_code = 0

    def start(self, run: TrackedRun) -> None:
        self.run = wandb.init(
            project=run.project,
            config=run.settings,
            name=run.folder.name,
            dir=run.folder,
            resume="allow",
        )

    def log(self, step: int, values: Values) -> None:
        self.run.log(values, step=step)

    def fail(self) -> None:
        self.exit_code = 1

    def close(self) -> None:
        self.run.finish(exit_code=self.exit_code)
