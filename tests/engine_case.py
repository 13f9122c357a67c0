"""Train a tiny model on real ranks under real ZeRO-3 and hand back losses, metrics and whole gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from losses.dpo import dpo_loss
from models.arch import ModelConfig
from models.decoder import CausalLM, LayerMemory, init_weights
from tests.shuffled_loader import ShuffledLoader
from tests.zero_case import HostWeights, trained_engine, whole_gradients
from ulysses.data.encode import Example
from ulysses.data.steps import StepLoader
from ulysses.gradients.chain import GradientPolicyChain
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.stages.dpo import DpoSection, DpoStage
from ulysses.training.stages.sft import SftSection, SftStage
from ulysses.training.trainer import Trainer
from ulysses.zero.construct import initialize_distributed

SHAPE = ModelConfig.from_hf(
    {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
     "max_position_embeddings": 512, "hidden_act": "silu", "initializer_range": 0.1}
)  # fmt: skip


class ListDataset:
    """Examples in memory with the face of a TokenizedDataset."""

    def __init__(
        self, kind: str, examples: list[tuple[Sequence, ...]], columns: dict[str, list[float]] | None = None
    ) -> None:
        self.kind = kind
        self.examples = examples
        self.sequence_lengths = np.array([[len(s.tokens) for s in e] for e in examples])
        self.lengths = self.sequence_lengths.sum(axis=1)
        self.columns = {k: np.array(v) for k, v in (columns or {}).items()}
        self.sources = np.zeros(len(examples), dtype=np.int32)
        self.source_weights = [1.0]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return Example(index, self.examples[index], {k: float(v[index]) for k, v in self.columns.items()})


def sequences(count: int, seed: int, *, longest: int = 60, reference: bool = False) -> list[Sequence]:
    """Ragged sequences, some with one trained token only, some trained late, one without any."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        length = int(torch.randint(3, longest, (1,), generator=draw))
        tokens = torch.randint(0, SHAPE.vocab_size, (length,), generator=draw)
        weights = (torch.arange(length) >= length - 1 - int(torch.randint(0, length - 1, (1,), generator=draw))).float()
        if i % 5 == 1:
            weights[:-1] = 0
        if i % 7 == 3:
            weights *= 0.5
        columns = {"reference_logps": -3 * torch.rand(length, generator=draw)} if reference else {}
        out.append(Sequence(tokens, weights, columns))
    return out


def dataset(stage: str, count: int = 11, seed: int = 0) -> ListDataset:
    if stage == "sft":
        found = sequences(count, seed)
        found[2] = Sequence(found[2].tokens, torch.zeros(len(found[2].tokens)))  # nothing to train on
        return ListDataset("sequence", [(s,) for s in found])
    found = sequences(2 * count, seed, reference=True)
    return ListDataset("pair", [(found[2 * i], found[2 * i + 1]) for i in range(count)])


@dataclass
class Case:
    """One topology and way of packing."""

    stage: str
    sp: int = 1
    budget: int = 128
    packing_seed: int | None = None
    steps: int = 1
    lr: float = 0.0
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    shape: ModelConfig = SHAPE
    options: dict[str, Any] = field(default_factory=dict)
    offload_optimizer: bool = False
    offload_parameters: bool = False
    reduce_between: torch.dtype = torch.float32
    node_size: int | None = None
    raw: dict[str, Any] = field(default_factory=dict)  # DeepSpeed keys
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


class CaptureChain(GradientPolicyChain):
    """Keeps a copy of the whole reduced gradient of every step."""

    def __init__(self) -> None:
        super().__init__([])
        self.steps: list[dict[str, torch.Tensor]] = []

    def apply(self, gradients: Any, context: Any) -> dict[str, float]:
        self.steps.append(whole_gradients(gradients))
        return {"grad_norm": gradients.norm()}


def build_trainer(case: Case, data: Any, stage: Any = None) -> tuple[Trainer, CaptureChain]:
    """Build model, stage and trainer on this rank; `stage(engine, mesh)` replaces the built-in ones."""
    initialize_distributed()
    mesh = ParallelMesh(case.sp, num_heads=case.shape.num_attention_heads)
    away = {"offload_optimizer": case.offload_optimizer, "offload_parameters": case.offload_parameters}

    def create() -> CausalLM:
        return CausalLM(case.shape, mesh, memory=LayerMemory(case.recompute))

    engine = trained_engine(
        create, HostWeights(case.shape, 0), case.lr, optimizer=case.optimizer, dtype=case.dtype, raw=case.raw,
        reduce_between=case.reduce_between, node_size=case.node_size, **away,
    )  # fmt: skip
    if stage is not None:
        made = stage(engine, mesh)
    elif case.stage == "sft":
        made = SftStage(engine, mesh, SftSection(**case.options))
    else:
        made = DpoStage(engine, mesh, DpoSection(**case.options), cached=True)
    loader = ShuffledLoader(
        data,
        6,
        tokens_per_microbatch=case.budget,
        seed=3,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=mesh.dp_rank,
        packing_seed=case.packing_seed,
    )
    chain = CaptureChain()
    trainer = Trainer(
        mesh=mesh, engine=engine, stage=made, loader=loader, total_steps=case.steps,
        learning_rate=lambda step: case.lr, policies=chain,
    )  # fmt: skip
    return trainer, chain


def run_case(
    case: Case, data: Any = None, stage: Any = None
) -> tuple[list[dict[str, float]], list[dict[str, torch.Tensor]]]:
    """Train `case.steps` steps; returns every step's metrics and whole gradients (gradients on rank 0 only)."""
    data = dataset(case.stage) if data is None else data
    trainer, chain = build_trainer(case, data, stage)
    metrics = [trainer.train_step() for _ in range(case.steps)]
    trainer.engine.destroy()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return metrics, chain.steps if rank == 0 else []


def plain_gradients(
    case: Case, data: Any = None, dtype: torch.dtype = torch.float64, count: int = 6
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first `count` examples from the formula: no packing, no ZeRO, one process."""
    data = dataset(case.stage) if data is None else data
    model = CausalLM(case.shape, None, attention="reference")
    init_weights(model, seed=0)
    model.to(dtype)
    mesh = ParallelMesh(1) if not dist.is_initialized() else None
    loader = StepLoader(data, count, tokens_per_microbatch=10_000, seed=3)
    examples = [data[i] for i in loader.indices(0, 0)]

    def logps(s: Sequence) -> torch.Tensor:
        out = model(pack_shard([s], mesh, "cpu")).logps
        weights = torch.as_tensor(np.asarray(s.loss_weights)).to(dtype)
        return out[: len(s.tokens) - 1] * weights[1:], weights[1:].sum()

    if case.stage == "sft":
        pairs = [logps(e.sequences[0]) for e in examples]
        loss = -sum(p.sum() for p, _ in pairs) / sum(w for _, w in pairs)
    else:
        options = {k: v for k, v in case.options.items() if k in ("beta", "loss_type", "label_smoothing")}
        per_pair = []
        for e in examples:
            (c, cw), (r, rw) = logps(e.sequences[0]), logps(e.sequences[1])
            refs = [
                (s.token_columns["reference_logps"][:-1].to(dtype) * s.loss_weights[1:].to(dtype)).sum()
                for s in e.sequences
            ]
            per_pair.append(
                dpo_loss(c.sum()[None], r.sum()[None], refs[0][None], refs[1][None], chosen_lengths=cw[None],
                         rejected_lengths=rw[None], **options)[0].sum()
            )  # fmt: skip
        loss = sum(per_pair) / len(per_pair)
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters()}


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
