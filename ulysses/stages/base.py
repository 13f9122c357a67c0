"""What a stage is: everything that one training algorithm decides, and nothing about the loop.

A stage's file holds its checks, its requirements, its losses and its construction. Its table of settings is in
ulysses/config/stage_sections.py. Other files get the stage from ulysses/options.py, and never ask for its name.

before the run     check, unread, check_tokenizer, check_data, requirements, exported_config
construction       build, extend_data, groups_of, show_rollouts, total_steps
every step         read, before_step, normalisers, losses, finalise_metrics, after_step; at the first check_first_step;
                   trained_examples, if it fails
now and then       evaluate; save and load, of a stage with a state of its own
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import Section
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.data.serve.dataset import Example, TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.zero.engine import TrainedEngine, ZeroEngine

# what a loss term is a mean over
Normaliser = Literal["tokens", "chosen_tokens", "pairs", "examples"]
Number = TypeVar("Number", float, Tensor)
Metrics = dict[str, float]  # by name


class PlannedRollout(NamedTuple):
    """The answers that are decoded before each round of training, for the planner.

    answers: to each prompt.
    batch: how many of them a process decodes at a time; 0 if servers decode.
    prompt_tokens, new_tokens: the most of a prompt and of an answer.
    steps: optimizer steps that are taken on them.
    merged: adapters are added to a copy of the matrices first, as the planner sets it for models that have them.
    """

    answers: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    steps: int = 1
    merged: bool = False


class Term(NamedTuple):
    """One part of the loss: weight * (global sum of `value`) / (global sum of the normaliser of this name).

    Every sequence-parallel rank evaluates a `per_sequence` term, so its value counts once per group.
    """

    value: Tensor
    normaliser: Normaliser
    weight: float | Tensor = 1.0
    per_sequence: bool = False


@dataclass(eq=False)
class MetricSums:
    """Named sums and means of this rank, made global by `reduce` with one collective.

    Every rank must add the same names in the same order; a rank without data adds zeros.
    """

    device: torch.device
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(
        self, name: str, total: Tensor | float, count: Tensor | float | None = None
    ) -> None:
        """Add to a global mean of which `total` is a sum over `count` things, or without a count to a global sum."""
        for sums, value in ((self.sums, total), (self.counts, count)):
            if value is not None:
                if isinstance(value, Tensor):
                    new = value.detach().double()
                else:  # without waiting for a GPU
                    new = torch.full((), value, dtype=torch.float64, device=self.device)
                sums[name] = sums[name] + new if name in sums else new

    def include(self, other: "MetricSums") -> None:
        """Add what other sums hold, which may have names that these lack."""
        for sums, more in ((self.sums, other.sums), (self.counts, other.counts)):
            sums |= {name: sums[name] + x if name in sums else x for name, x in more.items()}

    def totals(self) -> Tensor:
        """Return the global sums, and then the counts, float64 on the device. One collective."""
        flat = torch.stack([*self.sums.values(), *self.counts.values()])
        if dist.is_initialized():
            dist.all_reduce(flat)
        return flat

    def reduce(self) -> Metrics:
        """Return the global sums and means; a mean over nothing is left out. One collective and one host read."""
        numbers = self.totals().tolist()
        means = dict(zip(self.sums, numbers))
        for name, count in zip(self.counts, numbers[len(self.sums) :], strict=True):
            if count:
                means[name] /= count
            else:
                del means[name]
        return means


class AuxiliaryModel(NamedTuple):
    """A frozen model that the run reads besides the trained one, as the checks, the planner and the builder know it.

    role: what it is for; a "reward" is a reward model, the others are language models. A teacher's logits are
        compared with the trained model's, tile by tile, so its vocabulary matrix stays whole while the trained model's
        head runs.
    setting: the setting that names it.
    path: its folder or hub id; an empty one is the initial policy.
    passes: its forward passes over each trained token.
    shares_weights: the trained model itself serves as this one, with its adapters off; no other weights are held.
    """

    role: Literal["reference", "reward", "teacher"]
    setting: str
    path: str = ""
    passes: float = 1.0
    shares_weights: bool = False

    @property
    def is_reward(self) -> bool:
        return self.role == "reward"


class StepBatches(NamedTuple):
    """What one optimizer step reads on this rank.

    trained: the micro-batches whose loss is computed, in training or in evaluation.
    looked_at: further ones, which only `before_step` reads, without gradient.
    """

    trained: list[ShardedBatch]
    looked_at: list[ShardedBatch] = []


class Requirements(NamedTuple):
    """What follows from a stage's settings for the planner, the data loader and the builder.

    longest_example: tokens of the longest sequence that the settings allow.
    examples_per_load, steps_per_load: the examples that one step of the data loader reads over all processes, and how
        many optimizer steps are taken on them.
    examples_per_step: examples of one optimizer step over all processes.
    extra_forwards: the trained model's forward passes without gradient over each trained token.
    logit_bytes: bytes that the loss reads and writes for each logit, beyond those of the targets' likelihood, whose
        gradient is computed in the forward pass (losses/logprobs.py).
    value: whether the trained model has a value too (models.scored).
    scopes: the submodules with parameter groups of their own, and factors of their learning rates; a gradient policy
        may clip each by its own norm. None leaves all parameters in one scope.
    models: the models that the run reads besides the trained one.
    rollout: the answers that are drawn before each round of training; None for a stage that draws none.
    """

    longest_example: int
    examples_per_load: int
    examples_per_step: int
    steps_per_load: int = 1
    extra_forwards: float = 0.0
    logit_bytes: int = 0
    value: bool = False
    scopes: dict[str, float] | None = None
    models: tuple[AuxiliaryModel, ...] = ()
    rollout: PlannedRollout | None = None


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that a stage is built with (ulysses/run/training_run.py).

    Args:
        engine: of the trained model.
        weights: those that its training starts from.
        frozen: engines of the models in `Requirements`, by their roles.
        kernel: name of the attention kernel.
        template: of chats; None for plain text.
        tokens_per_microbatch: the most tokens of a packed micro-batch.
        share_prompts: whether answers to one prompt that fit into a micro-batch share it.
        resources: what is registered here is closed at the end of the run, whatever happens.
        phase: tells the watch what begins.
        renew: tells the watch that this process makes progress.
        export: writes the current weights into a folder for sampling servers; all ranks call it together.
        served_weights: yields what that folder's files hold, on a device; all ranks iterate together, and the first one
            gets the weights.
        say: prints a line.
    """

    engine: TrainedEngine
    weights: InitialWeights
    frozen: dict[str, ZeroEngine]
    mesh: ParallelMesh
    kernel: str
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate | None
    tokens_per_microbatch: int
    share_prompts: bool
    resources: ExitStack
    phase: Callable[..., None]
    renew: Callable[[], None]
    export: Callable[[Path], None]
    served_weights: Callable[[torch.device], Iterator[tuple[str, Tensor]]]
    say: Callable[[str], None]


@dataclass(eq=False)
class Stage:
    """Base of all stages: what follows from a configuration and, once it is built, a part of the run.

    Args:
        config: of the run.
        model: the trained engine, called like the module it wraps. It and the mesh are None before the stage is built.
    """

    name: ClassVar[str]  # of the stage and of its table
    dataset_type: ClassVar[str]  # text, sequence, pair, ranked, unpaired, prompt or trajectory
    trained_type: ClassVar[str] = ""  # of the training data alone, if it differs
    # reasons why settings are not read in the stage's mode, each with the beginnings of those settings' names
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    reward: ClassVar[bool] = False  # whether a RewardModel is trained
    sequences_per_example: ClassVar[int] = 1  # all of them lie in the same micro-batch

    config: Config
    model: TrainedEngine | None = None
    mesh: ParallelMesh | None = None

    # ---------------------------------------------------------------- checks

    @cached_property
    def table(self) -> Section:
        """The stage's own table of the configuration."""
        return getattr(self.config, self.name)

    def check(self) -> Iterator[str]:
        """Yield the errors that follow from the configuration alone."""
        yield from ()

    def check_data(self, train: TokenizedDataset) -> Iterator[str]:
        """Yield the errors that need the open training data."""
        yield from ()

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
        """Yield the errors that need the trained model's tokenizer; only a stage with other models is asked."""
        yield from ()

    def exported_config(
        self, model_config: ModelConfig, tokenizer: PreTrainedTokenizerFast
    ) -> ModelConfig:
        """Return the model's configuration as the export's config.json describes it."""
        return model_config

    # ---------------------------------------------------------------- requirements of the planner and the builder

    @property
    def requirements(self) -> Requirements:
        """What follows from the settings."""
        examples = self.config.batch.examples
        return Requirements(self.config.data.max_length, examples, examples)

    def total_steps(self, loader: StepLoader) -> int:
        """Return the optimizer steps of the whole run."""
        steps_per_epoch = loader.steps_per_epoch * self.requirements.steps_per_load
        return self.config.run.steps or max(1, round(self.config.run.epochs * steps_per_epoch))

    # ---------------------------------------------------------------- construction

    def extend_data(self, parts: RunParts, data: TokenizedDataset) -> TokenizedDataset:
        """Return training or held-out data with further columns that the losses need; all ranks call it together."""
        return data

    def groups_of(self, data: TokenizedDataset) -> TokenizedDataset:
        """Return what steps take: the examples of training data or, with the face of a dataset, groups of them."""
        return data

    def build(self, parts: RunParts) -> Self:
        """Return the stage around its engine; all ranks call it together."""
        return replace(self, model=parts.engine, mesh=parts.mesh)

    def show_rollouts(self, show: Callable[..., None]) -> None:
        """Call `show` with every finished rollout, if the stage makes rollouts."""

    # ---------------------------------------------------------------- every step

    def read(self, source: StepLoader, step: int) -> StepBatches:
        """Return what a step reads on this rank."""
        trained = []
        for examples in source.step(*divmod(step, source.steps_per_epoch)):
            # the sequences of an example lie one after the other
            packed = [sequence for example in examples for sequence in self.sequences(example)]
            trained.append(pack_shard(packed, self.mesh, self.model.device))
        return StepBatches(trained)

    def trained_examples(self, source: StepLoader, step: int) -> str:
        """Return in words which examples a step trains, for the error of a step that is not finite."""
        return f"examples {source.indices_at(step)[:8]} ... of the data"

    def sequences(self, example: Example) -> list[Sequence]:
        """Return the example's sequences as they are packed, each with the example's numbers."""
        numbers = example.columns
        return [replace(s, columns={**s.columns, **numbers}) for s in example.sequences]

    def before_step(self, batches: StepBatches) -> list[tuple[Tensor, ...]]:
        """Return for each micro-batch what `losses` must know of the whole step, computed without gradient."""
        return [()] * len(batches.trained)

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        """Return what this rank adds to each number that loss terms are divided by: by default its trained tokens.

        A count of sequences is added by sequence-parallel rank 0 only.
        """
        return {"tokens": batch.loss_weights.sum(dtype=torch.float64)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums, *of_step: Tensor) -> list[Term]:
        """Return the loss terms of one micro-batch and add its metrics; `of_step` is what `before_step` returned."""
        raise NotImplementedError

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        """Return the reduced means with the metrics that are functions of them; the same on every rank."""
        return metrics

    def check_first_step(self, metrics: Metrics) -> None:
        """Refuse to go on if identities that must hold before the first update do not.

        Raises RuntimeError with an explanation.
        """

    def after_step(self, metrics: Metrics) -> None:
        """Take in the reduced metrics of a step whose update was applied; the same on every rank."""

    def on_first_rank(self, value: Number) -> Number:
        """Return the value on sequence-parallel rank 0 and zero elsewhere: a sequence counts once per group."""
        # the product is a number or a tensor as the value is, with its shape and dtype
        return value if self.mesh.sp_rank == 0 else value * 0

    def local_sum(self, term: Term) -> Tensor:
        """Return what this rank adds to the global weighted sum of a term."""
        value = term.value * term.weight
        return self.on_first_rank(value) if term.per_sequence else value

    def add_means(
        self, metrics: MetricSums, values: dict[str, Tensor], count: Tensor | float
    ) -> None:
        """Add means of values [N] per sequence (or pair) over `count` of them."""
        for name, value in values.items():
            total = self.on_first_rank(value.detach().sum(dtype=torch.float64))
            metrics.add(name, total, self.on_first_rank(count))

    # ---------------------------------------------------------------- steps, evaluation and state

    def evaluate(self, source: StepLoader) -> Metrics:
        """Return the metrics of held-out data, `loss` among them, with the training's own weighting.

        The metrics of a named set begin with its name, as in NAME/loss.
        """
        all_sums = MetricSums(self.model.device)
        of_sets = {}
        with self.model.inference():
            for name, loader in source.sets().items():
                sums = self._evaluation_sums(loader)
                all_sums.include(sums)
                if name:
                    of_sets |= {f"{name}/{key}": x for key, x in self._means(sums).items()}
        return self._means(all_sums) | of_sets

    def _evaluation_sums(self, source: StepLoader) -> MetricSums:
        """Return the sums of held-out data, with each term of the loss under "term" and its number."""
        sums = MetricSums(self.model.device)
        for step in range(source.steps_per_epoch):
            batches = self.read(source, step)
            for batch, of_step in zip(batches.trained, self.before_step(batches), strict=True):
                normalisers = self.normalisers(batch)
                for i, term in enumerate(self.losses(batch, sums, *of_step)):
                    sums.add(f"term{i}", self.local_sum(term), normalisers[term.normaliser])
        return sums

    def _means(self, sums: MetricSums) -> Metrics:
        means = sums.reduce()
        loss = sum(means.pop(name) for name in list(means) if name.startswith("term"))
        return {"loss": loss, **self.finalise_metrics(means)}

    def save(self, folder: Path) -> None:
        """Write the stage's own state into a checkpoint; rank 0 only."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; on every rank, after the weights."""
