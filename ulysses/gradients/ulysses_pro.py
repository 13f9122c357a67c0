"""The preset "ulysses-pro" and its parts: gradient policies that change the gradient's direction, or a learning rate.

Shapes: R rows (first axis) of all matrices together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from ulysses.gradients.gradients import Gradients, GradientSlice
from ulysses.gradients.policy import ClipGlobalNorm, GradientPolicy, Report, StepContext
from ulysses.parallel.random_keys import keyed_generator

NOISE_BLOCK = 65_536


@dataclass
class GradientNoise(GradientPolicy):
    """Add N(0, s^2) to every element; set either sigma or ratio to choose s.

    sigma: s = sigma, absolute. Over N elements its norm is sigma * sqrt(N), more than a large model's gradient.
    ratio: s = ratio * ||g|| / sqrt(N), so that the noise has `ratio` times the gradient's norm.

    The noise depends on (seed, step, parameter name, place), never on the partitioning, and is the same on any topology
    of one device type. A parameter's flattened elements fall into fixed blocks. Each block's noise comes from a
    generator of its own, is drawn whole, and is then cut to what this rank holds:

        blocks     |----- 0 -----|----- 1 -----|--- 2 (tail unused)
        rank 1              [=================]       draws 0, 1, 2 whole, uses the marked part

    So two ranks that share a block draw it twice and agree. The draw is float32 also for float64 gradients, so that
    the precision of a run does not change its noise.
    """

    sigma: float = 0.0
    ratio: float = 0.0
    name = "gradient_noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        smaller, larger = sorted((self.sigma, self.ratio))
        if smaller != 0 or larger == 0:
            raise ValueError(
                f"sigma is {self.sigma} and ratio {self.ratio} "
                "but exactly one of them must be set, to a number above 0"
            )

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm = gradients.norm()
        root = math.sqrt(gradients.numel)
        sigma = self.sigma + self.ratio * norm / root  # one of them is 0
        slices = gradients.slices()
        noise = torch.empty(NOISE_BLOCK, dtype=torch.float32, device=slices[0].device)
        for entry, grad in zip(gradients.entries, slices):
            block, skipped = divmod(entry.start, NOISE_BLOCK)
            while len(grad):
                noise.normal_(
                    generator=keyed_generator(
                        noise.device, context.seed, context.step, entry.name, block
                    )
                )
                part, grad = grad[: NOISE_BLOCK - skipped], grad[NOISE_BLOCK - skipped :]
                part.add_(noise[skipped:][: len(part)], alpha=sigma)
                block, skipped = block + 1, 0
        relative = sigma * root / norm if norm else 0.0
        return {"grad/noise_sigma": sigma, "grad/noise_to_gradient": relative}


@dataclass
class GradientCentralization(GradientPolicy):
    """Subtract from each row of a matrix's gradient its mean over all axes but the first (2004.01461, eq. 1).

    Vectors are left alone. Reports the norm that was removed. One all-reduce of the row sums makes the means exact
    although rows lie on several ranks.
    """

    name = "gradient_centralization"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        gradients.apply_factors()
        matrices = [e for e in gradients.entries if len(e.shape) > 1]
        if not matrices:
            return {"grad/centered_norm": 0.0}
        rows = [e.shape[0] for e in matrices]
        local_sums = torch.zeros(
            sum(rows), dtype=gradients.sum_dtype, device=matrices[0].grad.device
        )
        # a slice has at most one part of a row
        for part, total in _row_parts(matrices, local_sums):
            torch.sum(part, dim=1, dtype=gradients.sum_dtype, out=total)
        sums = gradients.all_reduce(local_sums.double())
        means = sums.clone()
        torch._foreach_div_(means.split(rows), [e.numel / e.shape[0] for e in matrices])
        for part, mean in _row_parts(matrices, means.to(gradients.sum_dtype)):
            part.sub_(mean[:, None])
        return {"grad/centered_norm": float((sums * means).sum().sqrt())}


def _row_parts(
    entries: Sequence[GradientSlice], values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every part of matrices' slices that lies in whole rows or in one row, [rows, length], and its rows' values.

        row 3            row 4            row 5            row 6
        ......[ head ][ whole row ][ whole row ][ tail ]......       a slice may begin and end inside a row

    `values` [R] holds a number for each row, and views of it are returned.
    """
    for entry, of_rows in zip(entries, values.split([e.shape[0] for e in entries])):
        size = len(entry.grad)
        length = entry.numel // entry.shape[0]
        row = entry.start // length
        head = min(size, -entry.start % length)
        tail = (size - head) % length
        for part in entry.grad.split([head, size - head - tail, tail]):
            if len(part):
                part = part.view(-1, min(length, len(part)))
                yield part, of_rows[row : row + len(part)]
                row += len(part)


@dataclass
class ScaleSmallGradients(GradientPolicy):
    """Multiply by `factor` every parameter's gradient whose mean |g|, as it is now, is below `threshold`.

    Under Adam a constant factor cancels; only a change of the factor matters, for a while.
    """

    threshold: float = 1e-4
    factor: float = 1.5
    name = "scale_small_gradients"
    reads = ("mean_abs",)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        (means,) = gradients.measure("mean_abs")
        small = [mean < self.threshold for mean in means]
        if any(small):
            torch._foreach_mul_([*compress(gradients.slices(), small)], self.factor)
        return {"grad/scaled_parameters": float(sum(small))}


@dataclass
class BoostLearningRate(GradientPolicy):
    """Multiply the learning rate of this step by `factor`.

    The schedule itself does not change, so nothing compounds: the next step starts from the schedule again.
    """

    factor: float = 1.2
    name = "boost_learning_rate"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        context.lr_scale *= self.factor
        return {}


@dataclass
class UlyssesPro(GradientPolicy):
    """Treat vanishing and exploding gradients by five rules, which one number decides before any of them acts.

    The multi-strategy gradient handling of March 2025, with its absolute thresholds, kept for comparison. The number is
    the mean over parameters of each one's mean |g|.

    Late in the run, where step > 0.9 * total_steps (the first step is 0), two of the rules are weaker and one is off,
    as in the original. Clipping is by the norm of all parameters together, for PPO too. A gradient of norm 1 over N
    elements has elements of about 0.8 / sqrt(N): in a large model every gradient counts as vanishing, and the noise
    exceeds it.
    """

    max_norm: float = 1.0
    name = "ulysses_pro"
    reads = ("mean_abs",)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        mean_abs = gradients.mean_abs()
        vanishing, exploding = mean_abs < 1e-3, mean_abs > 5.0
        late = context.step > 0.9 * context.total_steps
        rules: list[tuple[bool, GradientPolicy]] = [
            (vanishing, GradientNoise(sigma=1e-5 if late else 1e-4)),
            (vanishing, ScaleSmallGradients(threshold=1e-4, factor=1.1 if late else 1.5)),
            (vanishing and not late, BoostLearningRate(1.2)),
            (vanishing, GradientCentralization()),
            (exploding, ClipGlobalNorm(self.max_norm, together=True)),
        ]
        report = {"grad/mean_abs": mean_abs}
        for holds, policy in rules:
            report[f"grad/active/{policy.name}"] = float(holds)
            if holds:
                report |= policy.apply(gradients, context)
        return report
