"""The reference policy's log-probabilities, computed once and memory-mapped.

    dataset tokens   [ example 0: t t t t | t t t ][ example 1: ...        int32, flat
    reference.bin    [            l l l l | l l l ][                       float32, same positions
    reference.json   {"done": examples finished}                           a killed fill goes on from here
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ulysses.data.packing import pack_step
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.reduce import gather_tokens

CHUNK_EXAMPLES = 32  # per data-parallel group between two marks of progress


class ReferenceCache:
    """A dataset whose sequences carry the reference's per-token log-probabilities as the column `reference_logps`.

    Args:
        folder: where the cache lives; named after everything the values depend on.
        dataset: a TokenizedDataset.
    """

    def __init__(self, folder: Path, dataset: Any) -> None:
        self.folder = folder
        self.dataset = dataset
        self.values: np.ndarray | None = None

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
        writer = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if writer:
            self.folder.mkdir(parents=True, exist_ok=True)
        total = int(self.dataset.num_tokens)
        done = torch.tensor(self._done() if writer else len(self.dataset), device=device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        start = int(done.item())
        if writer and (start == 0 or not self._data.exists()):
            np.memmap(self._data, dtype=np.float32, mode="w+", shape=(max(1, total),)).flush()
        if start < len(self.dataset):
            say(f"computing reference log-probabilities of {len(self.dataset) - start} examples -> {self.folder}")
        chunk = CHUNK_EXAMPLES * mesh.data_parallel_size
        for first in range(start, len(self.dataset), chunk):
            positions = list(range(first, min(first + chunk, len(self.dataset))))
            begin = self.dataset.sequence_offset(positions[0], 0)
            values = self._chunk(positions, logprobs, mesh, device, budget)
            if writer:
                flat = np.memmap(self._data, dtype=np.float32, mode="r+", shape=(total,))
                flat[begin : begin + len(values)] = values
                flat.flush()
                self._mark(positions[-1] + 1)
        dist.barrier()
        self.values = np.memmap(self._data, dtype=np.float32, mode="r", shape=(max(1, total),))

    def _chunk(self, positions: list[int], logprobs: Any, mesh: Any, device: torch.device, budget: int) -> np.ndarray:
        """Log-probabilities of consecutive examples, on every rank: each data-parallel group does its share."""
        examples = [self.dataset[i] for i in positions]
        begin = self.dataset.sequence_offset(positions[0], 0)
        lengths = [sum(len(s.tokens) for s in e.sequences) for e in examples]
        mine = pack_step(lengths, budget, mesh.data_parallel_size)[mesh.dp_rank]
        flat = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
        for micro_batch in mine:
            places, sequences = [], []
            for k in micro_batch:
                for j, sequence in enumerate(examples[k].sequences):
                    places.append(self.dataset.sequence_offset(positions[k], j) - begin)
                    sequences.append(sequence)
            batch = pack_shard(sequences, mesh, device)
            whole = gather_tokens(logprobs(batch).float(), batch)
            if mesh.sp_rank == 0:
                at = 0
                for place, sequence in zip(places, sequences, strict=True):
                    flat[place : place + len(sequence.tokens)] = whole[at : at + len(sequence.tokens)]
                    at += len(sequence.tokens)
        dist.all_reduce(flat)
        return flat.cpu().numpy()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the dataset's example, its sequences carrying their `reference_logps` column."""
        example = self.dataset[index]
        sequences = tuple(
            replace(s, token_columns={**s.token_columns, "reference_logps": self._column(index, j, len(s.tokens))})
            for j, s in enumerate(example.sequences)
        )
        return replace(example, sequences=sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def _column(self, index: int, j: int, length: int) -> np.ndarray:
        assert self.values is not None
        begin = self.dataset.sequence_offset(index, j)
        return self.values[begin : begin + length]

    def complete(self) -> bool:
        """Say whether every example has its values already."""
        return self._done() >= len(self.dataset)

    @property
    def _data(self) -> Path:
        return self.folder / "reference.bin"

    def _done(self) -> int:
        try:
            return int(json.loads((self.folder / "reference.json").read_text())["done"]) if self._data.exists() else 0
        except (OSError, ValueError, KeyError):
            return 0

    def _mark(self, done: int) -> None:
        temporary = self.folder / "reference.tmp"
        temporary.write_text(json.dumps({"done": done}))
        os.replace(temporary, self.folder / "reference.json")
