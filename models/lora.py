"""Low-rank adapters of our linear modules and experts; only they are trained, saved and exported.

    y = W x + alpha / rank * B A x        W frozen and partitioned; A random, B zero: training starts at the base model

The base with its adapters switched off is the reference of DPO and KTO, so that no second model is needed.
Source: Hu et al. 2021 (2106.09685). The exported files have PEFT's format.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.expert_files import MLP_TARGETS, adapted_experts, is_of_experts, peft_tensor
from models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, VOCABULARY
from models.hf_format import lora_scale
from models.modules import Linear
from models.moe import ExpertMatrices
from models.multimodal import OUTSIDE
from models.ops.linear import Adapter, Matrix
from ulysses.disk import write_json, write_tensors

# of modules that are saved whole
WHOLE = "score.weight", "embed_tokens.weight", "lm_head.weight"


class LoraLinear(Linear):
    """A frozen linear module with an adapter: a parameter lora_A [r, D], and lora_B [N, r]."""

    is_on = True

    def __init__(self, base: Linear, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)
        D, N = base.in_features, base.out_features
        self.in_features, self.out_features, self.packed = D, N, base.packed
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, dropout
        like = base.weight if base.packed is None else torch.empty(0, device=base.weight.device)
        self.lora_A = nn.Parameter(like.new_empty(rank, D))
        self.lora_B = nn.Parameter(like.new_empty(N, rank))

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off."""
        self.is_on = enabled

    def operands(self) -> Matrix:
        plain = super().operands()
        if not self.is_on:
            return plain
        dropout = self.dropout if self.training else 0.0
        return plain._replace(adapter=Adapter(self.lora_A, self.lora_B, self.scale, dropout))


def add_adapters(model: Any, config: Any) -> Any:
    """Add adapters to the target modules, freeze everything else but a score head, and return the model.

    Works while the model is created in partitions: no value is drawn here, since InitialWeights provides them.
    """
    model.requires_grad_(False)
    scale = lora_scale(config.rank, config.alpha, config.rslora)
    targets = _module_targets(config, dict(model.named_parameters()))
    layers = dict(model.model.layers.named_modules())
    for name, module in layers.items():
        if isinstance(module, Linear) and any(f".{name}".endswith(f".{t}") for t in targets):
            parent, _, last = name.rpartition(".")
            made = LoraLinear(module, config.rank, scale, config.dropout)
            setattr(layers[parent], last, made)
        if isinstance(module, ExpertMatrices):
            module.add_adapters(adapted_experts(config.targets), config.rank, scale)
    for name, parameter in model.named_parameters():
        if is_adapter(name, config.train):
            parameter.requires_grad_(True)
    return model


def _module_targets(config: Any, parameters: Collection[str]) -> list[str]:
    """Return the targets that are modules, by as much of their names as tells them from experts' matrices."""
    if not any(".experts." in name for name in parameters):
        return list(config.targets)
    others = [t for t in config.targets if t not in MLP_TARGETS]
    of_mlps = [t for t in config.targets if t in MLP_TARGETS]
    modules = [f"{mlp}.{target}" for mlp in ("mlp", "shared_expert") for target in of_mlps]
    return others + [m for m in modules if any(f".{m}." in name for name in parameters)]


def is_adapter(name: str, whole: Sequence[str] = ()) -> bool:
    """Return whether a parameter is trained although the base is frozen: an adapter's, or the score head.

    `whole` is model.lora.train.
    """
    return (
        ".lora_" in name
        or name.endswith("score.weight")
        or (bool(whole) and name in VOCABULARY)
    )


@dataclass
class BasePolicy:
    """The engine with its adapters switched off: a reference without a second model. It owns nothing."""

    engine: Any

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients and adapters."""
        kinds = LoraLinear, ExpertMatrices
        layers: Any = [m for m in self.engine.module.modules() if isinstance(m, kinds)]
        with self.engine.inference():
            for layer in layers:
                layer.enable_adapters(False)
            try:
                yield
            finally:
                for layer in layers:
                    layer.enable_adapters(True)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.engine(*args, **kwargs)


def save_adapters(
    folder: Path,
    tensors: dict[str, Tensor],
    config: Any,
    *,
    reward: bool,
    by_parameter: bool = False,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json as PEFT reads them.

    Args:
        by_parameter: beside experts, modules of MLPs are named by their weights, as the family's mlp_by_parameter says.
        tensors: adapters (and score head) by the parameter names of the class that they are for.
        config: names the base model, which is written as an absolute path or a hub id.
    """
    base = config.path if config.init == "pretrained" else None
    if base and Path(expanduser(base)).is_dir():
        base = str(Path(expanduser(base)).absolute())
    is_whole = any(name.startswith(OUTSIDE) for name in tensors)
    modules = {n.split(".")[-2]: n for n in tensors if n.endswith(WHOLE)}
    if "embed_tokens" in modules and "lm_head" not in modules and not reward:
        # PEFT ties no copy of a module
        tensors = tensors | {VOCABULARY[1]: tensors[modules["embed_tokens"]].clone()}
        modules["lm_head"] = VOCABULARY[1]
    experts = adapted_experts(config.lora.targets) if any(map(is_of_experts, tensors)) else []
    named = {
        f"base_model.model.{name}": t.contiguous()
        for name, t in (peft_tensor(*item, experts) for item in tensors.items())
    }
    write_tensors(folder / ADAPTER_WEIGHTS, named, format="pt", quantize=config.quantize)
    lora = config.lora
    targets = _module_targets(lora, tensors)
    of_mlps = {t for t in targets if by_parameter and "." in t}
    parameters = [f"experts.{name}" for name in experts]
    parameters += sorted(f"{module}.weight" for module in of_mlps)
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
        # the vision model may have a q_proj too
        "exclude_modules": r"model\.(?!language_model\.).*" if is_whole else None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,  # B of what a file lacks is zero
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": [*modules] or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": config.revision,
        "target_modules": sorted(t for t in targets if t not in of_mlps) or None,
        "target_parameters": parameters or None,
        "task_type": "SEQ_CLS" if reward else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }
    write_json(folder / ADAPTER_CONFIG, settings)
