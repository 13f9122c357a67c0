"""The planner's view of models that a run holds beside the trained one."""

from collections.abc import Sequence
from contextlib import suppress

from models.arch import ModelConfig
from models.folders import read_config, resolve_model
from ulysses.plan.case import Case, Model, plain_model
from ulysses.stages.base import AuxiliaryModel


def with_models(case: Case, models: Sequence[AuxiliaryModel]) -> Case:
    """Return the case with these models, and with their passes."""
    shape = case.model.shape
    auxiliary = [(model, _auxiliary_model(model, shape)) for model in models]
    # a pass costs what its own model's size says
    own = plain_model(shape).forward_parameters
    passes = (model.passes * frozen.forward_parameters / own for model, frozen in auxiliary)
    return case._replace(
        forwards=sum(passes, start=case.forwards),
        others=tuple(frozen for model, frozen in auxiliary if not model.shares_weights),
        teacher=next((frozen for model, frozen in auxiliary if model.role == "teacher"), None),
    )


def _auxiliary_model(model: AuxiliaryModel, shape: ModelConfig) -> Model:
    """Return the planner's view of it; the initial policy, and a model that is not here, are as large as the policy."""
    with suppress(ValueError, OSError):
        if model.path:
            shape = read_config(resolve_model(model.path, need_weights=False))
    return plain_model(shape, reward=model.is_reward)
