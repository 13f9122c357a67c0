"""The reference's log-probabilities of KTO's mismatched sequences, computed once, before the first update.

    step of the run     example i takes the completion of example j            known from seed and epoch alone
    keys                i * examples + j, sorted, each once over the whole run
    mismatched-*.bin    float64, one sum per key                               beside the matched values' cache
    mismatched-*.json   {"done": keys finished}                                a killed fill goes on from here

After the first update only a second model could still compute them, so the pairs of all steps are filled at the start;
it costs what a live reference would cost, and a pair that returns in a later epoch costs nothing.
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

from ulysses.data.packing import pack_step
from ulysses.parallel.batch import Sequence as TokenSequence
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.reduce import segment_sums

CHUNK = 64  # sequences per data-parallel group between two marks of progress


def mismatched_lengths(dataset: Any, pairs: Sequence[tuple[int, int]], max_length: int) -> list[int]:
    """Return the tokens of each `dataset.mismatch(i, j, max_length)` without reading one."""
    heads, lengths = dataset.columns["prompt_length"], dataset.sequence_lengths
    return [min(max_length, int(heads[i]) + int(lengths[j, 0]) - int(heads[j])) for i, j in pairs]


def pairs_of_run(loader: Any, steps: int) -> list[tuple[int, int]]:
    """Return every (example, other) that the loader's first `steps` steps pair, the same on every rank."""
    found: set[tuple[int, int]] = set()
    for step in range(steps):
        indices = loader.indices(*divmod(step, loader.steps_per_epoch))
        found |= {(i, j) for i, j in zip(indices, loader.partners(indices), strict=True) if j >= 0}
    return sorted(found)


class MismatchedCache:
    """A view of a ReferenceCache whose mismatched sequences carry the reference's sum as the column `reference_sum`.

    Args:
        cache: gives the matched examples, with their reference log-probabilities.
        pairs: sorted, each once: what the run will ask for.
        max_length: of a mismatched sequence.
    """

    def __init__(self, cache: Any, pairs: list[tuple[int, int]], max_length: int) -> None:
        self.cache = cache
        self.pairs = pairs
        self.max_length = max_length
        self.keys = np.asarray([i * len(cache) + j for i, j in pairs], np.int64)
        name = hashlib.sha256(self.keys.tobytes() + str(max_length).encode()).hexdigest()[:24]
        self.folder: Path = cache.folder
        self._data, self._mark = (self.folder / f"mismatched-{name}.{end}" for end in ("bin", "json"))
        self.chunk = CHUNK
        self.values: np.ndarray | None = None

    def fill(
        self,
        logprobs: Callable[[ShardedBatch], torch.Tensor],
        mesh: Any,
        device: torch.device,
        budget: int,
        say: Callable[[str], None],
    ) -> None:
        """Compute what is missing; all ranks call it together. Arguments as in ReferenceCache.fill."""
        count = len(self.pairs)
        writer = int(os.environ.get("LOCAL_RANK", "0")) == 0
        done = torch.tensor(self._done() if writer else count, device=device)
        if dist.is_initialized():
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        start = int(done.item())
        if writer and not self._data.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            np.memmap(self._data, dtype=np.float64, mode="w+", shape=(max(1, count),)).flush()
        if start < count:
            say(f"computing reference log-probabilities of {count - start} mismatched answers -> {self._data}")
        chunk = self.chunk * mesh.data_parallel_size
        for first in range(start, count, chunk):
            values = self._chunk(self.pairs[first : first + chunk], logprobs, mesh, device, budget)
            if writer:
                flat = np.memmap(self._data, dtype=np.float64, mode="r+", shape=(count,))
                flat[first : first + len(values)] = values
                flat.flush()
                temporary = self._mark.with_suffix(".tmp")
                temporary.write_text(json.dumps({"done": first + len(values)}))
                os.replace(temporary, self._mark)
        if dist.is_initialized():
            dist.barrier()
        self.values = np.memmap(self._data, dtype=np.float64, mode="r", shape=(max(1, count),))

    def _chunk(self, pairs: list[tuple[int, int]], logprobs: Any, mesh: Any, device: Any, budget: int) -> np.ndarray:
        """Sums of some pairs, on every rank: each data-parallel group does its share."""
        lengths = mismatched_lengths(self.cache, pairs, self.max_length)
        flat = torch.zeros(len(pairs), dtype=torch.float64, device=device)
        for part in pack_step(lengths, max([budget, *lengths]), mesh.data_parallel_size)[mesh.dp_rank]:
            batch = pack_shard([self.cache.mismatch(*pairs[p], self.max_length) for p in part], mesh, device)
            sums = segment_sums(logprobs(batch).double() * batch.loss_weights, batch)
            if mesh.sp_rank == 0 and part:
                flat[torch.tensor(part, device=device)] = sums
        if dist.is_initialized():
            dist.all_reduce(flat)
        return flat.cpu().numpy()

    def mismatch(self, index: int, other: int, max_length: int) -> TokenSequence:
        """Return the prompt of `index` with the completion of `other`, carrying `reference_sum`."""
        assert self.values is not None
        key = index * len(self.cache) + other
        place = int(np.searchsorted(self.keys, key))
        if max_length != self.max_length or place == len(self.keys) or self.keys[place] != key:
            raise KeyError(f"examples {index} and {other} were not paired when the reference was filled")
        sequence = self.cache.mismatch(index, other, max_length)
        return replace(sequence, columns={**sequence.columns, "reference_sum": self.values[place]})

    def complete(self) -> bool:
        """Say whether every pair has its value already."""
        return self._done() >= len(self.pairs)

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> Any:
        return self.cache[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def _done(self) -> int:
        try:
            return int(json.loads(self._mark.read_text())["done"]) if self._data.exists() else 0
        except (OSError, ValueError, KeyError):
            return 0
