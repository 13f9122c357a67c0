"""Train a tiny model on real ranks under real ZeRO-3 and hand back losses, metrics and whole gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.families import Experts, LayerKind
from models.lora import add_adapters
from models.quantized import Packed, packed_parts
from models.scored import RewardModel
from tests.family_case import FAMILIES
from tests.harness import run_distributed
from tests.model_folder import tiny_config
from tests.shuffled_loader import ShuffledLoader
from tests.zero_case import HostWeights, frozen_engine, trained_engine, whole_gradients
from ulysses.config.command_line import check
from ulysses.config.schema import LoraSection
from ulysses.data.serve.dataset import Example
from ulysses.gradients.chain import GradientPolicyChain
from ulysses.memory.levels import LayerMemory
from ulysses.options import STAGES, stage_of
from ulysses.parallel.batch import Sequence, shared_prompts
from ulysses.parallel.mesh import ParallelMesh
from ulysses.run.trainer import Trainer
from ulysses.stages.base import Stage
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.engine import TrainedEngine

SHAPE = ModelConfig.from_hf(
    tiny_config(rms_norm_eps=1e-5, max_position_embeddings=512, initializer_range=0.1)
)
# norms of heads that are not D / H wide
QWEN3 = replace(SHAPE, model_type="qwen3", head_dim=12)
# most of the experts are chosen by no token
MOE = replace(
    QWEN3, model_type="qwen3_moe", moe=Experts(128, 3, 8, True), pattern=(LayerKind(feed_forward="experts"),)
)  # fmt: skip

HYBRID = ModelConfig.from_hf(
    FAMILIES["qwen3_5"] | {"vocab_size": SHAPE.vocab_size, "initializer_range": 0.1}
)


class ListDataset:
    """Examples in memory with the face of a TokenizedDataset."""

    max_length = 50  # of KTO's mismatched pairs

    def __init__(
        self,
        kind: str,
        examples: list[tuple[Sequence, ...]],
        columns: dict[str, list[float]] | None = None,
    ) -> None:
        self.kind, self.examples, most = kind, examples, max(map(len, examples))
        tables = self.sequence_lengths, self.prefix_lengths = np.zeros(
            (2, len(examples), most), dtype=int
        )
        for i, example in enumerate(examples):
            for place, (_, left_out) in enumerate(shared_prompts(example)):
                tables[:, i, place] = len(example[place].tokens) - left_out, left_out
        self.lengths = self.sequence_lengths.sum(axis=1)
        self.columns = {k: np.array(v) for k, v in (columns or {}).items()}
        self.sources = np.zeros(len(examples), dtype=np.int32)
        self.source_weights, self.source_names, self.source_paths = [1.0], [""], ["rows"]
        self.token_columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        columns = {name: float(column[index]) for name, column in self.columns.items()}
        return Example(index, self.examples[index], columns)


def sequences(
    count: int, seed: int, *, longest: int = 60, reference: bool = False
) -> list[Sequence]:
    """Ragged sequences, some with one trained token only, some trained late, one without any."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        length = int(torch.randint(3, longest, (1,), generator=draw))
        tokens = torch.randint(0, SHAPE.vocab_size, (length,), generator=draw)
        first = length - 1 - int(torch.randint(0, length - 1, (1,), generator=draw))
        weights = (torch.arange(length) >= first).float()
        if i % 5 == 1:
            weights[:-1] = 0
        if i % 7 == 3:
            weights *= 0.5
        columns = (
            {"reference_logps": -3 * torch.rand(length, generator=draw)} if reference else {}
        )
        out.append(Sequence(tokens, weights, columns))
    return out


class UnpairedDataset(ListDataset):
    """KTO examples whose first `prompt_length` tokens are the prompt; the reference's values are made up."""

    def mismatch(self, index: int, other: int) -> Sequence:
        first, second = self.examples[index][0], self.examples[other][0]
        head, start = (int(self.columns["prompt_length"][i]) for i in (index, other))
        tokens = torch.cat([first.tokens[:head], second.tokens[start:]])[: self.max_length]
        weights = torch.cat([torch.zeros(head), second.loss_weights[start:]])[: self.max_length]
        guess = torch.full((len(tokens),), -4.7 - 0.001 * index - 0.01 * other)
        more = {"prompt": first.prompt, "prompt_length": head}
        return Sequence(tokens, weights, {"reference_logps": guess}, **more)


def unpaired(count: int, labels: tuple[int, ...]) -> UnpairedDataset:
    """KTO's examples; two have the first one's prompt, so that cyclic neighbours may share it."""
    draw = torch.Generator().manual_seed(4)
    made, heads, ids = [], [], []
    for i in range(count):
        head, tail = (int(n) for n in torch.randint(2, 25, (2,), generator=draw))
        tokens = torch.randint(0, SHAPE.vocab_size, (head + tail,), generator=draw)
        again = i in (4, 7)
        if again:
            head, tokens = heads[0], torch.cat([made[0][0].tokens[: heads[0]], tokens[head:]])
        logps = -4.6 + 0.3 * torch.randn(len(tokens), generator=draw)
        weights = (torch.arange(len(tokens)) >= head).float()
        ids.append(0 if again else i)
        columns = {"reference_logps": logps}
        made.append((Sequence(tokens, weights, columns, prompt=ids[i], prompt_length=head),))
        heads.append(head)
    return UnpairedDataset(
        "unpaired", made, {"label": list(labels), "prompt_length": heads, "prompt_id": ids}
    )


def ragged(data: ListDataset) -> ListDataset:
    """Cut one sequence of every third example to its first token; of the others train at most the last two tokens."""
    examples = []
    for i, sides in enumerate(data.examples):
        cut = i // 3 % len(sides) if i % 3 == 0 else -1
        heads = data.columns.get("prompt_length", np.zeros(len(data.examples)))
        if i % 3 == 0:
            heads[i] = 1
        made = []
        for j, s in enumerate(sides):
            length, whole = 1 if j == cut else len(s.tokens), torch.arange(len(s.tokens))
            weights = torch.where(whole < len(whole) - 2, 0.0, s.loss_weights)[:length]
            columns = {name: column[:length] for name, column in s.token_columns.items()}
            more = {"prompt": s.prompt, "prompt_length": int(heads[i])}
            made.append(Sequence(s.tokens[:length], weights, columns, **more))
        examples.append(tuple(made))
    return type(data)(data.kind, examples, {k: list(v) for k, v in data.columns.items()})


# of another size, with heads for every degree of the tests, and three words that the student lacks
TEACHER = replace(
    SHAPE,
    hidden_size=40,
    head_dim=10,
    num_attention_heads=12,
    num_hidden_layers=3,
    vocab_size=100,
)


# What makes a stage's frozen models of (case, mesh), by their roles; the examples carry the reference's values, which
# DPO reads as cached ones.
FROZEN: dict[str, Callable[..., Any]] = {
    "reference": lambda case, mesh: lambda batch: batch.token_columns["reference_logps"],
    "teacher": lambda case, mesh: frozen_engine(
        lambda: CausalLM(TEACHER, mesh), HostWeights(TEACHER, 7)
    ),
}
LABELS = (1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1)  # KTO's, one per example


def dataset(
    stage: str, count: int = 11, seed: int = 0, labels: tuple[int, ...] = LABELS
) -> ListDataset:
    """Examples of the stage's type, the same on every rank."""
    wanted = STAGES[stage]().dataset_type
    if wanted == "unpaired":
        return unpaired(count, labels)
    if wanted in ("text", "sequence"):
        found = sequences(count, seed)
        # nothing to train on
        found[2] = replace(found[2], loss_weights=torch.zeros(len(found[2].tokens)))
        if wanted == "text":
            found = [Sequence(s.tokens, torch.ones(len(s.tokens))) for s in found]
        return ListDataset("sequence", [(s,) for s in found])
    assert wanted in ("pair", "ranked"), f"tests/engine_case.py makes no {wanted} examples"
    found = sequences(2 * count, seed, reference=True)
    margins = {"margin": np.linspace(0, 1, count).tolist()} if wanted == "ranked" else {}
    return ListDataset("pair", [*zip(found[::2], found[1::2])], margins)


@dataclass
class Case:
    """One stage on one topology, with one way of packing."""

    stage: str
    sp: int = 1
    budget: int = 128
    packing_seed: int | None = None
    examples: int = 6
    steps: int = 1
    lr: float = 0.0
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    attention: str = "auto"
    shape: ModelConfig = SHAPE
    options: dict[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ("down_proj",)
    lora_train: tuple[str, ...] = ()
    quantize: str = "none"
    coefficient: float = 0.0  # of the balance loss
    labels: tuple[int, ...] = LABELS
    seed: int = 0  # of the examples
    # sequences of one token, and answers so short that shards hold no trained token
    ragged: bool = False
    # further arguments of tests.zero_case.trained_engine
    engine: dict[str, Any] = field(default_factory=dict)

    def data(self) -> ListDataset:
        made = dataset(self.stage, seed=self.seed, labels=self.labels)
        return ragged(made) if self.ragged else made

    def model(self, mesh: Any, attention: str | None = None) -> nn.Module:
        kind = RewardModel if STAGES[self.stage]().reward else CausalLM
        how = {"memory": LayerMemory(self.recompute), "quantize": self.quantize}
        made = kind(self.shape, mesh, attention=attention or self.attention, **how)
        if self.lora_rank:
            targets = ["q_proj", "v_proj", *self.lora_targets]
            adapters = {"rank": self.lora_rank, "targets": targets, "train": [*self.lora_train]}
            add_adapters(made, LoraSection(**adapters))
        return made

    def weights(self) -> "StartedAdapters":
        return StartedAdapters(self.shape, 0, quantize=self.quantize)

    def make_stage(self, engine: Any, mesh: Any, **others: Callable[..., Any]) -> Stage:
        """Build the stage; its constructor takes a frozen model under the name of its role.

        `others` replace those of FROZEN.
        """
        rate = {"lr": self.lr, "schedule": "constant", "warmup": 0}
        values = {"stage": self.stage, self.stage: self.options, "optimizer": rate}
        values["model"] = {"router_aux_loss_coefficient": self.coefficient}
        stage = stage_of(check(values | {"run": {"seed": 0}}))
        models = stage.requirements.models
        frozen = {m.role: (FROZEN | others)[m.role](self, mesh) for m in models}
        return replace(stage, model=engine, mesh=mesh, **frozen)


class StartedAdapters(HostWeights):
    """B is random too, as after some training: otherwise A would have no gradient. All is drawn on the CPU.

    A third of what A is drawn as: with B's few columns that alone would give adapters larger than the weights, and
    errors of float32 as large. Where the weights are to be quantised, a matrix that is not is what its bytes stand for.
    """

    def fill(self, name: str, shape: torch.Size, start: int, out: torch.Tensor) -> None:
        endings = "_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"
        matrix = name.removesuffix(".weight").endswith(endings)
        matrix = matrix and ".lora_" not in name
        whole = out.is_floating_point() and out.shape == (shape.numel(),)
        if matrix and whole and self.quantize != "none":
            data = torch.empty(sum(packed_parts(shape)), dtype=torch.uint8)
            super().fill(name, data.shape, 0, data)
            out.copy_(Packed(shape).unpack(data, torch.float32).view(-1))
            return
        super().fill(name.replace(".lora_B", ".lora_A"), shape, start, out)
        if ".lora_B" in name:
            out.div_(3)


class CaptureChain(GradientPolicyChain):
    """Keeps a copy of the whole reduced gradient of every step."""

    def __init__(self) -> None:
        super().__init__([])
        self.steps: list[dict[str, torch.Tensor]] = []

    def apply(self, gradients: Any, context: Any) -> dict[str, float]:
        self.steps.append(whole_gradients(gradients))
        return {"grad_norm": gradients.norm()}


def zero_engine(case: Case, **how: Any) -> tuple[TrainedEngine, ParallelMesh]:
    """Build the case's engine on this rank; all ranks call it together."""
    initialize_distributed()
    mesh = ParallelMesh(
        case.sp, num_heads=case.shape.num_attention_heads, windows=case.shape.windows
    )
    given = case.weights()
    return trained_engine(lambda: case.model(mesh), given, dtype=case.dtype, **how), mesh


def build_trainer(case: Case, data: Any = None) -> tuple[Trainer, CaptureChain]:
    """Build model, stage and trainer on this rank; all ranks call it together."""
    engine, mesh = zero_engine(case, **case.engine)
    loader = ShuffledLoader(
        data or case.data(),
        case.examples,
        tokens_per_microbatch=case.budget,
        seed=3,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=mesh.dp_rank,
        packing_seed=case.packing_seed,
    )
    chain = CaptureChain()
    stage, steps = case.make_stage(engine, mesh), max(2, case.steps)
    trainer = Trainer(
        stage=stage,
        loader=loader,
        total_steps=steps,
        policies=chain,
        description={key: {} for key in ("config", "shape", "inputs")},
    )
    return trainer, chain


Steps = tuple[list[dict[str, float]], list[dict[str, torch.Tensor]]]


def run_case(case: Case, data: Any = None) -> Steps:
    """Train `case.steps` steps; returns every step's metrics and whole gradients (gradients on rank 0 only)."""
    trainer, chain = build_trainer(case, data)
    metrics = [trainer.train_step() for _ in range(case.steps)]
    trainer.engine.destroy()
    return metrics, chain.steps if dist.get_rank() == 0 else []


def trained(case: Case, world: int) -> Steps:
    """Call `run_case` on so many ranks."""
    return run_distributed(run_case, world, case)[0]


def evaluated(case: Case, world: int) -> list[dict[str, float]]:
    """Call `evaluation` on so many ranks; returns what each of them found."""
    return run_distributed(evaluation, world, case)


def evaluation(case: Case) -> dict[str, float]:
    """Held-out metrics over all of the data, in steps of 4 with a smaller last one."""
    trainer, _ = build_trainer(case)
    trainer.eval_loader = replace(trainer.loader, examples_per_step=4, shuffle=False)
    found = trainer.evaluate()
    trainer.engine.destroy()
    return found
