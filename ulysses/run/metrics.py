"""Where metrics are written."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ulysses.disk import DiskError, replace_file, writing
from ulysses.progress import progress

SHOWN = {  # by the progress bar, of those that a stage has
    "loss": ".4f",
    "rewards/accuracies": ".3f",
    "objective/scores": ".3f",
    "lr": ".2e",
    "tokens_per_second": ".0f",
}


def logged(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; a kill may have cut the last one short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


class MetricsLog:
    """Write metrics.jsonl, TensorBoard and optionally W&B, and show a progress bar. Rank 0 only.

    Args:
        first_step: what metrics.jsonl holds of later steps is dropped, because a resumed run writes it again.
        run_id: stands in every line.
        wandb: a run of Weights & Biases that receives the metrics, or None.

    Attributes:
        failure: the first failure to write; the loop stops once it has tried to save a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        first_step: int,
        run_id: str,
        wandb: Any,
    ) -> None:
        # it takes long to import, and only rank 0 needs it
        from torch.utils.tensorboard import SummaryWriter

        self.run_id, self.wandb = run_id, wandb
        self.failure: DiskError | None = None
        self.path, board = folder / "metrics.jsonl", str(folder / "tensorboard")
        with writing(self.path):
            kept = [line for line in logged(self.path) if line["step"] <= first_step]
            replace_file(self.path, "".join(f"{json.dumps(line)}\n" for line in kept))
            self.file = self.path.open("a")
            self.board = SummaryWriter(board, purge_step=first_step + 1)
        self.bar = progress(
            total=total_steps, initial=first_step, unit="steps", seconds=math.inf
        )

    def report(self, step: int, values: dict[str, float], due: bool) -> None:
        """Move the progress bar to `step`, and log the values if that is due or if there was an evaluation.

        Numbers that are not finite become null. What cannot be written is kept as `failure`.
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
        when = f" at step {step}"
        with self._trying("metrics.jsonl", when):
            line = json.dumps({"step": step, "run": self.run_id, **clean})
            print(line, file=self.file, flush=True)
        with self._trying("tensorboard", when):
            for name, value in clean.items():
                if value is not None:
                    self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(clean, step=step)

    @contextmanager
    def _trying(self, name: str, when: str) -> Iterator[None]:
        try:
            with writing(self.path.with_name(name), when):
                yield
        except DiskError as error:
            self.failure = self.failure or error
        if not self.path.exists():  # the open file takes what nobody finds
            self.failure = DiskError(
                f"{self.path.absolute()} was deleted while the run wrote it; leave the run folder in its place"
            )

    def close(self) -> None:
        """Close everything; DiskError if something could not be written, which nobody has been told yet."""
        self.bar.close()
        for name, sink in (("metrics.jsonl", self.file), ("tensorboard", self.board)):
            with self._trying(name, " at the end of the run"):
                sink.close()
        if self.failure is not None:
            raise self.failure
