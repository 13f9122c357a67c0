"""Metrics as (sum, count) pairs, reduced once per step, and where they are written."""

import json
import math
import time
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
    """Named (sum, count) pairs of this rank; `reduce` makes them global means with one collective.

    Every rank must add the same names; a rank without data adds zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add_sum(self, name: str, value: Tensor | float) -> None:
        """Add to a plain global sum."""
        self.sums[name] = (
            self.sums[name] + self._number(value) if name in self.sums else self._number(value)
        )

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean: `total` is a sum over `count` things."""
        pair = [self._number(total), self._number(count)]
        if name in self.pairs:
            old = self.pairs[name]
            self.pairs[name] = [old[0] + pair[0], old[1] + pair[1]]
        else:
            self.pairs[name] = pair

    def add_max(self, name: str, values: Tensor) -> None:
        """Add to a maximum over all micro-batches and ranks; no values leave it as it is."""
        start = self.largest.get(
            name, torch.full((), -math.inf, dtype=torch.float64, device=self.device)
        )
        self.largest[name] = torch.cat([start.view(1), values.detach().double().flatten()]).max()

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full(
            (), value, dtype=torch.float64, device=self.device
        )  # torch.tensor would wait for the GPU

    def reduce(self) -> dict[str, float]:
        """Return the global sums, means (sum / count) and maxima; a mean whose count is 0 and a maximum of nothing are left out.

        One collective (two with maxima) and one host read each.
        """
        names, plain = sorted(self.pairs), sorted(self.sums)
        numbers = [value for name in names for value in self.pairs[name]] + [
            self.sums[name] for name in plain
        ]
        if not numbers:
            return self._maxima()
        flat = torch.stack(numbers)
        if dist.is_initialized():
            dist.all_reduce(flat)
        values = flat.tolist()
        means = {}
        for i, name in enumerate(names):
            total, count = values[2 * i], values[2 * i + 1]
            if count != 0:
                means[name] = total / count
        return means | dict(zip(plain, values[2 * len(names) :], strict=True)) | self._maxima()

    def _maxima(self) -> dict[str, float]:
        names = sorted(self.largest)
        if not names:
            return {}
        flat = torch.stack([self.largest[name] for name in names])
        if dist.is_initialized():
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return {
            name: value
            for name, value in zip(names, flat.tolist(), strict=True)
            if value != -math.inf
        }


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

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no gradient of
    their own: with adapters it is 4 N T + 6 A T. Causal attention counts half of the full square. Recomputation, passes
    without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        parameters: N, all weights without adapters.
        attention_width: H E, query heads times head dim.
        head: those of N in the vocabulary projection, which only `projected` tokens meet; 0 counts it for all tokens.
        adapters: A, the trained weights beside frozen ones; 0 if all weights are trained.
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
    """Write metrics.jsonl, TensorBoard and optionally W&B, and show a progress bar. Rank 0 only."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int,
        wandb_project: str = "",
        config: dict[str, Any] | None = None,
    ) -> None:
        from tqdm import tqdm

        self.path = folder / "metrics.jsonl"
        self._keep_until(first_step)
        self.file = self.path.open("a")
        self.board = _board(folder / "tensorboard", first_step + 1)
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)
        self.wandb = None
        if wandb_project:
            import wandb

            self.wandb = wandb.init(
                project=wandb_project,
                name=folder.name,
                config=config,
                resume="allow",
                dir=str(folder),
            )
        self.started = time.time()

    def _keep_until(self, step: int) -> None:
        """Drop lines that a resumed run will write again."""
        if self.path.exists():
            lines = [
                line
                for line in self.path.read_text().splitlines()
                if line.endswith("}") and json.loads(line)["step"] <= step
            ]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in lines))
            temporary.rename(self.path)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one object; non-finite numbers become null."""
        clean = {
            k: (v if not isinstance(v, float) or math.isfinite(v) else None)
            for k, v in values.items()
        }
        self.file.write(json.dumps({"step": step, **clean}) + "\n")
        self.file.flush()
        for name, value in clean.items():
            if value is not None and self.board is not None:
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(clean, step=step)

    def advance(self, step: int, shown: dict[str, str]) -> None:
        """Move the progress bar to `step`."""
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix(shown, refresh=False)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        if self.board is not None:
            self.board.close()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def _board(folder: Path, first_step: int) -> Any:
    """Open TensorBoard's writer; without the package the run says so and goes on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(
            "tensorboard is not installed, so no event files are written (metrics.jsonl has everything); pip install tensorboard"
        )
        return None
    return SummaryWriter(str(folder), purge_step=first_step)
