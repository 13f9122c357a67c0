"""What a stage is: everything that one training algorithm decides, and nothing about the loop.

A stage's file holds its checks, what it requires of the planner, its losses and its construction. Its table is in
ulysses/config/stage_sections.py. The rest asks ulysses/run/registry.py and never compares `config.stage` with a name.

before the run     check, check_model, requirements, ... (class methods on the configuration)
construction       build(run)
every step         side_batches, prepare_step, counts, losses, derive, after_step
PPO only           loader, may_prepare, evaluate, save, load: a stage that makes its own data
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from models.arch import ModelConfig
from ulysses.config.schema import Config
from ulysses.memory.plan import PlannedRollout
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.stages.metric_sums import MetricSums


class Term(NamedTuple):
    """One part of the loss: weight * (global sum of `value`) / (global `count`).

    Every sequence-parallel rank evaluates a `per_sequence` term, so its value counts once per group.
    """

    value: Tensor
    count: str
    weight: float = 1.0
    per_sequence: bool = False


class AuxiliaryModel(NamedTuple):
    """A frozen model that the run reads: its setting, its folder or hub id, and whether it is a reward model."""

    setting: str
    path: str
    reward: bool = False


class Requirements(NamedTuple):
    """What follows from a stage's settings for the planner, the data loader and the builder.

    longest_example: tokens of the longest sequence that the settings allow.
    examples_per_load, steps_per_load: the examples that one step of the data loader reads over all processes, and the
        optimizer steps that are taken on them.
    examples_per_step: examples of one optimizer step over all processes.
    extra_forwards: forward passes without gradient over each trained token.
    value: whether the trained model has a value too (models.policy_value).
    scopes: the submodules that form parameter groups of their own, with factors of their learning rates; gradient
        policies can be limited to one of them. None leaves all parameters in one group.
    others: the models that the run reads besides the trained one; all stay frozen.
    mismatched: whether sequences are read that join the prompt of one example and the answer of another (KTO).
    rollout: the answers that are decoded to each prompt before each round of training; None if there are none.
    reference: "cached", "live", another model's path, or "" if the settings need no reference.
    logits_once: whether the loss is the head's own nll, for whose backward no logits are computed again.
    """

    longest_example: int
    examples_per_load: int
    examples_per_step: int
    steps_per_load: int = 1
    extra_forwards: float = 0.0
    value: bool = False
    scopes: dict[str, float] | None = None
    others: tuple[AuxiliaryModel, ...] = ()
    mismatched: bool = False
    rollout: PlannedRollout | None = None
    reference: str = ""
    logits_once: bool = False


@dataclass(eq=False)
class Stage:
    """Base of all stages.

    Args:
        model: the trained engine, called like the module it wraps.
        config: the stage's own table.
        seed: of noise that the stage itself draws.

    Attributes:
        step: the optimizer step being computed; the loop sets it.
    """

    name: ClassVar[str]  # of the stage and of its table
    kind: ClassVar[str]  # of its data: text, sequence, pair, ranked, unpaired or prompt
    reward: ClassVar[bool] = False  # a RewardModel is trained
    sequences_per_example: ClassVar[int] = 1  # all in the same micro-batch
    # of an example, which each of its sequences carries; 0 if it has none
    columns: ClassVar[tuple[str, ...]] = ()

    model: Any
    mesh: Any
    config: Any
    seed: int = 0
    step: int = 0

    # ---------------------------------------------------------------- checks

    @classmethod
    def table(cls, config: Config) -> Any:
        """Return the stage's own table of the configuration."""
        return getattr(config, cls.name)

    @classmethod
    def check(cls, config: Config) -> Iterator[str]:
        """Yield the complaints that follow from the configuration alone."""
        yield from ()

    @classmethod
    def check_model(cls, plan: Any) -> Iterator[str]:
        """Yield the complaints that need the model's shape, the tokenizer or the other models' shapes."""
        yield from ()

    @classmethod
    def final_shape(cls, shape: ModelConfig, tokenizer: Any) -> ModelConfig:
        """Return the shape as the exported config.json describes it."""
        return shape

    # ---------------------------------------------------------------- requirements of the planner and the builder

    @classmethod
    def requirements(cls, config: Config) -> Requirements:
        """Return what follows from the settings; others call `requirements` of ulysses/run/registry.py."""
        examples = config.batch.examples
        return Requirements(config.data.max_length, examples, examples)

    @classmethod
    def total_steps(cls, config: Config, loader: Any) -> int:
        """Return the optimizer steps of the whole run."""
        steps_per_epoch = loader.steps_per_epoch * cls.requirements(config).steps_per_load
        return config.run.steps or max(1, round(config.run.epochs * steps_per_epoch))

    @classmethod
    def build(cls, run: Any) -> "Stage":
        """Construct the stage around its engine; all ranks call it together."""
        config = run.config
        return cls(run.engine, run.mesh, cls.table(config), config.run.seed)

    # ---------------------------------------------------------------- every step

    def sequences(self, example: Any) -> list[Sequence]:
        """Return the example's sequences as they are packed, with the columns that `losses` needs."""
        columns = {name: example.columns.get(name, 0.0) for name in self.columns}
        return [replace(s, columns={**s.columns, **columns}) for s in example.sequences]

    def packed(self, examples: list[Any]) -> list[Sequence]:
        """Return the sequences of a micro-batch's examples, those of one example one after the other."""
        return [sequence for example in examples for sequence in self.sequences(example)]

    def side_batches(self, loader: Any, indices: list[int]) -> list[ShardedBatch]:
        """Return further packed sequences for `prepare_step`, as many batches on every rank.

        Args:
            loader: the step's StepLoader.
            indices: dataset indices of the whole step, on every rank.
        """
        return []

    def prepare_step(
        self, batches: list[ShardedBatch], side_batches: list[ShardedBatch]
    ) -> None:
        """Gather statistics of the whole optimizer step from its micro-batches and side batches, without gradient."""

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor | float]:
        """Return this rank's own share of every count, by default tokens.

        A sequence counts on sequence-parallel rank 0 only.
        """
        return {"tokens": batch.loss_weights.sum(dtype=torch.float64)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        """Return the loss terms of one micro-batch and add its metrics."""
        raise NotImplementedError

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the reduced means with the metrics that are functions of them; the same on every rank."""
        return metrics

    def check_first_step(self, metrics: dict[str, float]) -> None:
        """Refuse to go on if identities that must hold before the first update do not.

        Raises RuntimeError with an explanation.
        """

    def after_step(self, metrics: dict[str, float]) -> None:
        """Take in the reduced metrics of a step whose update was applied; the same on every rank."""

    def once(self, value: Any) -> Any:
        """Return the value on sequence-parallel rank 0 and zero elsewhere: a sequence counts once per group."""
        return value if self.mesh.sp_rank == 0 else value * 0

    def add_means(self, metrics: MetricSums, values: dict[str, Tensor], count: Any) -> None:
        """Add means of values [N] per sequence (or pair) over `count` of them."""
        for name, value in values.items():
            metrics.add(
                name, self.once(value.detach().sum(dtype=torch.float64)), self.once(count)
            )

    # ---------------------------------------------------------------- a stage that makes its own data

    def loader(self, prompts: Any) -> Any:
        """Return what the loop reads its steps from; by default the data itself."""
        return prompts

    def may_prepare(self, step: int) -> bool:
        """Return whether the batches of `step` may be prepared while the step before it still computes."""
        return True

    def evaluate(self, loader: Any) -> dict[str, float] | None:
        """Return `eval/...` metrics (eval/loss among them), or None to have the loop evaluate the losses."""
        return None

    def save(self, folder: Path) -> None:
        """Write the stage's own state into a checkpoint; rank 0 only."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; on every rank, after the weights."""
