"""What the tests of recompute levels and of offload share: a small model, a pack, its gradients."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.families import Experts, LayerKind
from tests.model_folder import init_weights
from ulysses.memory.levels import LayerMemory
from ulysses.memory.offload import Offloader
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh

CONFIG = ModelConfig.from_hf({
    "model_type": "qwen2", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
})  # fmt: skip
QWEN3 = replace(CONFIG, model_type="qwen3", attention_bias=False, head_dim=8)
MOE = replace(
    QWEN3, model_type="qwen3_moe", moe=Experts(5, 2, 16, True), pattern=(LayerKind(), LayerKind(feed_forward="experts"))
)  # fmt: skip
# standard deviations: some gates and ups of gpt-oss's experts lie beyond their clamps
BIASES = {"gate_up_proj_bias": 4.0, "sinks": 1.0}
TILE = 7  # rows of an MLP tile: 26 rows are 4 of them


def packed(*rows: torch.Tensor, device: Any = "cpu") -> ShardedBatch:
    """Pack rows of tokens that are all trained."""
    given = [Sequence(row, torch.ones(len(row))) for row in rows]
    return pack_shard(given, ParallelMesh(), device)


def batch() -> ShardedBatch:
    generator = torch.Generator().manual_seed(1)
    return packed(*(torch.randint(0, 67, (n,), generator=generator) for n in (9, 1, 16)))


def build(
    dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG, **memory: Any
) -> CausalLM:
    model = CausalLM(config, memory=LayerMemory(**memory)).to(dtype)
    init_weights(model, seed=4)
    for name, parameter in model.named_parameters():
        # drawn in float32, so that a model in float64 has the same weights
        draw, values = torch.Generator().manual_seed(len(name)), torch.empty(parameter.shape)
        if name.endswith(("bias", "sinks")):
            values.normal_(0, BIASES.get(name.rpartition(".")[2], 0.1), generator=draw)
            parameter.data.copy_(values)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            values.uniform_(0.5, 1.5, generator=draw)
            parameter.data.copy_(values - float(config.family.centred_norms))
        elif name.endswith(
            ("A_log", "dt_bias")
        ):  # some heads forget slowly, as trained ones do
            parameter.data.copy_(values.uniform_(-5, 2, generator=draw))
    return model


def gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logps = model(batch()).logps
    (logps * torch.linspace(0, 1, len(logps))).sum().backward()
    return logps.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def all_chunks_are_free(offloader: Offloader) -> bool:
    """Return whether the offloader holds no activation any more."""
    return len(offloader.free) * offloader.chunk_bytes == offloader.allocated


def assert_same_gradients(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Per parameter: ||g - g_exact|| <= tolerance * max(||g_exact||, 1e-3 * global norm)."""
    assert set(found) == set(exact)
    norm = torch.stack([g.double().norm() for g in exact.values()]).norm()
    for name, g in exact.items():
        error = (found[name].double() - g.double()).norm()
        bound = tolerance * max(float(g.double().norm()), 1e-3 * float(norm))
        assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e}"
