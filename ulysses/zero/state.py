"""Save a ZeRO-3 engine's state as flat slices with an index, and read it for any other partition of the parameters.

    rank-00003.master.safetensors   {"data": float32 [sum of lengths]}     also .exp_avg and .exp_avg_sq
    rank-00003.json                 run, step                              which run wrote the slices, and when
                                    digests: {file: digest}                of the files above
                                    pieces: [[name, start, length, offset], ...]   which part of each parameter is where

A piece says which elements of the flattened parameter it holds, so that any other partition reads exactly what it
needs; padding is never stored. Nothing here imports deepspeed, so that a checkpoint can be exported without it.
"""

import json
from collections import defaultdict
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from ulysses.disk import write_digested
from ulysses.zero.engine import TrainedEngine

KINDS = ("master", "exp_avg", "exp_avg_sq")


def save_state(engine: TrainedEngine, folder: Path, record: dict[str, Any]) -> dict[str, str]:
    """Write this rank's master weights and AdamW moments into `folder`; every rank calls it.

    Return the names of the files with their digests. The index holds the digests too, and `record`: the id of the run,
    and the step.
    """
    stem = f"rank-{dist.get_rank():05d}"
    slices = [s for s in engine.slices if s.shard.length]
    *offsets, count = accumulate((s.shard.length for s in slices), initial=0)
    digests: dict[str, str] = {}
    # The beginning of a safetensors file, after which the slices are written one by one: the library's own function
    # would hold all of them in host memory.
    data = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    header = json.dumps({"data": data}).encode()
    header += b" " * (-len(header) % 8)
    beginning = [len(header).to_bytes(8, "little"), header]
    for kind in KINDS:
        states = (s.state(kind) for s in slices)
        # always a copy: torch never gives back memory that numpy has shared
        parts = (state.to("cpu", copy=True).numpy() for state in states)
        name = f"{stem}.{kind}.safetensors"
        digests[name] = write_digested(folder / name, chain(beginning, parts))
    record |= {
        "updates": engine.sub_groups[0].updates,
        "digests": digests,
        "pieces": [[s.name, s.shard.start, s.shard.length, o] for s, o in zip(slices, offsets)],
    }
    name = f"{stem}.json"
    return digests | {name: write_digested(folder / name, [json.dumps(record).encode()])}


class SavedPiece(NamedTuple):
    """Elements of a flattened parameter, from `start` on, and where they are: from `offset` on in the files `stem`."""

    start: int
    length: int
    offset: int
    stem: str


class SavedSlices:
    """The slices of one engine in a checkpoint.

    Args:
        folder: holds rank-*.json and rank-*.KIND.safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates = 0
        self.places: dict[str, list[SavedPiece]] = defaultdict(list)  # by the parameter's name
        self._data = cache(lambda file: safe_open(folder / file, "pt").get_slice("data"))
        for file in sorted(folder.glob("rank-*.json")):
            content = json.loads(file.read_text())
            self.updates = content["updates"]
            for name, start, length, offset in content["pieces"]:
                # earlier versions called adapters' parameters so
                name = name.replace(".base_layer.", ".").removesuffix(".default.weight")
                self.places[name].append(SavedPiece(start, length, offset, file.stem))

    def numel(self, name: str) -> int:
        """Return how many elements of a parameter are saved."""
        return sum(piece.length for piece in self.places[name])

    def read_into(self, target: Tensor, name: str, kind: str, start: int = 0) -> None:
        """Copy elements [start, start + len(target)) of the flattened parameter into a 1-D tensor.

        Raises:
            ValueError: if some of them were not saved.
        """
        filled = 0
        stop = start + target.numel()
        for piece in self.places[name]:
            first = max(piece.start, start)
            last = min(piece.start + piece.length, stop)
            if first < last:
                data = self._data(f"{piece.stem}.{kind}.safetensors")
                shift = piece.offset - piece.start
                target[first - start : last - start].copy_(data[first + shift : last + shift])
                filled += last - first
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint {self.folder} does not hold all of {name}; it belongs to another model"
            )


@torch.no_grad()
def load_state(engine: TrainedEngine, folder: Path) -> None:
    """Restore this rank's slices from a folder written by any number of ranks; every rank calls it.

    Raises:
        ValueError: if the folder holds other parameters than this model's, naming the first that differs.
    """
    saved = SavedSlices(folder)
    ours = {s.name: s.shard.numel for s in engine.slices}
    for name in [*ours, *saved.places]:
        if saved.numel(name) != ours.get(name, 0):
            raise ValueError(
                f"the checkpoint {folder} belongs to another model: it holds {saved.numel(name)} elements of "
                f"{name}, this model has {ours.get(name, 0)}; resume with the same model and adapters"
            )
    for kind in KINDS:
        for s in engine.slices:
            values = s.state(kind)
            saved.read_into(values, s.name, kind, s.shard.start)
            s.sub_group.restore(kind, s.offset, values)
    for sub_group in engine.sub_groups:
        sub_group.updates = saved.updates
    engine.publish()
