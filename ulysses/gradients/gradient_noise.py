"""Add Gaussian noise to the gradient."""

import math
from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class GradientNoise(GradientPolicy):
    """Add N(0, s^2) to every element; give exactly one of the three ways to choose s.

    sigma: s = sigma, absolute (over N elements its norm is sigma * sqrt(N): on large models more than the gradient).
    ratio: s = ratio * ||g|| / sqrt(N), so the noise has `ratio` times the gradient's norm.
    eta:   s^2 = eta / (1 + step)^decay, annealed (1511.06807, eq. 1; eta 0.01, 0.3 or 1, decay 0.55).
    The same noise on any topology of one device type; none is drawn for padding.
    """

    name: ClassVar[str] = "gradient_noise"
    reads: tuple[str, ...] = ("norm",)

    def __init__(
        self,
        sigma: float | None = None,
        ratio: float | None = None,
        eta: float | None = None,
        decay: float = 0.55,
    ) -> None:
        given = {
            k: v for k, v in (("sigma", sigma), ("ratio", ratio), ("eta", eta)) if v is not None
        }
        if len(given) != 1:
            raise ValueError(
                f"gradient_noise was given {sorted(given) or 'nothing'} but needs one of sigma, ratio or eta"
            )
        if min(given.values()) < 0:
            raise ValueError(f"{given} must be at least 0 (0 draws no noise)")
        self.sigma, self.ratio, self.eta, self.decay = sigma, ratio, eta, decay

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm, root = gradients.norm(), math.sqrt(max(gradients.numel, 1))
        if self.sigma is not None:
            sigma = self.sigma
        elif self.ratio is not None:
            sigma = self.ratio * norm / root
        else:
            sigma = math.sqrt((self.eta or 0.0) / (1 + context.step) ** self.decay)
        gradients.add_noise(sigma, seed=context.seed, step=context.step)
        return {
            "grad/noise_sigma": sigma,
            "grad/noise_to_gradient": sigma * root / norm if norm else 0.0,
        }
