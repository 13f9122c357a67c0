"""What a configuration names: its stage, which is imported when a run asks for it, and its gradient policies."""

from importlib import import_module
from typing import Any

from ulysses.config.schema import Config, GradientsSection
from ulysses.gradients.chain import GradientPolicyChain, build_chain

# the module and the class
STAGES = {
    "pt": "ulysses.stages.pt:PtStage",
    "sft": "ulysses.stages.sft:SftStage",
    "distill": "ulysses.stages.distill:DistillStage",
    "rm": "ulysses.stages.rm:RmStage",
    "dpo": "ulysses.stages.dpo:DpoStage",
    "kto": "ulysses.stages.kto:KtoStage",
    "ppo": "ulysses.rl.ppo:PpoStage",
}


def stage_class(name: str) -> Any:
    """Return the class of a stage, derived from ulysses.stages.base.Stage."""
    module, _, found = STAGES[name].partition(":")
    return getattr(import_module(module), found)


def stage_of(config: Config) -> Any:
    """Return the stage of a configuration, not yet built around an engine."""
    return stage_class(config.stage)(config)


def gradient_policies(settings: GradientsSection) -> GradientPolicyChain:
    """Build the chain of gradient policies; ValueError names the table and the key that cannot be honoured."""
    return build_chain(settings.policies or settings.preset, settings.max_norm)
