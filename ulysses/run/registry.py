"""The stages by name."""

from ulysses.config.schema import Config
from ulysses.rl.ppo import PpoStage
from ulysses.stages.base import Stage
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


def stage_of(config: Config) -> Stage:
    """Return the stage of a configuration, not yet built around an engine."""
    return STAGES[config.stage](config)
