"""What is wrong with settings of experts, for a model that has them."""

from collections.abc import Iterator, Mapping

from models.arch import ModelConfig
from models.expert_files import MLP_TARGETS
from ulysses.config.schema import LoraSection, ModelSection


def router_errors(model: ModelSection, given: Mapping[str, object]) -> Iterator[str]:
    """Yield why the routers' loss has no effect; `given` are their settings that are not the defaults."""
    if "router_aux_loss_coefficient" in given and (model.freeze_router or model.lora.rank):
        why = "model.freeze_router" if model.freeze_router else "model.lora.rank"
        yield (
            f"model.router_aux_loss_coefficient is {model.router_aux_loss_coefficient:g} but {why} is set, which "
            "trains no router; set it to 0"
        )


def adapter_errors(lora: LoraSection, shape: ModelConfig) -> Iterator[str]:
    """Yield why adapters of experts cannot be trained as asked, or not be exported for PEFT."""
    of_mlp = sorted({*lora.targets} & {*MLP_TARGETS})
    if not lora.rank or not of_mlp:
        return
    if ("gate_proj" in of_mlp) != ("up_proj" in of_mlp):
        yield (
            f"model.lora.targets has {' and '.join(of_mlp)}, but experts hold gate_proj and up_proj in one matrix; "
            "name both or none"
        )
    dense = [i for i, kind in enumerate(shape.layers) if kind.feed_forward == "mlp"]
    if dense:
        yield (
            f"model.lora.targets has {', '.join(of_mlp)}, but PEFT loads no adapters of the MLP in layer {dense[0]} "
            "beside those of experts in others; name q_proj, k_proj, v_proj and o_proj only"
        )
    if lora.dropout:
        yield (
            f"model.lora.dropout is {lora.dropout:g} but adapters of experts have none; set it to 0, or take "
            f"{', '.join(of_mlp)} out of model.lora.targets"
        )
