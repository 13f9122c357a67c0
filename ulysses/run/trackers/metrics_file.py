"""metrics.jsonl, which every run writes: one JSON object for each logged step."""

import json
from pathlib import Path

from ulysses.disk import replace_file, writing
from ulysses.run.trackers import TrackedRun, Tracker, Values

METRICS = "metrics.jsonl"


def logged(path: Path) -> list[Values]:
    """Return the lines of a metrics.jsonl; a kill may have cut the last one short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


class MetricsFile(Tracker):
    """Write a run's metrics into its folder, in place of what was there of later steps."""

    def start(self, run: TrackedRun) -> None:
        self.path, self.run_id = run.folder / METRICS, run.run_id
        with writing(self.path):
            kept = [line for line in logged(self.path) if line["step"] <= run.step]
            replace_file(self.path, "".join(f"{json.dumps(line)}\n" for line in kept))
            self.file = self.path.open("a")

    def log(self, step: int, values: Values) -> None:
        with writing(self.path, f" at step {step}"):
            line = json.dumps({"step": step, "run": self.run_id, **values})
            print(line, file=self.file, flush=True)
            self.path.stat()  # the open file takes lines that nobody can read any more

    def close(self) -> None:
        with writing(self.path, " at the end of the run"):
            self.file.close()
            self.path.stat()
