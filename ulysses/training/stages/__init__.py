"""The stages by name: one file each, and their shared parts in base.py and referenced.py."""

from ulysses.training.stages.base import Stage
from ulysses.training.stages.dpo import DpoStage
from ulysses.training.stages.kto import KtoStage
from ulysses.training.stages.ppo import PpoStage
from ulysses.training.stages.pt import PtStage
from ulysses.training.stages.rm import RmStage
from ulysses.training.stages.sft import SftStage

STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (PtStage, SftStage, RmStage, DpoStage, KtoStage, PpoStage)
}
