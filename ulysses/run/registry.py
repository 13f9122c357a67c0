"""The stages by name, and what each needs of the planner, the data loader and the builder."""

from ulysses.config.schema import Config
from ulysses.rl.ppo import PpoStage
from ulysses.stages.base import Requirements, Stage
from ulysses.stages.distill import DistillStage
from ulysses.stages.dpo import DpoStage
from ulysses.stages.kto import KtoStage
from ulysses.stages.pt import PtStage
from ulysses.stages.rm import RmStage
from ulysses.stages.sft import SftStage

STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (PtStage, SftStage, DistillStage, RmStage, DpoStage, KtoStage, PpoStage)
}


def requirements(config: Config) -> Requirements:
    """Return what follows from the stage's settings."""
    return STAGES[config.stage].requirements(config)
