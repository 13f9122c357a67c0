"""The parts that a configuration names, and the module and class of each; a part is imported when a run asks for it."""

from importlib import import_module
from typing import Any

from ulysses.config.schema import Config, GradientsSection
from ulysses.gradients.chain import GradientPolicyChain, build_chain

STAGES = {
    "pt": "ulysses.stages.pt:PtStage",
    "sft": "ulysses.stages.sft:SftStage",
    "distill": "ulysses.stages.distill:DistillStage",
    "rm": "ulysses.stages.rm:RmStage",
    "dpo": "ulysses.stages.dpo:DpoStage",
    "kto": "ulysses.stages.kto:KtoStage",
    "ppo": "ulysses.rl.ppo:PpoStage",
}
# run.trackers; the package that each needs has its name
TRACKERS = {
    "tensorboard": "ulysses.run.trackers.tensorboard:TensorBoard",
    "wandb": "ulysses.run.trackers.wandb:Wandb",
    "mlflow": "ulysses.run.trackers.mlflow:Mlflow",
    "trackio": "ulysses.run.trackers.trackio:Trackio",
    "swanlab": "ulysses.run.trackers.swanlab:Swanlab",
}
# what decodes PPO's answers
SAMPLERS = {
    "engine": "ulysses.rl.engine_sampler:EngineSampler",
    "servers": "ulysses.rl.outside_sampler:OutsideSampler",
}


def load(place: str) -> Any:
    """Import what a place such as "package.module:name" names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def stage_of(config: Config) -> Any:
    """Return the stage of a configuration, an ulysses.stages.base.Stage that is not yet built around an engine."""
    return load(STAGES[config.stage])(config)


def gradient_policies(settings: GradientsSection) -> GradientPolicyChain:
    """Build the chain of gradient policies; ValueError names the table and the key that cannot be honoured."""
    return build_chain(settings.policies or settings.preset, settings.max_norm)
