"""The log of a run's metrics: a progress bar, the file metrics.jsonl, and the trackers of `run.trackers`."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from pkgutil import resolve_name

from ulysses.config.section import SECRETS, ConfigError, visible
from ulysses.disk import DiskError, replace_file, writing
from ulysses.options import TRACKERS
from ulysses.progress import progress
from ulysses.run.trackers import TrackedRun, Tracker, Values

SHOWN = {  # the metrics beside the progress bar, if the stage has them, and their formats
    "loss": ".4f",
    "rewards/accuracies": ".3f",
    "objective/scores": ".3f",
    "lr": ".2e",
    "tokens_per_second": ".0f",
}
METRICS = "metrics.jsonl"  # one JSON object for each logged step


def logged(path: Path) -> Iterator[Values]:
    """Yield the lines of a metrics.jsonl that are whole; a crash may have cut some short, not only the last one."""
    with suppress(FileNotFoundError), path.open(errors="replace") as file:
        for line in file:  # of which a long run has too many to hold them all
            with suppress(ValueError):
                yield json.loads(line)


class MetricsLog:
    """Show a progress bar, write the metrics into the run's folder, and give them to its trackers. Rank 0 only.

    It is constructed after all other refusals, because trackers then open a run on their servers and the lines of later
    steps in metrics.jsonl are dropped. Whether a server can be reached is not known before.

    Args:
        names: of trackers, from ulysses/options.py or the user's own as module:Class.

    Attributes:
        failure: the error of the first file that could not be written; the loop saves a checkpoint and stops.

    Raises ConfigError if a tracker does not start.
    """

    def __init__(self, run: TrackedRun, names: Iterable[str], total_steps: int) -> None:
        self.failure: DiskError | None = None
        self.path, self.run_id = run.folder / METRICS, run.run_id
        self.trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            try:
                tracker = TRACKERS[name]()() if name in TRACKERS else resolve_name(name)()
                tracker.start(deepcopy(run))  # a copy, because trackers may change the settings
            # trackers are other people's code, which may also try to end the process
            except (Exception, SystemExit) as error:
                # the services of the others would show for ever that the run goes on
                for started in self.trackers.values():
                    with suppress(Exception, SystemExit):
                        started.fail()
                        started.close()
                if isinstance(error, DiskError):
                    raise
                raise ConfigError(
                    f"{name} does not start ({visible(repr(error))}); mend that, or leave it out",
                    "run.trackers",
                ) from None
            self.trackers[name] = tracker
        with writing(self.path):
            kept = (line for line in logged(self.path) if line["step"] <= run.step)
            replace_file(self.path, "".join(f"{json.dumps(line)}\n" for line in kept))
            self.file = self.path.open("a")
        self.bar = progress(total=total_steps, initial=run.step, unit="steps", seconds=math.inf)

    def report(self, step: int, values: dict[str, float], due: bool) -> None:
        """Move the progress bar to `step`, and log the values if that is due or if there was an evaluation.

        Numbers that are not finite become None.
        """
        shown = {k: format(values[k], style) for k, style in SHOWN.items() if k in values}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        if due:
            self.bar.refresh()
        evaluated = [
            f"{k} {v:.4f}"
            for k, v in values.items()
            if k.startswith("eval/") and "_se/" not in k
        ]
        if evaluated:
            self.bar.write(f"step {step}: " + ", ".join(evaluated))
        elif not due:
            return
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        try:
            with writing(self.path, f" at step {step}"):
                line = json.dumps({"step": step, "run": self.run_id, **clean})
                print(line, file=self.file, flush=True)
                self.path.stat()  # an error if the file was deleted: lines written to it are lost
        except DiskError as error:
            self.failure = self.failure or error
        self._tell(lambda tracker: tracker.log(step, dict(clean)))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except DiskError as error:
                self.failure = self.failure or error
            except (Exception, SystemExit) as error:
                del self.trackers[name]
                said = SECRETS.sub("***", visible(repr(error)))
                self.bar.write(
                    f"{name} has failed and gets no more metrics; {METRICS} does: {said}"
                )

    def fail(self) -> None:
        """Tell the trackers that an error ends the run."""
        self._tell(lambda tracker: tracker.fail())

    def close(self) -> None:
        """Close the bar, the file and the trackers, and raise the DiskError of a file that could not be written."""
        self.bar.close()
        # each line was flushed; one that could not be written is told below
        with suppress(OSError):
            self.file.close()
        self._tell(lambda tracker: tracker.close())
        if self.failure is not None:
            raise self.failure
