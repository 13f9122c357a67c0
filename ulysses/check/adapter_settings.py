"""What is wrong with settings of adapters, once the model's shape is known; imported where there are adapters."""

from collections.abc import Iterator

from models.arch import ModelConfig
from ulysses.check.setting_checks import rule_targets
from ulysses.config.schema import RULE_TARGETS, LoraSection


def check_adapters(lora: LoraSection, shape: ModelConfig) -> Iterator[str]:
    """Yield why adapters cannot be trained as asked."""
    if lora.rank > shape.hidden_size:
        yield (
            f"model.lora.rank: is {lora.rank} but the model's matrices are {shape.hidden_size} wide; set a "
            "smaller one (8 to 64 are usual), or 0 to train all weights"
        )
    yield from _missing_targets(lora, shape)
    if shape.moe:
        yield from _errors_of_experts(lora, shape)


def _missing_targets(lora: LoraSection, shape: ModelConfig) -> Iterator[str]:
    """Yield which of the adapters' targets among the projections of linear attention the model does not have."""
    own = rule_targets(shape)
    lacking = sorted({*lora.targets} & {*RULE_TARGETS} - {*own})
    if lacking:
        has = (
            f"of linear attention it has {', '.join(sorted(own))}"
            if own
            else "it has no linear attention"
        )
        yield (
            f"model.lora.targets has {', '.join(lacking)}, which this model lacks: {has}; correct the list"
        )


def _errors_of_experts(lora: LoraSection, shape: ModelConfig) -> Iterator[str]:
    """Yield why adapters of experts cannot be trained as asked, or not be exported for PEFT."""
    from models.expert_files import MLP_TARGETS

    of_mlp = sorted({*lora.targets} & {*MLP_TARGETS})
    if not of_mlp:
        return
    if ("gate_proj" in of_mlp) != ("up_proj" in of_mlp):
        yield (
            f"model.lora.targets has {' and '.join(of_mlp)}, but experts hold gate_proj and up_proj in one matrix; "
            "name both or none"
        )
    if lora.dropout:
        yield (
            f"model.lora.dropout is {lora.dropout:g} but adapters of experts have none; set it to 0, or take "
            f"{', '.join(of_mlp)} out of model.lora.targets"
        )
