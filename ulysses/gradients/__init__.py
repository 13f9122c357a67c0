"""Gradient policies: small objects that see and change the gradient once per optimizer step. Needs torch alone.

chain = build_chain(preset_tables("steady"))
loss.backward()
context = StepContext(step=k, total_steps=n, loss=loss.item(), lr=lr, seed=0)
metrics = chain.apply(TorchGradients(model.named_parameters()), context)
if not context.skip: ...                      # step with lr * context.lr_scale
"""

from ulysses.gradients.adaptive_gradient_clipping import AdaptiveGradientClipping
from ulysses.gradients.auto_clip import AutoClip
from ulysses.gradients.boost_learning_rate import BoostLearningRate
from ulysses.gradients.build import GRADIENT_POLICIES, build_chain, build_condition, build_policy
from ulysses.gradients.chain import GradientPolicy, GradientPolicyChain, Report, Scoped, StepContext
from ulysses.gradients.clip_global_norm import ClipGlobalNorm
from ulysses.gradients.clip_mean_abs import ClipMeanAbs
from ulysses.gradients.conditions import Condition, MeanAbs, NormZ, When
from ulysses.gradients.gradient_centralization import GradientCentralization
from ulysses.gradients.gradient_noise import GradientNoise
from ulysses.gradients.gradients import Gradients, GradientSlice, TorchGradients
from ulysses.gradients.non_finite import SkipNonFinite, StopOnNonFinite
from ulysses.gradients.presets import (
    PRESETS,
    explain_thresholds,
    preset_tables,
    preset_toml,
    tables_to_toml,
)
from ulysses.gradients.scale_small_gradients import ScaleSmallGradients
from ulysses.gradients.skip_spike import SkipSpike
from ulysses.gradients.table import GradientTable, gradient_table
from ulysses.gradients.zclip import ZClip

__all__ = [
    "GRADIENT_POLICIES",
    "PRESETS",
    "AdaptiveGradientClipping",
    "AutoClip",
    "BoostLearningRate",
    "ClipGlobalNorm",
    "ClipMeanAbs",
    "Condition",
    "GradientCentralization",
    "GradientNoise",
    "GradientPolicy",
    "GradientPolicyChain",
    "GradientSlice",
    "GradientTable",
    "Gradients",
    "MeanAbs",
    "NormZ",
    "Report",
    "ScaleSmallGradients",
    "Scoped",
    "SkipNonFinite",
    "SkipSpike",
    "StepContext",
    "StopOnNonFinite",
    "TorchGradients",
    "When",
    "ZClip",
    "build_chain",
    "build_condition",
    "build_policy",
    "explain_thresholds",
    "gradient_table",
    "preset_tables",
    "preset_toml",
    "tables_to_toml",
]
