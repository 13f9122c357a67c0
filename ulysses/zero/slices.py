"""Read saved flat slices of parameters and optimizer state, whatever number of ranks wrote them (no deepspeed needed)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

KINDS = ("master", "exp_avg", "exp_avg_sq")


class SavedSlices:
    """The slices of one engine in a checkpoint.

    Args:
        folder: holds rank-*.json and rank-*.KIND.safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.places: dict[
            str, list[tuple[int, int, int, str]]
        ] = {}  # name -> (start, length, offset in the file, rank file)
        self._open: dict[str, Any] = {}
        for file in sorted(folder.glob("rank-*.json")):
            content = json.loads(file.read_text())
            self.step = content["step"]
            for name, start, length, offset in content["pieces"]:
                self.places.setdefault(name, []).append(
                    (start, length, offset, file.name.removesuffix(".json"))
                )

    def numel(self, name: str) -> int:
        """Return how many elements of a parameter are saved."""
        return sum(length for _, length, _, _ in self.places.get(name, []))

    def read_into(self, target: torch.Tensor, name: str, kind: str, start: int = 0) -> None:
        """Copy elements [start, start + len(target)) of the flattened parameter into a 1-D tensor.

        Raises:
            ValueError: if some of them were not saved.
        """
        filled, stop = 0, start + target.numel()
        for begin, length, offset, stem in self.places.get(name, []):
            a, b = max(begin, start), min(begin + length, stop)
            if a < b:
                target.narrow(0, a - start, b - a).copy_(
                    self._data(stem, kind)[offset + a - begin : offset + b - begin]
                )
                filled += b - a
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint {self.folder} does not hold all of {name}; it belongs to another model"
            )

    def _data(self, stem: str, kind: str) -> Any:
        file = f"{stem}.{kind}.safetensors"
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt").get_slice("data")
        return self._open[file]
