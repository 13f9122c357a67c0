"""MLflow; MLFLOW_TRACKING_URI and its other environment variables choose the server and hold the password."""

import re

import mlflow

from ulysses.run.trackers import TrackedRun, Tracker, Values, finite


class Mlflow(Tracker):
    """Log the metrics to a run of the experiment that the project names, and the settings as its file settings.json."""

    status = "FINISHED"

    def start(self, run: TrackedRun) -> None:
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.folder.name, tags={"run_id": run.run_id})
        mlflow.log_dict(run.settings, "settings.json")

    def log(self, step: int, values: Values) -> None:
        # names of rewards may hold characters that MLflow refuses
        named = {re.sub(r"[^\w./ -]|(?<=/)/", "_", k): v for k, v in finite(values).items()}
        mlflow.log_metrics(named, step=step)

    def fail(self) -> None:
        self.status = "FAILED"

    def close(self) -> None:
        mlflow.end_run(self.status)
