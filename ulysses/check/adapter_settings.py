"""Settings of adapters, once the model's shape is known: what is wrong with them, and default targets."""

from collections.abc import Iterator
from pathlib import Path

from models.arch import ModelConfig
from models.expert_files import MLP_TARGETS
from models.folders import ADAPTER_CONFIG, base_folder, name_of_base, read_adapter_config
from models.kinds import empty_model
from ulysses.config.schema import RULE_TARGETS, Config, LoraSection
from ulysses.config.section import Values
from ulysses.stages.base import Stage


def check_adapters(lora: LoraSection, shape: ModelConfig, config: Config) -> Iterator[str]:
    """Yield why adapters cannot be trained as asked, or their base cannot be quantised."""
    if lora.rank > shape.hidden_size:
        yield (
            f"model.lora.rank: is {lora.rank} but the model's matrices are {shape.hidden_size} wide; set a "
            "smaller one (8 to 64 are usual), or 0 to train all weights"
        )
    yield from _missing_targets(lora, shape)
    if shape.moe:
        yield from _errors_of_experts(lora, shape)
    if (kind := config.model.quantize) != "none":
        try:
            empty_model(shape, quantize=kind)
        except ValueError as error:
            yield f'model.quantize is "{kind}" but {error}; set it to "none"'


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


def choose_targets(config: Config, lora: LoraSection, shape: ModelConfig) -> Config:
    """Add the modules of linear attention to the adapters' targets where nobody has set these."""
    if "targets" in lora.model_fields_set:
        return config
    targets = [*lora.targets, *rule_targets(shape)]
    model = {"lora": lora.model_copy(update={"targets": targets})}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def choose_base(config: Config, stage: Stage, folder: Path) -> Config:
    """Name the base of the adapters if there is an adapter in the model's folder.

    One with the settings of the run is continued: its base is the run's, and its A and B are the start. Another one is
    merged, into a base that lies in no folder, so that exports are whole models. It is merged too where the stage
    compares with the model that training starts from, which is the base without the run's adapters.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return config
    lora, raw = config.model.lora, read_adapter_config(folder)
    named = [*(raw.get("target_modules") or ()), *(raw.get("target_parameters") or ())]
    lasts = [str(name).removesuffix(".weight").rpartition(".")[2] for name in named]
    targets = {*" ".join(lasts).replace("gate_up_proj", "gate_proj up_proj").split()}
    whole = "embed_tokens" in (raw.get("modules_to_save") or ())
    given = raw["r"], raw.get("lora_alpha") or 8, bool(raw.get("use_rslora")), targets, whole
    own = lora.rank, lora.alpha, lora.rslora, {*lora.targets}, bool(lora.train)
    is_plain = not (base_folder(folder, need_weights=False) / ADAPTER_CONFIG).is_file()
    model: Values = {"lora": lora.model_copy(update={"merge": True})}
    if given == own and is_plain and all(x.path for x in stage.requirements.models):
        model = dict(zip(("path", "revision"), name_of_base(folder)))
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def rule_targets(shape: ModelConfig) -> tuple[str, ...]:
    """Return which modules of linear attention may have an adapter."""
    if not shape.delta:
        return ()
    if shape.family.fused_projections:
        return RULE_TARGETS[4:]
    return *RULE_TARGETS[:4], RULE_TARGETS[-1]
