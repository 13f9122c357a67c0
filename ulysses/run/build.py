"""From configuration and weights to a partitioned model on every rank."""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.decoder import (
    VALUE,
    CausalLM,
    PolicyValue,
    RewardModel,
    empty_model,
    init_parameter,
)
from models.hf_format import WeightFiles
from models.layers import DecoderLayer
from models.quantized import dense, pack
from ulysses.config.schema import Config
from ulysses.data.cache import content_digest
from ulysses.memory.levels import LayerMemory
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.random_keys import keyed_generator
from ulysses.plan.memory_choice import layer_memory, plain_model
from ulysses.plan.planner import Workload
from ulysses.registry import stage_of
from ulysses.run.optim import adamw, parameter_groups
from ulysses.zero.construct import build_partitioned
from ulysses.zero.engine import TrainedEngine, ZeroEngine
from ulysses.zero.settings import derive


class InitialWeights:
    """The weights that training starts from, given slice by slice; the same on any number of ranks.

    They come from safetensors files. What these lack (a new score head), or everything without a folder, is drawn at
    random, keyed by (seed, name). A policy and its value both start from the same model. Of an adapter A is uniform in
    +-1 / sqrt(inputs) and B zero.
    """

    def __init__(
        self,
        shape: ModelConfig,
        seed: int,
        folder: Path | None = None,
        quantize: str = "none",
    ) -> None:
        self.shape, self.quantize = shape, quantize
        self.seed = seed
        self.files = WeightFiles(folder) if folder else None
        self.stored = self.files.tensors if self.files else {}
        self.paths = self.files.paths if self.files else []

    def fill(self, name: str, shape: torch.Size, start: int, out: Tensor) -> None:
        plain = name.removeprefix(VALUE)
        plain = plain.replace(".base_layer.", ".")  # models.lora
        stop, device = start + out.numel(), out.device
        if out.dtype == torch.uint8:
            whole = self._packed(plain, device)
        elif plain in self.stored:
            out.copy_(self.files.read(plain, start, stop, device=device))
            return
        elif ".lora_" in name:
            whole = torch.zeros(shape, device=device)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(shape[-1])
                generator = keyed_generator(device, self.seed, name)
                whole.uniform_(-bound, bound, generator=generator)
        else:
            whole = init_parameter(
                plain, shape, self.shape, self.seed, device=device, dtype=out.dtype
            )
        out.copy_(whole.view(-1)[start:stop])

    def _packed(self, name: str, device: torch.device) -> Tensor:
        """Return the bytes of a quantised matrix, on the device; nothing else of the model is held."""
        stored = self.stored.get(name)
        if stored and stored.state:
            return stored.read_packed()
        shape = self._shapes[name]
        dtype = stored.dtype if stored else torch.float32
        matrix = torch.empty(shape, dtype=dtype, device=device)
        InitialWeights.fill(self, name, shape, 0, matrix.view(-1))
        return pack(self.quantize, matrix)

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in empty_model(self.shape).named_parameters()}

    def originals(
        self, weights: Iterable[tuple[str, Any]], model: nn.Module, trained_on: bool
    ) -> Iterator[tuple[str, Any]]:
        """Yield whole weights with matrices in place of quantised ones: those that the files hold.

        Without files, or if it is to be what was `trained_on`, they are dequantised.
        """
        if trained_on or not self.stored:
            yield from dense(model, weights)
            return
        for name, weight in weights:
            if weight is not None and weight.dtype == torch.uint8:
                plain = name.replace(".base_layer.", ".")
                weight = self.files.read(plain).view(self.stored[plain].shape)
            yield name, weight

    def content(self, cache: Path) -> str:
        """Return a digest of all that the files hold, which the folder `cache` remembers, or the seed without them."""
        return content_digest(self.paths, cache) if self.paths else f"seed {self.seed}"


def build_engine(
    config: Config,
    weights: InitialWeights,
    mesh: ParallelMesh,
    memory: Workload | None = None,
    *,
    attention: str = "",
    reward: bool = False,
    resident: bool = False,
) -> ZeroEngine:
    """Create a model as ZeRO-3 shards with its optimizer; all ranks call it together.

    `attention` is the kernel in place of the configured one; `resident` keeps a frozen model's weights whole on every
    rank, and `memory` says so for a trained one.

    With `memory`, what its layers keep for the backward pass, the model is trained and of the stage's kind: a causal
    language model, a reward model, or a policy with a value. Without, it is a frozen causal language model, or a
    frozen reward model if `reward` says so.
    """
    lora, shape, stage = config.model.lora, weights.shape, stage_of(config)
    trained, sizes = memory is not None, plain_model(shape)
    settings = derive(
        dtype=getattr(torch, config.model.dtype),
        offload_parameters=config.memory.offload_parameters,
        layer_matrices=sizes.layer_parameters,
        vocabulary_matrices=2 * sizes.vocabulary_parameters,
        raw=config.deepspeed.zero_optimization,
    )
    kept = layer_memory(memory) if memory else LayerMemory()
    if memory:
        resident, reward = memory.resident, stage.reward
    kind: Any = RewardModel if reward else CausalLM
    if trained and stage.requirements.value:
        kind = PolicyValue

    adapted = trained and lora.rank
    if adapted:  # peft is optional, and its imports fail while DeepSpeed replaces the constructors of tensors
        from models.lora import add_adapters

    def create() -> nn.Module:
        given = {"attention": attention or config.model.attention, "memory": kept}
        quantize = config.model.quantize if trained else "none"
        model = kind(shape, mesh, quantize=quantize, **given)
        if config.model.freeze_router:
            from models.moe import Router

            for module in filter(lambda m: isinstance(m, Router), model.modules()):
                module.requires_grad_(False)
        return add_adapters(model, lora) if adapted else model

    model = build_partitioned(create, settings, weights.fill).train(trained)
    units = (DecoderLayer,)
    if not trained:
        model.requires_grad_(False)
        return ZeroEngine(model, settings, units, resident=resident)
    return TrainedEngine(
        model,
        settings,
        partial(adamw, config=config.optimizer),
        parameter_groups(model, config.optimizer.weight_decay, stage.requirements.scopes),
        units,
        reduce_between=getattr(torch, config.optimizer.reduce_dtype),
        resident=resident,
        offload_optimizer=config.memory.offload_optimizer,
        graphs=kept.graphs,
    )
