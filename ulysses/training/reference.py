"""The reference policy's log-probabilities, computed once, before the first update, and memory-mapped.

    dataset tokens    [ example 0: t t t t | t t t ][ example 1: ...       int32, flat
    reference.bin     [            l l l l | l l l ][                      float32, same positions
    mismatched-*.bin  [ sum of pair 0, sum of pair 1, ... ]                float64: prompt of i, completion of j (KTO)

After the first update only a second model could still compute them, so KTO's pairs of all steps, known from seed and
epoch alone, are computed at the start too. A file is written under another name and renamed when it is complete.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.data.steps import pack_step
from ulysses.parallel.batch import Sequence as TokenSequence
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.sums import gather_tokens, segment_sums

CHUNK = 32  # items per data-parallel group that are computed before their values are written
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


class ReferenceCache:
    """A view of a dataset whose sequences carry the reference's log-probabilities as the column `reference_logps`.

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
        self.max_length = max_length
        self.places = {pair: place for place, pair in enumerate(pairs or [])}
        key = hashlib.sha256(f"{pairs} {max_length}".encode()).hexdigest()[:24]
        self.files = {"reference": folder / "reference.bin"}
        if pairs:
            self.files["mismatched"] = folder / f"mismatched-{key}.bin"
        self.ends = np.cumsum(dataset.lengths, dtype=np.int64)

    def complete(self) -> bool:
        """Return whether nothing is left to compute."""
        return all(path.exists() for path in self.files.values())

    def fill(
        self,
        logprobs: Callable[[ShardedBatch], Tensor],
        mesh: Any,
        device: torch.device,
        budget: int,
        say: Callable[[str], None],
    ) -> None:
        """Compute the files that are missing and open all of them; all ranks call it together.

        Args:
            logprobs: maps a batch to its tokens' log-probabilities [S], without gradient.
            budget: tokens per packed micro-batch.
        """

        def sums(batch: ShardedBatch) -> Tensor:
            return segment_sums(logprobs(batch).double() * batch.loss_weights, batch)

        def of_pair(place: int) -> list[TokenSequence]:
            return [self.dataset.mismatch(*pairs[place], self.max_length)]

        pairs, lengths = list(self.places), [int(n) for n in self.dataset.lengths]
        place = {"mesh": mesh, "device": device, "budget": budget, "say": say}
        self.logps = _stored(
            self.files["reference"], np.float32, lengths, lengths, lambda i: self.dataset[i].sequences,
            lambda batch: gather_tokens(logprobs(batch).float(), batch), **place,
        )  # fmt: skip
        if pairs:
            longest = mismatched_lengths(self.dataset, pairs, self.max_length)
            self.sums = _stored(
                self.files["mismatched"], np.float64, [1] * len(pairs), longest, of_pair, sums, **place
            )  # fmt: skip

    def mismatch(self, index: int, other: int, max_length: int) -> TokenSequence:
        """Return the prompt of `index` with the completion of `other`, carrying `reference_sum`."""
        if max_length != self.max_length or (index, other) not in self.places:
            raise KeyError(
                f"examples {index} and {other} were not paired when the reference was computed"
            )
        sequence = self.dataset.mismatch(index, other, max_length)
        value = self.sums[self.places[index, other]]
        return replace(sequence, columns={**sequence.columns, "reference_sum": value})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the dataset's example, its sequences carrying their `reference_logps` column."""
        example, sequences = self.dataset[index], []
        at = int(self.ends[index] - self.dataset.lengths[index])
        for s in example.sequences:
            values = self.logps[at : at + len(s.tokens)]
            columns = {**s.token_columns, "reference_logps": values}
            sequences.append(replace(s, token_columns=columns))
            at += len(s.tokens)
        return replace(example, sequences=tuple(sequences))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def _stored(
    path: Path,
    dtype: Any,
    counts: list[int],
    lengths: list[int],
    sequences: Callable[[int], Sequence[TokenSequence]],
    compute: Callable[[ShardedBatch], Tensor],
    *,
    mesh: Any,
    device: torch.device,
    budget: int,
    say: Callable[[str], None],
) -> np.ndarray:
    """Return a memory map of all items' values end to end, after computing the file if any node lacks it.

    Args:
        counts: values of each item; `lengths`: tokens of its sequences.
        compute: the values of a batch's sequences end to end, the same on every rank of a sequence-parallel group.
    """
    ends, writer = np.cumsum(counts, dtype=np.int64), int(os.environ.get("LOCAL_RANK", "0")) == 0
    missing = torch.tensor(float(writer and not path.exists()), device=device)
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX)
    if missing.item():
        say(f"computing reference log-probabilities of {len(counts)} sequences or pairs -> {path}")
        temporary = path.with_suffix(f".{mesh.rank}.tmp")
        if writer:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = np.memmap(temporary, dtype, "w+", shape=(int(ends[-1]),))
        for first in range(0, len(counts), CHUNK * mesh.data_parallel_size):
            items = range(first, min(first + CHUNK * mesh.data_parallel_size, len(counts)))
            start, stop = int(ends[first] - counts[first]), int(ends[items[-1]])
            found = torch.zeros(
                stop - start, dtype=getattr(torch, np.dtype(dtype).name), device=device
            )
            sizes = [lengths[i] for i in items]
            plan = pack_step(sizes, max([budget, *sizes]), mesh.data_parallel_size)
            for part in plan[mesh.dp_rank]:
                mine = [items[k] for k in part]
                values = compute(pack_shard([s for i in mine for s in sequences(i)], mesh, device))
                if mesh.sp_rank == 0 and mine:  # each data-parallel group computes its share
                    where = [np.arange(ends[i] - counts[i], ends[i]) - start for i in mine]
                    found[torch.from_numpy(np.concatenate(where)).to(device)] = values
            if dist.is_initialized():
                dist.all_reduce(found)
            if writer:
                file[start:stop] = found.cpu().numpy()
        if writer:
            file.flush()
            os.replace(temporary, path)
        if dist.is_initialized():
            dist.barrier()
    return np.memmap(path, dtype, "r", shape=(int(ends[-1]),))
