"""Clip each unit's gradient by the size of its weights."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class AdaptiveGradientClipping(GradientPolicy):
    """Scale each unit by min(1, clipping * max(||w||, eps) / ||g||) (AGC, 2102.06171, eq. 3).

    A unit is a row of a matrix (one output), or a whole vector; rows that straddle ranks are exact. Parameters whose
    name contains one of `exclude` are left alone (the paper leaves out the last layer). Needs the weights' values.
    """

    name: ClassVar[str] = "adaptive_gradient_clipping"

    def __init__(
        self,
        clipping: float = 0.01,
        eps: float = 1e-3,
        exclude: Sequence[str] = ("lm_head", "score"),
    ) -> None:
        if clipping <= 0 or eps <= 0:
            raise ValueError(f"clipping is {clipping} and eps {eps} but both must be above 0")
        self.clipping, self.eps, self.exclude = clipping, eps, tuple(exclude)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        weights, grads = gradients.row_norms()
        limits = self.clipping * weights.clamp(min=self.eps)
        over = grads > limits  # a zero gradient needs no factor, a non-finite one no guess
        for index, name in enumerate(gradients.names):
            if any(part in name for part in self.exclude):
                over[gradients.row_slice(index)] = False
        clipped = float(over.double().mean()) if over.numel() else 0.0
        if clipped:
            gradients.scale_rows(torch.where(over, limits / grads, 1.0))
        return {"grad/agc_clipped": clipped}
