"""The stages by name; each is imported when a run asks for it."""

from importlib import import_module
from typing import Any

from ulysses.config.schema import Config

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
