"""The reference policy's log-probabilities, computed once, before the first update, and memory-mapped.

    dataset tokens    [ example 0: t t t t | t t t ][ example 1: ...       int32, flat
    reference.bin     [            l l l l | l l l ][                      float32, same positions
    mismatched-*.bin  [ sum of pair 0, sum of pair 1, ... ]                float64: prompt of i, completion of j (KTO)
    *.json            {"done": examples or pairs finished}                 a killed fill goes on from here

After the first update only a second model could still compute them, so the pairs of all steps, known from seed and
epoch alone, are filled at the start. That costs what a live reference costs; a pair that returns in a later epoch is free.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ulysses.data.steps import pack_step
from ulysses.parallel.batch import Sequence as TokenSequence
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.sums import gather_tokens, segment_sums

CHUNK = 32  # items per data-parallel group between two marks of progress
Pairs = list[tuple[int, int]]


def pairs_of_run(loader: Any, steps: int) -> Pairs:
    """Return every (example, other) that the loader's first `steps` steps pair, sorted, the same on every rank."""
    found: set[tuple[int, int]] = set()
    for step in range(steps):
        found.update(loader.mismatched_pairs(loader.indices(*divmod(step, loader.steps_per_epoch))))
    return sorted(found)


def mismatched_lengths(dataset: Any, pairs: Pairs, max_length: int) -> list[int]:
    """Return the tokens of each `dataset.mismatch(i, j, max_length)` without reading one."""
    heads, lengths = dataset.columns["prompt_length"], dataset.sequence_lengths
    return [min(max_length, int(heads[i]) + int(lengths[j, 0]) - int(heads[j])) for i, j in pairs]


class StoredValues:
    """Values of numbered items in one file, written chunk by chunk by one process of each node.

    Args:
        path: of the file; its mark of progress lies beside it. Named after everything the values depend on.
        counts: how many values each item has, end to end.
    """

    def __init__(self, path: Path, dtype: Any, counts: Any) -> None:
        self.path = path
        self.mark = path.with_suffix(".json")
        self.dtype = np.dtype(dtype)
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.starts = self.ends - counts
        self.values: np.ndarray | None = None

    def complete(self) -> bool:
        """Say whether every item has its values already."""
        return self._done() >= len(self.ends)

    def fill(
        self,
        sequences: Callable[[int], Sequence[TokenSequence]],
        lengths: Sequence[int],
        compute: Callable[[ShardedBatch], torch.Tensor],
        *,
        mesh: Any,
        device: torch.device,
        budget: int,
        started: Callable[[int], None],
    ) -> None:
        """Compute what is missing; all ranks call it together.

        Args:
            sequences: of an item; `lengths`: their tokens, per item.
            compute: the values of a batch's sequences end to end, the same on every rank of a sequence-parallel group.
            budget: tokens per packed micro-batch.
            started: is told how many items are missing, if any are.
        """
        count, writer = len(self.ends), int(os.environ.get("LOCAL_RANK", "0")) == 0
        done = torch.tensor(self._done() if writer else count, device=device)
        if dist.is_initialized():
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        first, chunk = int(done.item()), CHUNK * mesh.data_parallel_size
        if writer and not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.mark.unlink(missing_ok=True)
            self._open("w+").flush()
        if first < count:
            started(count - first)
        for begin in range(first, count, chunk):
            items = range(begin, min(begin + chunk, count))
            start, stop = int(self.starts[items[0]]), int(self.ends[items[-1]])
            found = torch.zeros(stop - start, dtype=getattr(torch, self.dtype.name), device=device)
            sizes = [int(lengths[i]) for i in items]
            for part in pack_step(sizes, max([budget, *sizes]), mesh.data_parallel_size)[
                mesh.dp_rank
            ]:
                values = compute(
                    pack_shard([s for k in part for s in sequences(items[k])], mesh, device)
                )
                if mesh.sp_rank == 0 and part:  # each data-parallel group computes its share
                    where = np.concatenate(
                        [np.arange(self.starts[items[k]], self.ends[items[k]]) for k in part]
                    )
                    found[torch.from_numpy(where - start).to(device)] = values
            if dist.is_initialized():
                dist.all_reduce(found)
            if writer:
                flat = self._open("r+")
                flat[start:stop] = found.cpu().numpy()
                flat.flush()
                self._advance(items[-1] + 1)
        if dist.is_initialized():
            dist.barrier()
        self.values = self._open("r")

    def __getitem__(self, item: int) -> np.ndarray:
        """Return the item's values, once filled."""
        assert self.values is not None
        return self.values[self.starts[item] : self.ends[item]]

    def _open(self, mode: Any) -> np.ndarray:
        return np.memmap(self.path, self.dtype, mode, shape=(int(self.ends[-1]),))

    def _done(self) -> int:
        try:
            return int(json.loads(self.mark.read_text())["done"]) if self.path.exists() else 0
        except (OSError, ValueError, KeyError):
            return 0

    def _advance(self, done: int) -> None:
        temporary = self.mark.with_suffix(".tmp")
        temporary.write_text(json.dumps({"done": done}))
        os.replace(temporary, self.mark)


class ReferenceCache:
    """A view of a dataset whose sequences carry the reference's per-token log-probabilities as the column `reference_logps`.

    With `pairs`, mismatched sequences carry the reference's sum over the completion as the column `reference_sum`.

    Args:
        folder: where the values live; named after everything that those of the dataset depend on.
        dataset: a TokenizedDataset.
        pairs: sorted, each once: the mismatched sequences that the run will ask for.
        max_length: of a mismatched sequence.
    """

    def __init__(
        self, folder: Path, dataset: Any, pairs: Pairs | None = None, max_length: int = 0
    ) -> None:
        self.folder = folder
        self.dataset = dataset
        self.pairs = pairs or []
        self.max_length = max_length
        self.tokens = StoredValues(folder / "reference.bin", np.float32, dataset.lengths)
        self.keys = np.asarray([i * len(dataset) + j for i, j in self.pairs], np.int64)
        name = hashlib.sha256(self.keys.tobytes() + str(max_length).encode()).hexdigest()[:24]
        self.sums = StoredValues(
            folder / f"mismatched-{name}.bin", np.float64, np.ones(len(self.pairs), np.int64)
        )

    def complete(self) -> bool:
        """Say whether nothing is left to compute."""
        return self.tokens.complete() and (not self.pairs or self.sums.complete())

    def fill(
        self,
        logprobs: Callable[[ShardedBatch], torch.Tensor],
        mesh: Any,
        device: torch.device,
        budget: int,
        say: Callable[[str], None],
    ) -> None:
        """Compute what is missing; all ranks call it together.

        Args:
            logprobs: maps a batch to its tokens' log-probabilities [S], without gradient.
            budget: tokens per packed micro-batch.
        """

        def started(what: str) -> Callable[[int], None]:
            return lambda missing: say(
                f"computing reference log-probabilities of {missing} {what} -> {self.folder}"
            )

        place = {"mesh": mesh, "device": device, "budget": budget}
        self.tokens.fill(
            lambda i: self.dataset[i].sequences, self.dataset.lengths,
            lambda batch: gather_tokens(logprobs(batch).float(), batch), **place, started=started("examples"),
        )  # fmt: skip
        if self.pairs:
            self.sums.fill(
                lambda p: [self.dataset.mismatch(*self.pairs[p], self.max_length)],
                mismatched_lengths(self.dataset, self.pairs, self.max_length),
                lambda batch: segment_sums(logprobs(batch).double() * batch.loss_weights, batch),
                **place, started=started("mismatched answers"),
            )  # fmt: skip

    def mismatch(self, index: int, other: int, max_length: int) -> TokenSequence:
        """Return the prompt of `index` with the completion of `other`, carrying `reference_sum`."""
        key = index * len(self.dataset) + other
        place = int(np.searchsorted(self.keys, key))
        if max_length != self.max_length or place == len(self.keys) or self.keys[place] != key:
            raise KeyError(
                f"examples {index} and {other} were not paired when the reference was filled"
            )
        sequence = self.dataset.mismatch(index, other, max_length)
        return replace(sequence, columns={**sequence.columns, "reference_sum": self.sums[place][0]})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the dataset's example, its sequences carrying their `reference_logps` column."""
        example = self.dataset[index]
        values, at, sequences = self.tokens[index], 0, []
        for s in example.sequences:
            columns = {**s.token_columns, "reference_logps": values[at : at + len(s.tokens)]}
            sequences.append(replace(s, token_columns=columns))
            at += len(s.tokens)
        return replace(example, sequences=tuple(sequences))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)
