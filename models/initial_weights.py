"""The weights that training starts from: read from files, or drawn at random."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.arch import ModelConfig
from models.decoder import VALUE, init_parameter
from models.folders import VOCABULARY
from models.hf_format import WeightFiles
from models.kinds import parameter_shapes
from ulysses.parallel.random_keys import keyed_generator


class InitialWeights:
    """The weights that training starts from, given slice by slice; the same on any number of ranks.

    They come from safetensors files. What these lack (a new score head), or everything without a folder, is drawn at
    random, keyed by (seed, name). A policy and its value both start from the same model. Of an adapter A is uniform in
    +-1 / sqrt(inputs) and B zero.

    Args:
        continues: the folder holds an adapter, whose A and B are the start of those that are trained; its base has the
            other weights. Otherwise an adapter is a part of them.
        new_rows: rows of the vocabulary's matrices that the files lack, or have for no token yet, and those of which
            each is the mean.
    """

    def __init__(
        self,
        shape: ModelConfig,
        seed: int,
        folder: Path | None = None,
        quantize: str = "none",
        *,
        new_rows: Mapping[int, list[int]] = {},
        continues: bool = False,
    ) -> None:
        self.shape, self.quantize, self.new_rows = shape, quantize, new_rows
        self.seed = seed
        self.files, self.started = None, {}
        self.stored: Mapping[str, Any] = {}
        self.paths: list[Path] = []
        if folder:
            self.files = WeightFiles(folder)
            self.started = self.files.take_adapter() if continues else {}
            self.stored, self.paths = self.files.tensors, self.files.paths

    def fill(self, name: str, shape: torch.Size, start: int, out: Tensor) -> None:
        plain = name.removeprefix(VALUE)
        stop, device = start + out.numel(), out.device
        if out.dtype == torch.uint8:
            whole = self._packed(plain, device)
        elif self.files and plain in self.stored:
            held = self.stored[plain].shape.numel()
            known = self.files.read(plain, start, min(stop, held), device=device)
            out[: len(known)].copy_(known)
            if plain in VOCABULARY:
                self._fill_rows(plain, shape[1], start, out)
            return
        elif ".lora_" in name:
            owner, _, kind = plain.partition(".lora_")
            last = kind.rpartition(".")[2] if len(shape) == 3 else "weight"
            whole = torch.zeros(shape, device=device)
            if stored := self.started.get(f"{owner}.{last}"):
                whole = stored.read()[kind[0] == "B"]
            elif ".lora_A" in name:
                bound = 1 / math.sqrt(shape[-1])
                # PEFT's name of a module's first adapter, by which values have always been drawn
                key = f"{name}.default.weight" if name.endswith(".lora_A") else name
                generator = keyed_generator(device, self.seed, key)
                whole.uniform_(-bound, bound, generator=generator)
        else:
            whole = init_parameter(
                plain, shape, self.shape, self.seed, device=device, dtype=out.dtype
            )
        out.copy_(whole.reshape(-1)[start:stop])

    def _fill_rows(self, name: str, width: int, start: int, out: Tensor) -> None:
        """Write what a slice of a matrix holds of the new rows."""
        assert self.files is not None
        for row, others in self.new_rows.items():
            first = row * width - start
            low, high = max(first, 0), min(first + width, len(out))
            if low < high:
                old = [self.files.read(name, i * width, (i + 1) * width) for i in others]
                out[low:high] = torch.stack(old).float().mean(0)[low - first : high - first]

    def _packed(self, name: str, device: torch.device) -> Tensor:
        """Return the bytes of a quantised matrix, on the device; nothing else of the model is held."""
        from models.quantized import pack

        stored = self.stored.get(name)
        if stored and stored.state:
            return stored.read_packed()
        shape = parameter_shapes(self.shape)[name]
        dtype = stored.dtype if stored else torch.float32
        matrix = torch.empty(shape, dtype=dtype, device=device)
        InitialWeights.fill(self, name, shape, 0, matrix.view(-1))
        return pack(matrix)
