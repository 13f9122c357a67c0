"""All gradient policies: they leave a step out or end the run, bound the gradient, or change it in other ways."""

import math
import statistics
from dataclasses import dataclass, field

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import GradientPolicy, Report, StepContext

# --- what leaves a step out or ends the run ----------------------------------------------------------------------


@dataclass
class StopOnNonFinite(GradientPolicy):
    """Stop the run before the weights change, naming the step and the parameters."""

    name = "stop_on_non_finite"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        context.stop = _what_is_not_finite(gradients, context)
        return {}


@dataclass
class SkipNonFinite(GradientPolicy):
    """Skip the step, and stop the run after more than `limit` such steps in a row (bad weights never recover)."""

    limit: int = 3
    consecutive: int = field(default=0, init=False)
    name = "skip_non_finite"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        reason = _what_is_not_finite(gradients, context)
        self.consecutive = self.consecutive + 1 if reason else 0
        if self.consecutive > self.limit:
            context.stop = f"{reason}; {self.consecutive} steps in a row were not finite (limit {self.limit})"
        else:
            context.skip = reason
        return {}


def _what_is_not_finite(gradients: Gradients, context: StepContext) -> str | None:
    """Return a sentence that names the bad loss or up to three bad parameters; None if all is finite."""
    found = [] if math.isfinite(context.loss) else [f"the loss is {context.loss}"]
    if not math.isfinite(gradients.norm()):
        (counts,) = gradients.measure("nonfinite")
        bad = [entry.name for entry, count in zip(gradients, counts) if count]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        found.append(
            f"{sum(counts):.0f} gradient elements are inf or nan, in {', '.join(bad[:3])}{more}"
            if bad
            else "the gradient norm overflows float32, though every element is finite"
        )
    # steps are counted from 1, as in metrics.jsonl
    return f"step {context.step + 1}: {' and '.join(found)}" if found else None


@dataclass
class SkipSpike(GradientPolicy):
    """Skip a step whose loss or norm lies more than `sigma` deviations above its mean of the last `window` steps.

    Source: OLMo's skip-step optimizer (6 and 128 there). Nothing is skipped before `warmup` steps are known. Every
    finite step enters the window, also a skipped one, so that a lasting change of level is accepted after a while. A
    deviation is at least 1% of the mean, so that small changes after a flat stretch do not look like spikes.
    """

    sigma: float = 6.0
    window: int = 128
    warmup: int = 32
    # loss and norm of steps
    recent: list[list[float]] = field(default_factory=list, init=False)
    name = "skip_spike"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.warmup <= self.window:
            raise ValueError(
                f"window is {self.window} and warmup {self.warmup} but 2 <= warmup <= window is required"
            )

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        now, deviations = [context.loss, gradients.norm()], [0.0, 0.0]
        if len(self.recent) >= self.warmup:
            for i, past in enumerate(zip(*self.recent)):
                mean = statistics.fmean(past)
                spread = max(statistics.stdev(past), 0.01 * abs(mean), 1e-12)
                deviations[i] = (now[i] - mean) / spread
        for what, value, z in zip(("loss", "gradient norm"), now, deviations):
            if z > self.sigma:
                seen = f"the {what} is {value:.4g}, {z:.1f} deviations above its recent mean"
                context.skip = f"step {context.step + 1}: {seen}"
        if all(map(math.isfinite, now)):
            self.recent = [*self.recent, now][-self.window :]
        return {"grad/loss_z": deviations[0], "grad/norm_z": deviations[1]}


# --- what bounds the gradient ------------------------------------------------------------------------------------


@dataclass
class ClipGlobalNorm(GradientPolicy):
    """g *= min(1, max_norm / (||g|| + 1e-6)), as torch's clip_grad_norm_ (Pascanu et al., 1211.5063).

    A run has one scope, except for PPO, where the policy's and the value's parameters are clipped each by its own norm.
    `together` clips all of them by their common norm. max_norm 0 does not clip.
    """

    max_norm: float = 1.0
    together: bool = False
    name = "clip_global_norm"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        scopes = [None] if self.together else dict.fromkeys(entry.group for entry in gradients)
        norms = {scope: gradients.norm(scope) for scope in scopes}  # before any edit
        report: Report = {}
        for scope, norm in norms.items():
            factor = 1.0
            if self.max_norm and math.isfinite(norm):
                factor = min(1.0, self.max_norm / (norm + 1e-6))
            gradients.scale(factor, scope)
            label = "grad"
            if len(norms) > 1:
                label = f"grad/{scope}"
                report[f"{label}/norm"] = norm
            report |= {f"{label}/clip_factor": factor, f"{label}/clipped": float(factor < 1)}
        return report


@dataclass
class ZClip(GradientPolicy):
    """If z = (||g|| - mu) / sd > threshold, scale the gradient to the norm mu + threshold^2 / z * sd (2504.02507).

    mu and the variance are exponential averages (`decay`) of the norms after clipping; the first `warmup` norms only
    initialise them. The more extreme a norm is, the closer it lands to mu. ClipGlobalNorm after it bounds all norms.
    """

    threshold: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    first: list[float] = field(default_factory=list, init=False)
    mean: float = field(default=0.0, init=False)
    variance: float = field(default=0.0, init=False)
    name = "zclip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay >= 1 or self.warmup < 2:
            raise ValueError(
                f"decay is {self.decay} and warmup {self.warmup} "
                "but decay must be below 1 and warmup at least 2"
            )

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm, z, factor = gradients.norm(), 0.0, 1.0
        if not math.isfinite(norm):
            return {}
        if len(self.first) < self.warmup:
            self.first = [*self.first, norm]
            self.mean = statistics.fmean(self.first)
            self.variance = statistics.pvariance(self.first)
        else:
            deviation = math.sqrt(self.variance) + 1e-6
            z = (norm - self.mean) / deviation
            if z > self.threshold:
                factor = (self.mean + self.threshold**2 / z * deviation) / norm
                gradients.scale(factor)
            clipped, share = factor * norm, 1 - self.decay
            self.mean += share * (clipped - self.mean)
            self.variance += share * ((clipped - self.mean) ** 2 - self.variance)
        return {"grad/zclip_z": z, "grad/zclip_factor": factor}


# --- what changes its direction, or the length of one step -------------------------------------------------------


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


@dataclass
class UlyssesPro(GradientPolicy):
    """Treat vanishing and exploding gradients by five rules, which one number decides before any of them acts.

    The multi-strategy gradient handling of March 2025, with its absolute thresholds, kept for comparison. The number is
    the mean over parameters of each one's mean |g|.

    Two of the rules are weaker late in the run, and one is off: where step > 0.9 * total_steps, the first step being 0,
    as the original has it. Clipping is by the norm of all parameters together, for PPO too. A gradient of norm 1 over N
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


GRADIENT_POLICIES: tuple[type[GradientPolicy], ...] = (
    StopOnNonFinite,
    SkipNonFinite,
    SkipSpike,
    ClipGlobalNorm,
    ZClip,
    GradientCentralization,
    GradientNoise,
    ScaleSmallGradients,
    BoostLearningRate,
    UlyssesPro,
)
