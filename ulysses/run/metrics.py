"""What a step costs in FLOPs, and the log of a run's metrics: a progress bar and trackers."""

import math
import time
from collections.abc import Callable, Iterable

import torch

from ulysses.config.section import CREDENTIALS, ConfigError, visible
from ulysses.disk import DiskError
from ulysses.plan.model_size import Model
from ulysses.progress import progress
from ulysses.registry import TRACKERS, load
from ulysses.run.trackers import TrackedRun, Tracker
from ulysses.run.trackers.metrics_file import METRICS

SHOWN = {  # by the progress bar, of those that a stage has
    "loss": ".4f",
    "rewards/accuracies": ".3f",
    "objective/scores": ".3f",
    "lr": ".2e",
    "tokens_per_second": ".0f",
}
FILE = "ulysses.run.trackers.metrics_file:MetricsFile"
PEAKS = {  # dense bfloat16 FLOP/s, and bytes/s of memory, by part of the device name, from the vendors' data sheets
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H800": (989e12, 3.35e12),
    "B200": (2250e12, 8e12),
    "A100": (312e12, 2e12),
    "A800": (312e12, 2e12),
    "L40S": (362e12, 0.86e12),
    "4090": (165e12, 1e12),
}


def model_flops(model: Model, tokens: float, squared_lengths: float, projected: float) -> float:
    """Return the FLOPs of one forward and backward pass, the numerator of MFU: 6 N T + 6 L (H E) sum(length^2).

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no
    gradient: with A parameters of adapters it is 4 N T + 6 A T. Causal attention counts half of the full square.
    Recomputation, passes without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        projected: tokens that meet the vocabulary projection: those whose target is trained.
    """
    head = model.vocabulary_parameters * model.has_head
    adapters = 0 if model.is_full else model.trained
    # of its layer's experts a token meets a few
    met = model.parameters - adapters - (model.matrices - model.active_matrices)
    weights = (met - head) * tokens + head * projected
    linear = (6.0 if model.is_full else 4.0) * weights + 6.0 * adapters * tokens
    return linear + 6.0 * model.layers * model.query_width * squared_lengths


def device_peaks() -> tuple[float, float] | None:
    """Return this GPU's dense bfloat16 FLOP/s and the bytes/s of its memory, or None where they are not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peaks for part, peaks in PEAKS.items() if part in name), None)


def cpu_flops(dtype: str) -> float:
    """Measure the FLOP/s of this process's cores in a product of matrices: 512 wide, the fastest of three."""
    matrix, seconds = torch.rand(512, 512).to(getattr(torch, dtype)), []
    for _ in range(3):
        begun = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - begun)
    return 2 * 512**3 / min(seconds)


def slow_products(dtype: str) -> str:
    """Return a sentence if this CPU multiplies matrices of the dtype much more slowly than float32's, or ""."""
    if dtype == "float32" or (factor := cpu_flops("float32") / cpu_flops(dtype)) < 2:
        return ""
    return (
        f"products of {dtype} matrices are {factor:.0f} times slower than those of float32 on this CPU; "
        'set model.dtype = "float32"'
    )


class MetricsLog:
    """Show a progress bar, and give the metrics to the trackers of a run. Rank 0 only.

    Args:
        names: of trackers, as in ulysses/registry.py or places of one's own; metrics.jsonl is always written.

    Attributes:
        failure: the first file that could not be written; the loop stops once it has tried to save a checkpoint.

    Raises ConfigError if a tracker does not start.
    """

    def __init__(self, run: TrackedRun, names: Iterable[str], total_steps: int) -> None:
        self.failure: DiskError | None = None
        self.trackers: dict[str, Tracker] = {}
        for name, place in {METRICS: FILE, **{n: TRACKERS.get(n, n) for n in names}}.items():
            try:
                tracker = load(place)()
                tracker.start(run)
            except DiskError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{name} does not start ({visible(repr(error))}); mend that, or leave it out",
                    "run.trackers",
                ) from None
            self.trackers[name] = tracker
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
        self._tell(lambda tracker: tracker.log(step, clean))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except DiskError as error:
                self.failure = self.failure or error
            except Exception as error:
                del self.trackers[name]
                said = CREDENTIALS.sub("***", visible(repr(error)))
                self.bar.write(
                    f"{name} has failed and gets no more metrics; {METRICS} does: {said}"
                )

    def fail(self) -> None:
        """Tell the trackers that an error ends the run."""
        self._tell(lambda tracker: tracker.fail())

    def close(self) -> None:
        """Close everything; DiskError if something could not be written, which nobody has been told yet."""
        self.bar.close()
        self._tell(lambda tracker: tracker.close())
        if self.failure is not None:
            raise self.failure
