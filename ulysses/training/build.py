"""From configuration to a partitioned model on every rank."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.arch import ModelConfig as Shape
from models.arch import architecture
from models.decoder import CausalLM, LayerMemory, RewardModel, init_parameter
from models.hf_format import WeightFiles, read_config, resolve_model
from models.layers import DecoderLayer
from models.policy_value import PolicyValue
from ulysses.memory.offload import Offloader
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.config import DTYPES, Config, LoraConfig
from ulysses.training.memory import MemoryChoice, tiling
from ulysses.training.optim import adamw, policy_value_groups
from ulysses.training.section import ConfigError
from ulysses.zero.construct import build_partitioned
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive


def read_shape(config: Config, *, need_weights: bool = True) -> tuple[Shape, Path | None]:
    """Return the model's shape and its folder (None for a shape given by name or keys).

    Without `need_weights` a hub id's weights are not fetched.

    Raises ConfigError if there is no such model, or it is not supported.
    """
    m = config.model
    try:
        folder = resolve_model(m.path, m.revision, need_weights=need_weights) if m.path else None
        if folder is not None:
            raw = read_config(folder).to_hf()
        else:
            raw = architecture(m.arch).to_hf() if m.arch else {}
        return (Shape.from_hf({**raw, **m.config}) if m.config else Shape.from_hf(raw)), folder
    except (ValueError, OSError) as error:
        raise ConfigError(f"model: {error}") from None


class RandomWeights:
    """Initial weights keyed by (seed, name): the same on any number of ranks."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.seed = seed

    def slice(
        self,
        name: str,
        shape: torch.Size,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return init_parameter(
            name, shape, self.shape, seed=self.seed, device=device, dtype=dtype
        ).view(-1)[start:stop]


class FileWeights(RandomWeights):
    """Weights from safetensors files, read slice by slice; names the files lack (a new head) are drawn at random."""

    def __init__(self, folder: Path, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        self.files = WeightFiles(folder)

    def slice(
        self,
        name: str,
        shape: torch.Size,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        if name not in self.files:
            return super().slice(name, shape, start, stop, dtype, device)
        return self.files.read(name, start, stop).to(device=device, dtype=dtype)


class PolicyValueWeights:
    """Weights of a policy with a value, both starting from the same model; a score that it lacks is drawn at random."""

    def __init__(self, source: RandomWeights) -> None:
        self.source = source

    def slice(
        self,
        name: str,
        shape: torch.Size,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return self.source.slice(name.partition(".")[2], shape, start, stop, dtype, device)


def weights_of(config: Config, shape: Shape, folder: Path | None) -> RandomWeights:
    if config.model.init == "random" or folder is None:
        return RandomWeights(shape, config.run.seed)
    return FileWeights(folder, shape, config.run.seed)


def weights_fingerprint(config: Config, shape: Shape, folder: Path | None) -> str:
    """Return a digest that changes with the weights: four blocks of every tensor, so that one trained matrix is seen."""
    digest = hashlib.sha256(repr(shape).encode())
    if config.model.init == "random" or folder is None:
        digest.update(f"random {config.run.seed}".encode())
        return digest.hexdigest()
    files = WeightFiles(folder)
    for name in sorted(files.names()):
        numel = files.shape(name).numel()
        digest.update(f"{name} {files.dtype(name)} {numel}".encode())
        for start in range(0, numel, max(1, numel // 4)):
            digest.update(
                files.read(name, start, min(start + 2048, numel)).view(torch.uint8).numpy()
            )
    return digest.hexdigest()


def check_weights(shape: Shape, folder: Path, *, reward: bool, key: str = "model.path") -> None:
    """Refuse weight files that do not hold every parameter in the right shape, before anything is allocated.

    Raises ConfigError naming the setting (`key`) and the first that is missing or wrong.
    """
    with torch.device("meta"):
        model: nn.Module = RewardModel(shape) if reward else CausalLM(shape)
    expected = {name: p.shape for name, p in model.named_parameters()}
    try:
        WeightFiles(folder).check(expected, may_lack=("score.weight",) if reward else ())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from None


def matrix_sizes(shape: Shape, *, reward: bool = False) -> dict[str, int]:
    """Return the parameters in one layer's matrices, in embedding and head, and in the head, as ulysses.zero.settings.derive takes them."""
    D, E = shape.hidden_size, shape.head_dim
    attention = 2 * D * E * (shape.num_attention_heads + shape.num_key_value_heads)
    layer, head = attention + 3 * D * shape.intermediate_size, shape.vocab_size * D
    return {
        "layer_matrices": layer,
        "vocabulary_matrices": 2 * head,
        "head_matrices": 0 if reward else head,
    }


def layer_memory(config: Config, shape: Shape, memory: MemoryChoice | None) -> LayerMemory:
    """Return what the layers of the trained model keep, and where; None: of a frozen one, which keeps nothing."""
    if memory is None:
        return LayerMemory(tiling=tiling(config, 1))
    cut = tiling(config, memory.head_chunks)
    if not memory.offloaded_layers:
        return LayerMemory(memory.recompute, cut)
    # the first layers' activations wait longest for their backward, so they leave the GPU first
    away = [i < memory.offloaded_layers for i in range(shape.num_hidden_layers)]
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    return LayerMemory(memory.recompute, cut, Offloader(device, memory.host_bytes), away)


def build_engine(
    config: Config,
    shape: Shape,
    source: Any,
    mesh: ParallelMesh,
    kernel: str,
    *,
    reward: bool = False,
    value: str = "",
    trainable: bool = True,
    memory: MemoryChoice | None = None,
) -> ZeroEngine:
    """Create a model as ZeRO-3 shards with its optimizer; all ranks call it together.

    `reward` makes a reward model; `value`, "shared" or "separate", a policy with a value (models.policy_value).
    A frozen model (not `trainable`) keeps nothing for a backward pass: of the memory settings it has its tiles only.
    """
    settings = derive(
        dtype=DTYPES[config.model.dtype],
        offload_optimizer=config.memory.offload_optimizer and trainable,
        offload_parameters=config.memory.offload_parameters,
        **matrix_sizes(shape, reward=reward),
        gathered_layers=memory.gathered_layers if memory is not None and trainable else 0,
        raw=config.deepspeed,
    )

    if value:
        source = PolicyValueWeights(source)
    lora = config.model.lora if trainable else LoraConfig()
    if lora.rank:
        from ulysses.training.lora import (  # peft is an optional dependency
            AdapterWeights,
            add_adapters,
        )

        source = AdapterWeights(source, config.run.seed)

    options: dict[str, Any] = {
        "attention": kernel,
        "memory": layer_memory(config, shape, memory if trainable else None),
    }
    if not reward:
        options["logits_tile"] = config.memory.logits_tile

    def create() -> nn.Module:
        if value:
            model: nn.Module = PolicyValue(shape, mesh, separate=value == "separate", **options)
        else:
            model = (RewardModel if reward else CausalLM)(shape, mesh, **options)
        return add_adapters(model, lora) if lora.rank else model

    model = build_partitioned(create, settings, source)
    if not trainable:
        model.requires_grad_(False)
        return ZeroEngine(model.eval(), settings, None, (DecoderLayer,))
    on_gpu = torch.cuda.is_available() and not config.memory.offload_optimizer
    groups = (
        policy_value_groups(model, config.optimizer.weight_decay, config.ppo.value_lr_factor)
        if value
        else None
    )
    optimizer = adamw(model, config.optimizer, on_gpu=on_gpu, groups=groups)
    return ZeroEngine(
        model.train(), settings, optimizer, (DecoderLayer,), DTYPES[config.optimizer.reduce_dtype]
    )
