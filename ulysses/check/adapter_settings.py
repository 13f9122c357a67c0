"""Settings of adapters that the model's shape decides: what is wrong with them, and which defaults they take."""

from collections.abc import Iterator
from pathlib import Path

from models.arch import ModelConfig
from models.expert_files import EXPERT_PARTS, MLP_TARGETS
from models.folders import ADAPTER_CONFIG, base_folder, name_of_base, read_adapter_config
from models.kinds import empty_model
from ulysses.config.schema import (
    FUSED_TARGETS,
    RULE_TARGETS,
    SEPARATE_TARGETS,
    Config,
    LoraSection,
)
from ulysses.stages.base import Stage


def check_adapters(config: Config, shape: ModelConfig) -> Iterator[str]:
    """Yield why adapters cannot be trained as the settings say, or why their base cannot be quantised."""
    lora = config.model.lora
    if lora.rank > shape.hidden_size:
        yield (
            f"model.lora.rank: is {lora.rank} but the model's matrices are {shape.hidden_size} wide; set a "
            "smaller one (8 to 64 are usual), or 0 to train all weights"
        )
    yield from _missing_targets(lora, shape)
    if shape.moe:
        yield from _errors_of_experts(lora)
    if (kind := config.model.quantize) != "none":
        try:
            empty_model(shape, quantize=kind)
        except ValueError as error:
            yield f'model.quantize is "{kind}" but {error}; set it to "none"'


def _missing_targets(lora: LoraSection, shape: ModelConfig) -> Iterator[str]:
    """Yield which targets name projections of linear attention that the model does not have."""
    possible = rule_targets(shape)
    lacking = sorted({*lora.targets} & {*RULE_TARGETS} - {*possible})
    if lacking:
        has = "it has no linear attention"
        if possible:
            has = f"of linear attention it has {', '.join(sorted(possible))}"
        yield (
            f"model.lora.targets has {', '.join(lacking)}, which this model lacks: {has}; correct the list"
        )


def _errors_of_experts(lora: LoraSection) -> Iterator[str]:
    """Yield why adapters of experts cannot be trained as the settings say, or not be exported for PEFT."""
    of_mlp = sorted({*lora.targets} & {*MLP_TARGETS})
    if ("gate_proj" in of_mlp) != ("up_proj" in of_mlp):
        yield (
            f"model.lora.targets has {' and '.join(of_mlp)}, but experts hold gate_proj and up_proj in one matrix; "
            "name both or none"
        )
    if of_mlp and lora.dropout:
        yield (
            f"model.lora.dropout is {lora.dropout:g} but adapters of experts have none; set it to 0, or take "
            f"{', '.join(of_mlp)} out of model.lora.targets"
        )


def choose_targets(config: Config, shape: ModelConfig) -> Config:
    """Add the modules of linear attention to the adapters' targets where nobody has set these."""
    lora = config.model.lora
    if "targets" in lora.model_fields_set:
        return config
    targets = [*lora.targets, *rule_targets(shape)]
    model = {"lora": lora.model_copy(update={"targets": targets})}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def choose_base(stage: Stage, folder: Path) -> Config:
    """Decide what becomes of an adapter in the model's folder, if there is one: it is continued, or merged.

    An adapter with the settings of the run is continued: the run has its base, and starts from its A and B. Any other
    one is merged. Since no folder holds such a base, exports are whole models then. An adapter is merged too if the
    stage compares with the model that training starts from, because the base without adapters stands for that model.
    """
    config = stage.config
    if not (folder / ADAPTER_CONFIG).is_file():
        return config
    lora = config.model.lora
    raw = read_adapter_config(folder)
    named = [*raw["target_modules"], *raw["target_parameters"]]
    lasts = [str(name).removesuffix(".weight").rpartition(".")[2] for name in named]
    targets = {target for last in lasts for target in EXPERT_PARTS.get(last, (last,))}
    whole = "embed_tokens" in raw["modules_to_save"]
    theirs = raw["r"], raw["lora_alpha"], raw["use_rslora"], targets, whole
    ours = lora.rank, lora.alpha, lora.rslora, {*lora.targets}, bool(lora.train)
    has_whole_base = not (base_folder(folder, need_weights=False) / ADAPTER_CONFIG).is_file()
    compares = not all(model.path for model in stage.requirements.models)
    model = {"lora": lora.model_copy(update={"merge": True})}
    if theirs == ours and has_whole_base and not compares:
        model = dict(zip(("path", "revision"), name_of_base(folder)))
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def rule_targets(shape: ModelConfig) -> tuple[str, ...]:
    """Return which modules of linear attention may have an adapter."""
    if not shape.delta:
        return ()
    names = FUSED_TARGETS if shape.family.fused_projections else SEPARATE_TARGETS
    return *names, "out_proj"
