"""What DPO, KTO and PPO share: a reference policy that the trained one is measured against.

reference = "cached"   the initial policy's log-probabilities, computed before the first update and memory-mapped
            "live"     a frozen copy of the initial policy, or the trained model with its adapters off
            a path     another frozen model

    items of a file   [ example 0: t t t t | t t t ][ example 1: ... ] ... [ prompt of i, completion of j ] ...
    what it holds     [            l l l l | l l l ][ ...                  float32, same positions

After the first update only a second model could still compute cached values, so KTO's mismatched pairs of all steps,
known from seed and epoch alone, are computed at the start too. The file is written under another name and renamed when
it is complete; one process of each node writes it, so that it need not lie on a shared disk, but may.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ulysses.config.section import ConfigError, error_context
from ulysses.data.cache import check_once, content_digest, digest_of_value
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.disk import lock_file, write_digested, write_json, writing
from ulysses.environment import NODE, local_rank
from ulysses.parallel.batch import Sequence as PackedSequence
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.parallel.sums import segment_sums
from ulysses.progress import progress
from ulysses.stages.base import AuxiliaryModel, Metrics, MetricSums, Requirements, Run, Stage
from ulysses.stages.passes import token_values
from ulysses.zero.engine import ZeroEngine

CHUNK = 32  # items per data-parallel group that are computed before their values are written
COLUMN = "reference_logps"  # of the sequences
GAP = "reference_gap"  # the metric: mean |policy - reference| per trained token
Pairs = list[tuple[int, int]]
# mean |policy - reference| per token that rounding alone explains: between two ways through 30 layers of a pretrained
# model of 135M parameters it was 0.028 in bfloat16
STEP0_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(eq=False)
class ReferencedStage(Stage):
    """A stage that compares the policy with a reference, token by token.

    Args:
        reference: computes the reference's log-probabilities [S] of a batch's targets, cached ones before the first
            update only; None for a reference-free loss.
        tolerance: largest mean |policy - reference| per token allowed at step 0, where a reference that is no other
            model equals the policy.
    """

    reference_words: ClassVar[tuple[str, ...]] = ("cached", "live")

    reference: Callable[..., Tensor] | None = None
    tolerance: float = math.inf

    # ---------------------------------------------------------------- checks and requirements

    def check(self) -> Iterator[str]:
        reference = self.table.reference
        known = ", ".join(f'"{word}"' for word in self.reference_words)
        named = (
            reference in self.reference_words or "/" in reference or Path(reference).exists()
        )
        if not named:
            yield f"{self.name}.reference is {reference!r} but must be {known} or a model's folder or hub id"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference at all."""
        return True

    @property
    def is_cached(self) -> bool:
        """Whether the data carry what the reference says."""
        return self.needs_reference and self.table.reference == "cached"

    @property
    def looks_ahead(self) -> bool:
        """Whether policy and reference read as much once more before the step's first backward."""
        return False

    @property
    def requirements(self) -> Requirements:
        given, ahead = self.table.reference, self.looks_ahead
        lora = self.config.model.lora
        model = AuxiliaryModel(
            "reference",
            f"{self.name}.reference",
            path="" if given in self.reference_words else given,
            passes=(1.0 + ahead) * (given != "cached"),
            shares_weights=given == "cached"
            or (given == "live" and lora.rank > 0 and not lora.train),
        )
        models = (model,) if self.needs_reference else ()
        # log-probabilities are found forward, and their gradient from other logits backward
        return super().requirements._replace(
            extra_forwards=float(ahead), models=models, logit_bytes=12
        )

    # ---------------------------------------------------------------- construction

    def extend_data(self, run: Run) -> tuple[TokenizedDataset, TokenizedDataset | None]:
        """Let the data carry the initial policy's log-probabilities if they are to be cached.

        They are computed now, with the weights that are about to be trained, unless data.cache holds them.
        """
        train, held_out = super().extend_data(run)
        if self.is_cached:
            loader = run.loader(train)
            steps = {loader: self.total_steps(loader)}
            train = self._with_reference(run, loader, steps)
            if held_out is not None:
                loader = run.loader(held_out, evaluation=True)
                steps = {own: own.steps_per_epoch for own in loader.sets().values()}
                held_out = self._with_reference(run, loader, steps)
        return train, held_out

    def _with_reference(
        self, run: Run, loader: StepLoader, steps: dict[StepLoader, int]
    ) -> TokenizedDataset:
        """Return the loader's data with what the reference says of all that so many steps of loaders over it read."""
        config, checked, data = self.config, run.inputs, loader.dataset
        # adapters, even switched off, take the base another way through the kernels
        adapted = config.model.lora.rank > 0
        mismatched = data.kind == "unpaired" and self.looks_ahead
        pairs: Pairs = []
        if mismatched:
            pairs = sorted({*chain.from_iterable(map(pairs_of_run, steps, steps.values()))})
        weights, cache = checked.weights, Path(config.data.cache)
        content = f"seed {weights.seed}"
        if weights.paths:
            content = content_digest(weights.paths, cache)
        source = f"""{weights.shape} {content} {weights.quantize} {config.model.dtype}
            {checked.kernel.name} {adapted}"""
        key = digest_of_value(f"{source} {data.fingerprint} {pairs}")
        path = cache / f"reference-{key[:24]}.bin"
        if checked.resume_from and not adapted and not path.with_suffix(".json").exists():
            raise ConfigError(
                f"the reference log-probabilities of this run are gone: there is no {path}, and resuming no longer has "
                f"the initial policy; restore data.cache, or set {self.name}.reference to the initial model's path"
            )
        how = run.mesh, run.engine.device, run.memory.tokens_per_microbatch, run.say
        return data.with_column(
            COLUMN, *read_reference(data, pairs, path, self.reference, *how)
        )

    def arguments(self, run: Run) -> dict[str, object]:
        found = super().arguments(run)
        if engine := found.get("reference"):
            found["reference"] = logps_of(engine)
        return {**found, "tolerance": STEP0_TOLERANCE[self.config.model.dtype]}

    # ---------------------------------------------------------------- every step

    def reference_logps(self, batch: ShardedBatch) -> Tensor:
        """Return the reference's log-probabilities [S]; the batch's sequences carry them if they are cached."""
        if self.is_cached:
            return batch.token_columns[COLUMN]
        return self.reference(batch)

    def both_logps(self, batch: ShardedBatch, metrics: MetricSums) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [S] of policy and reference, and add their mean gap per trained token.

        Without a reference its log-probabilities are zeros.
        """
        if not self.needs_reference:
            return self.model(batch).logps, torch.zeros_like(batch.loss_weights)
        # the reference comes first: it may be this very model with its adapters off
        reference, logps = self.reference_logps(batch), self.model(batch).logps
        trained = batch.loss_weights != 0
        gap = (logps.detach() - reference).abs() * trained
        metrics.add(GAP, gap.sum(), trained.sum())
        return logps, reference

    def answer_sums(
        self, batch: ShardedBatch, logps: Tensor, reference: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each answer's log-probability by the policy and by the reference, and its length, [N] each.

        Only the first carries a gradient. A column `ld_weights` weighs the tokens' log-probabilities (LD-DPO).
        """
        weights = batch.loss_weights
        decayed = weights * batch.token_columns.get("ld_weights", 1.0)
        columns = torch.stack([logps * decayed, reference * decayed, weights], dim=-1)
        policy, base, lengths = segment_sums(columns, batch).unbind(-1)
        return policy, base.detach(), lengths.detach()

    def check_first_step(self, metrics: Metrics) -> None:
        gap = metrics.get(GAP, 0.0)
        if self.table.reference in self.reference_words and not gap <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the reference, but their log-probabilities differ by {gap:.3g} per token "
                f"(at most {self.tolerance:g} is rounding): the reference belongs to other weights or the model is not "
                "deterministic; delete data.cache if it is a cached one, and look for dropout"
            )


def logps_of(engine: ZeroEngine) -> Callable[..., Tensor]:
    """Return what computes an engine's log-probabilities [S] of a batch's targets, without gradient."""

    def logps(batch: ShardedBatch, **options: object) -> Tensor:
        with engine.inference():
            return engine(batch, **options).logps

    return logps


def pairs_of_run(loader: StepLoader, steps: int) -> Pairs:
    """Return every (example, other) that the loader's first `steps` steps pair, sorted, the same on every rank."""
    positions = (divmod(step, loader.steps_per_epoch) for step in range(steps))
    prompts = loader.dataset.columns["prompt_id"]
    found = (mismatched_pairs(prompts, loader.indices(*position)) for position in positions)
    return sorted({*chain.from_iterable(found)})


def mismatched_pairs(prompts: np.ndarray, indices: list[int]) -> Pairs:
    """Pair each example of a step with the one whose completion it takes for KTO's baseline.

    That is the next example of the step, cyclically, that has another prompt. Examples without one are left out.
    `prompts` are the ids of the dataset's prompts.
    """
    pairs = []
    for position, i in enumerate(indices):
        following = indices[position + 1 :] + indices[:position]
        partner = next((j for j in following if prompts[j] != prompts[i]), None)
        if partner is not None:
            pairs.append((i, partner))
    return pairs


def mismatched_lengths(dataset: TokenizedDataset, pairs: Pairs) -> list[int]:
    """Return the tokens of each `dataset.mismatch(i, j)` without reading one."""
    heads, lengths = dataset.columns.get("prompt_length"), dataset.sequence_lengths
    whole = (int(heads[i] + lengths[j, 0] - heads[j]) for i, j in pairs)
    return [min(dataset.max_length, length) for length in whole]


def read_reference(
    dataset: TokenizedDataset,
    pairs: Pairs,
    path: Path,
    logprobs: Callable[[ShardedBatch], Tensor],
    mesh: ParallelMesh,
    device: torch.device,
    tokens_per_microbatch: int,
    say: Callable[[str], None],
) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """Return the reference's log-probabilities, float32: of all examples end to end, and of each mismatched pair.

    They are computed if any node lacks the file; all ranks call this together.

    Args:
        pairs: each once: the mismatched sequences that the run will ask for.
        path: the file of values, named after everything that they depend on; a .json next to it holds its digest.
        logprobs: maps a batch to its tokens' log-probabilities [S], without gradient.
        tokens_per_microbatch: the most of a packed one.
    """
    ahead = mismatched_lengths(dataset, pairs)
    sizes = [*dataset.lengths.tolist(), *ahead]
    seal = path.with_suffix(".json")
    if not all(gather(seal.exists())):
        numbers = range(len(dataset) + len(pairs))
        say(f"computing reference log-probabilities of {len(numbers)} items -> {path}")

        def sequences(number: int) -> Sequence[PackedSequence]:
            if number < len(dataset):
                return dataset[number].sequences
            return [dataset.mismatch(*pairs[number - len(dataset)])]

        temporary = path.with_suffix(f".{NODE}-{os.getpid()}.tmp")
        # several micro-batches of them, or CHUNK
        size = mesh.data_parallel_size * max(
            CHUNK, 4 * tokens_per_microbatch * len(numbers) // sum(sizes)
        )
        bar = {
            "desc": "reference",
            "unit": "items",
            "leave": False,
            "disable": not mesh.is_main,
        }

        def computed_chunks() -> Iterator[np.ndarray]:
            with progress(total=len(numbers), **bar) as shown:
                for at in numbers[::size]:
                    some = sizes[at : at + size]
                    yield token_values(
                        logprobs,
                        some,
                        lambda number, at=at: sequences(at + number),
                        mesh,
                        device,
                        tokens_per_microbatch,
                    ).numpy()
                    shown.update(len(some))

        chunks = computed_chunks()
        with writing(temporary, advice="set data.cache to another folder"):
            if local_rank() == 0:
                _keep(path, seal, temporary, write_digested(temporary, chunks, 4 * sum(sizes)))
            for (
                _
            ) in chunks:  # all ranks compute them together, and one of each node writes them
                pass
        gather(None)  # no node reads what is still written
    with error_context("data.cache"):
        check_once(seal, path.parent)
    values = np.asarray(np.memmap(path, np.float32, "r"))
    own, *mismatched = np.split(values, np.cumsum([dataset.lengths.sum(), *ahead])[:-1])
    return own, dict(zip(pairs, mismatched, strict=True))


def _keep(path: Path, seal: Path, temporary: Path, digest: str) -> None:
    """Give the complete file its name, unless another run came first, whose file is read then."""
    lock = path.with_suffix(".lock")
    with lock_file(lock):
        if not seal.exists():
            os.replace(temporary, path)
            write_json(seal, {path.name: digest})
    lock.unlink(missing_ok=True)  # those who wait for it will find the seal
    temporary.unlink(missing_ok=True)
