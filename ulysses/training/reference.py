"""The reference policy's log-probabilities, computed once and memory-mapped.

    dataset tokens   [ example 0: t t t t | t t t ][ example 1: ...        int32, flat
    reference.bin    [            l l l l | l l l ][                       float32, same positions
    reference.json   {"done": examples finished}                           a killed fill goes on from here
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ulysses.data.packing import pack_step
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.reduce import gather_tokens

CHUNK_EXAMPLES = 32  # per data-parallel group between two marks of progress


class ReferenceCache:
    """Per-token log-probabilities of every sequence of a dataset, in the dataset's own token order.

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

    def attach(self, index: int, sequences: tuple[Sequence, ...]) -> list[Sequence]:
        """Return example `index`'s sequences with their `reference_logps` column."""
        assert self.values is not None
        out = []
        for j, s in enumerate(sequences):
            begin = self.dataset.sequence_offset(index, j)
            column = self.values[begin : begin + len(s.tokens)]
            out.append(Sequence(s.tokens, s.loss_weights, {**s.token_columns, "reference_logps": column}, s.columns))
        return out

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
