"""Gradient policies that change the gradient's direction, or the length of one step."""

import math
from dataclasses import dataclass

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import GradientPolicy, Report, StepContext


@dataclass
class GradientNoise(GradientPolicy):
    """Add N(0, s^2) to every element; set either sigma or ratio to choose s.

    sigma: s = sigma, absolute. Over N elements its norm is sigma * sqrt(N), more than a large model's gradient.
    ratio: s = ratio * ||g|| / sqrt(N), so that the noise has `ratio` times the gradient's norm.
    The noise is the same on any topology of one device type.
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
        norm, root = gradients.norm(), math.sqrt(gradients.numel)
        sigma = self.sigma + self.ratio * norm / root  # one of them is 0
        gradients.add_noise(sigma, seed=context.seed, step=context.step)
        relative = sigma * root / norm if norm else 0.0
        return {"grad/noise_sigma": sigma, "grad/noise_to_gradient": relative}


@dataclass
class GradientCentralization(GradientPolicy):
    """Subtract from each row of a matrix's gradient its mean over all axes but the first (2004.01461, eq. 1).

    Vectors are left alone. Reports the norm that was removed.
    """

    name = "gradient_centralization"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        return {"grad/centered_norm": gradients.center()}


@dataclass
class ScaleSmallGradients(GradientPolicy):
    """Multiply by `factor` every parameter whose mean |g|, as it is now, is below `threshold`.

    Under Adam a constant factor cancels; only a change of the factor matters, for a while.
    """

    threshold: float = 1e-4
    factor: float = 1.5
    name = "scale_small_gradients"
    reads = ("mean_abs",)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        (means,) = gradients.measure("mean_abs")
        small = [mean < self.threshold for mean in means]
        gradients.scale_parameters([self.factor if is_small else 1.0 for is_small in small])
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
