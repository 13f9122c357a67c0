"""Low-rank adapters of linear modules and experts (LoRA); they alone are trained, saved and exported.

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
from models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LM_HEAD, VOCABULARY
from models.hf_format import lora_scale
from models.modules import Linear
from models.moe import ExpertMatrices
from models.multimodal import MULTIMODAL_PREFIX
from models.ops.linear import Adapter, Matrix
from ulysses.disk import write_json, write_tensors

# Endings of the names of weights whose modules PEFT saves whole.
WHOLE = "score.weight", "embed_tokens.weight", "lm_head.weight"


class LoraLinear(Linear):
    """A frozen linear module with an adapter, the parameters lora_A [r, D] and lora_B [N, r]."""

    is_on = True

    def __init__(self, base: Linear, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)
        D, N = base.in_features, base.out_features
        self.in_features, self.out_features, self.packed = D, N, base.packed
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, dropout
        # beside a quantised weight, whose bytes have no dtype to take, they have torch's default dtype
        like = base.weight if base.packed is None else torch.empty(0, device=base.weight.device)
        self.lora_A = nn.Parameter(like.new_empty(rank, D))
        self.lora_B = nn.Parameter(like.new_empty(N, rank))

    def operands(self) -> Matrix:
        plain = super().operands()
        if not self.is_on:
            return plain
        dropout = self.dropout if self.training else 0.0
        return plain._replace(adapter=Adapter(self.lora_A, self.lora_B, self.scale, dropout))


def add_adapters(model: Any, lora: Any) -> Any:
    """Add adapters to the target modules, freeze everything else but a score head, and return the model.

    `lora` is the table [model.lora]. No value is drawn here, because InitialWeights provides them, so that the model
    may be created in partitions.
    """
    model.requires_grad_(False)
    scale = lora_scale(lora.rank, lora.alpha, lora.rslora)
    targets = _module_targets(lora.targets, dict(model.named_parameters()))
    modules = dict(model.model.layers.named_modules())
    for name, module in modules.items():
        if isinstance(module, Linear) and any(f".{name}".endswith(f".{t}") for t in targets):
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, LoraLinear(module, lora.rank, scale, lora.dropout))
        if isinstance(module, ExpertMatrices):
            module.add_adapters(adapted_experts(lora.targets), lora.rank, scale)
    for name, parameter in model.named_parameters():
        if is_adapter(name, lora.train):
            parameter.requires_grad_(True)
    return model


def _module_targets(targets: Sequence[str], parameters: Collection[str]) -> list[str]:
    """Return the targets that are modules, by as much of their names as tells them from experts' matrices."""
    if not any(".experts." in name for name in parameters):
        return list(targets)
    others = [t for t in targets if t not in MLP_TARGETS]
    of_mlps = [t for t in targets if t in MLP_TARGETS]
    modules = [f"{mlp}.{target}" for mlp in ("mlp", "shared_expert") for target in of_mlps]
    return others + [m for m in modules if any(f".{m}." in name for name in parameters)]


def is_adapter(name: str, whole: Sequence[str] = ()) -> bool:
    """Return whether a parameter is trained although the base is frozen.

    Adapters and the score head are, and the vocabulary's matrices if `whole`, which is model.lora.train, has entries.
    """
    is_trained_whole = bool(whole) and name in VOCABULARY
    return ".lora_" in name or name.endswith("score.weight") or is_trained_whole


@dataclass
class BasePolicy:
    """The trained engine with its adapters switched off: a reference without a second model."""

    engine: Any

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients and adapters."""
        kinds = LoraLinear, ExpertMatrices
        adapted: Any = [m for m in self.engine.module.modules() if isinstance(m, kinds)]
        with self.engine.inference():
            for module in adapted:
                module.is_on = False
            try:
                yield
            finally:
                for module in adapted:
                    module.is_on = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.engine(*args, **kwargs)


def save_adapters(
    folder: Path,
    tensors: dict[str, Tensor],
    settings: Any,
    *,
    reward: bool,
    by_parameter: bool = False,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json as PEFT reads them.

    Args:
        tensors: adapters (and score head) by the parameter names of the class that they are for.
        settings: the table [model], whose path is written as the base, as an absolute path or a hub id.
        reward: whether the model gives scores.
        by_parameter: the family's mlp_by_parameter.
    """
    base = settings.path if settings.init == "pretrained" else None
    if base and Path(expanduser(base)).is_dir():
        base = str(Path(expanduser(base)).absolute())
    is_multimodal = any(name.startswith(MULTIMODAL_PREFIX) for name in tensors)
    modules = {n.split(".")[-2]: n for n in tensors if n.endswith(WHOLE)}
    if "embed_tokens" in modules and "lm_head" not in modules and not reward:
        # PEFT does not tie the copies of modules that it saves
        tensors = tensors | {LM_HEAD: tensors[modules["embed_tokens"]].clone()}
        modules["lm_head"] = LM_HEAD
    lora = settings.lora
    experts = adapted_experts(lora.targets) if any(map(is_of_experts, tensors)) else []
    named = {
        f"base_model.model.{name}": t.contiguous()
        for name, t in (peft_tensor(*item, experts) for item in tensors.items())
    }
    write_tensors(folder / ADAPTER_WEIGHTS, named, format="pt", quantize=settings.quantize)
    targets = _module_targets(lora.targets, tensors)
    of_mlps = {t for t in targets if by_parameter and "." in t}
    parameters = [f"experts.{name}" for name in experts]
    parameters += sorted(f"{module}.weight" for module in of_mlps)
    adapter_config = {
        "base_model_name_or_path": base,
        "bias": "none",
        # the vision model may have a q_proj too
        "exclude_modules": r"model\.(?!language_model\.).*" if is_multimodal else None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,  # a B that the file lacks is zero
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": [*modules] or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": settings.revision,
        "target_modules": sorted(t for t in targets if t not in of_mlps) or None,
        "target_parameters": parameters or None,
        "task_type": "SEQ_CLS" if reward else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }
    write_json(folder / ADAPTER_CONFIG, adapter_config)
