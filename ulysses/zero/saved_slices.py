"""Read the slices that state.py saved, for any other partition of the same parameters.

It needs no deepspeed, so that a checkpoint can be exported without it.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses.zero.state import KINDS


class SavedSlices:
    """The slices of one engine in a checkpoint.

    Args:
        folder: holds rank-*.json and rank-*.KIND.safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates = 0
        # name -> (start, length, offset in the file, rank file)
        self.places: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        self._data = cache(lambda file: safe_open(folder / file, "pt").get_slice("data"))
        for file in sorted(folder.glob("rank-*.json")):
            content = json.loads(file.read_text())
            self.updates = content["updates"]
            for name, start, length, offset in content["pieces"]:
                # as adapters' parameters were once called
                name = name.replace(".base_layer.", ".").removesuffix(".default.weight")
                self.places[name].append((start, length, offset, file.stem))

    def numel(self, name: str) -> int:
        """Return how many elements of a parameter are saved."""
        return sum(length for _, length, _, _ in self.places[name])

    def read_into(self, target: Tensor, name: str, kind: str, start: int = 0) -> None:
        """Copy elements [start, start + len(target)) of the flattened parameter into a 1-D tensor.

        Raises:
            ValueError: if some of them were not saved.
        """
        filled, stop = 0, start + target.numel()
        for begin, length, offset, stem in self.places[name]:
            a, b = max(begin, start), min(begin + length, stop)
            if a < b:
                data, shift = self._data(f"{stem}.{kind}.safetensors"), offset - begin
                target[a - start : b - start].copy_(data[a + shift : b + shift])
                filled += b - a
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint {self.folder} does not hold all of {name}; it belongs to another model"
            )


@torch.no_grad()
def load_state(engine: Any, folder: Path) -> None:
    """Restore this rank's slices from a folder written by any number of ranks; every rank calls it.

    Raises:
        ValueError: if the folder holds other parameters than this model's, naming the first that differs.
    """
    saved = SavedSlices(folder)
    ours = {s.name: s.numel for s in engine.slices}
    for name in [*ours, *saved.places]:
        if saved.numel(name) != ours.get(name, 0):
            raise ValueError(
                f"the checkpoint {folder} belongs to another model: it holds {saved.numel(name)} elements of "
                f"{name}, this model has {ours.get(name, 0)}; resume with the same model and adapters"
            )
    for kind in KINDS:
        for s in engine.slices:
            values = s.state(kind)
            saved.read_into(values, s.name, kind, s.start)
            s.restore(kind, values)
    for sub_group in engine.sub_groups:
        sub_group.updates = saved.updates
    engine.publish()
