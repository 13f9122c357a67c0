"""Metrics as (sum, count) pairs, reduced once per step, and where they are written."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PEAK_FLOPS = {  # dense bfloat16 FLOP/s by part of the device name, from the vendors' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


class MetricSums:
    """Named sums and means of this rank, made global by `reduce` with one collective.

    Every rank must add the same names; a rank without data adds zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, list[Tensor]] = {}  # a plain sum, or a sum and its count
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None = None) -> None:
        """Add to a global mean of which `total` is a sum over `count` things, or without a count to a global sum."""
        new = [self._number(x) for x in ((total,) if count is None else (total, count))]
        old = self._sums.get(name)
        self._sums[name] = [a + b for a, b in zip(old, new, strict=True)] if old else new

    def add_max(self, name: str, values: Tensor) -> None:
        """Add to a maximum over all micro-batches and ranks; no values leave it as it is."""
        old = self._maxima.get(name, self._number(-math.inf))
        self._maxima[name] = torch.cat([old.view(1), values.detach().double().flatten()]).max()

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        # torch.tensor would wait for the GPU
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def reduce(self) -> dict[str, float]:
        """Return the global sums, means and maxima; a mean over nothing and a maximum of nothing are left out.

        One collective (two with maxima) and one host read each.
        """
        found = {}
        numbers = iter(_reduced([n for name in sorted(self._sums) for n in self._sums[name]]))
        for name in sorted(self._sums):
            total = next(numbers)
            if len(self._sums[name]) == 1:
                found[name] = total
            elif count := next(numbers):
                found[name] = total / count
        names = sorted(self._maxima)
        largest = _reduced([self._maxima[name] for name in names], dist.ReduceOp.MAX)
        return found | {n: v for n, v in zip(names, largest, strict=True) if v != -math.inf}


def _reduced(numbers: list[Tensor], op: Any = dist.ReduceOp.SUM) -> list[float]:
    if not numbers:
        return []
    flat = torch.stack(numbers)
    if dist.is_initialized():
        dist.all_reduce(flat, op=op)
    return flat.tolist()


def model_flops(
    parameters: int,
    layers: int,
    attention_width: int,
    tokens: float,
    squared_lengths: float,
    *,
    head: int = 0,
    projected: float = 0.0,
    adapters: int = 0,
) -> float:
    """Return the FLOPs of one forward and backward pass, the numerator of MFU: 6 N T + 6 L (H E) sum(length^2).

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no
    gradient: with adapters it is 4 N T + 6 A T. Causal attention counts half of the full square.
    Recomputation, passes
    without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        parameters: N, all weights without adapters.
        attention_width: H E, query heads times head dim.
        head: those of N in the vocabulary projection, which only `projected` tokens meet; 0 counts it for all tokens.
        adapters: A, the trained weights of a model whose other weights are frozen; 0 if all are trained.
    """
    weights = (parameters - head) * tokens + head * projected
    linear = 4.0 * weights + 6.0 * adapters * tokens if adapters else 6.0 * weights
    return linear + 6.0 * layers * attention_width * squared_lengths


def device_peak_flops() -> float | None:
    """Return this GPU's dense bfloat16 FLOP/s, or None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


class MetricsLog:
    """Write metrics.jsonl, TensorBoard and optionally W&B, and show a progress bar. Rank 0 only.

    Args:
        first_step: what metrics.jsonl holds of later steps is dropped, because a resumed run writes it again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int,
        wandb_project: str = "",
        config: dict[str, Any] | None = None,
    ) -> None:
        # both take long to import, and only rank 0 needs them
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        path = folder / "metrics.jsonl"
        _keep_until(path, first_step)
        self.file = path.open("a")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)
        self.wandb = None
        if wandb_project:
            import wandb

            self.wandb = wandb.init(
                project=wandb_project, name=folder.name, config=config, resume="allow", dir=folder
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one object; non-finite numbers become null."""
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self.file.write(json.dumps({"step": step, **clean}) + "\n")
        self.file.flush()
        for name, value in clean.items():
            if value is not None:
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(clean, step=step)

    def advance(self, step: int, **shown: str) -> None:
        """Move the progress bar to `step`."""
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix(shown, refresh=False)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a kill cut short."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.rename(path)
