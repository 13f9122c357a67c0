"""The weights that training starts from, read from files or drawn at random."""

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
    """The weights that training starts from, slice by slice; they are the same on any number of ranks.

    They come from the folder's files. Weights that these lack, such as a new score head, or all weights if there is no
    folder, are drawn at random, keyed by (seed, name). A policy and its value both start from the same model. Of a new
    adapter A is uniform in +-1 / sqrt(inputs), and B is zero.

    Args:
        continues: the folder holds an adapter, whose A and B the trained adapters start from; the other weights are its
            base's. Otherwise a folder's adapter is a part of the weights.
        new_rows: rows of the vocabulary's matrices that the files lack, or have for no token yet, each with the rows
            whose mean it is.
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
        self.files, self.adapters = None, {}
        self.stored: Mapping[str, Any] = {}
        self.paths: list[Path] = []
        if folder:
            self.files = WeightFiles(folder)
            self.adapters = self.files.take_adapter() if continues else {}
            self.stored, self.paths = self.files.tensors, self.files.paths

    def fill(self, name: str, size: torch.Size, start: int, out: Tensor) -> None:
        """Write the elements from `start` on of a parameter of that size, row-major, into `out`."""
        stored_name = name.removeprefix(VALUE)
        stop, device = start + out.numel(), out.device
        if out.dtype == torch.uint8:
            whole = self._packed(stored_name, device)
        elif self.files and stored_name in self.stored:
            count = self.stored[stored_name].shape.numel()
            elements = self.files.read(stored_name, start, min(stop, count), device=device)
            out[: len(elements)].copy_(elements)
            if stored_name in VOCABULARY:
                self._fill_rows(stored_name, size[1], start, out)
            return
        elif ".lora_" in name:
            whole = self._adapter(name, size, device)
        else:
            whole = init_parameter(
                stored_name, size, self.shape, self.seed, device=device, dtype=out.dtype
            )
        out.copy_(whole.reshape(-1)[start:stop])

    def _adapter(self, name: str, size: torch.Size, device: torch.device) -> Tensor:
        """Return A or B of an adapter: that of the folder's adapter, or a new one."""
        module, _, kind = name.removeprefix(VALUE).partition(".lora_")
        adapted = kind.rpartition(".")[2] if len(size) == 3 else "weight"
        if stored := self.adapters.get(f"{module}.{adapted}"):
            a, b = stored.read()
            return b if kind[0] == "B" else a
        whole = torch.zeros(size, device=device)
        if kind[0] == "A":
            bound = 1 / math.sqrt(size[-1])
            # PEFT's name of a module's first adapter, by which values have always been drawn
            key = f"{name}.default.weight" if name.endswith(".lora_A") else name
            generator = keyed_generator(device, self.seed, key)
            whole.uniform_(-bound, bound, generator=generator)
        return whole

    def _fill_rows(self, name: str, width: int, start: int, out: Tensor) -> None:
        """Write the parts of new rows that lie in `out`, a slice of a matrix whose rows have that width."""
        assert self.files is not None
        for row, sources in self.new_rows.items():
            first = row * width - start
            low, high = max(first, 0), min(first + width, len(out))
            if low < high:
                rows = [self.files.read(name, i * width, (i + 1) * width) for i in sources]
                out[low:high] = torch.stack(rows).float().mean(0)[low - first : high - first]

    def _packed(self, name: str, device: torch.device) -> Tensor:
        """Return the bytes of a quantised matrix on the device, where nothing else of the model is held meanwhile."""
        from models.quantized import pack

        stored = self.stored.get(name)
        if stored and stored.is_packed:
            return stored.read_packed()
        size = parameter_shapes(self.shape)[name]
        dtype = stored.dtype if stored else torch.float32
        matrix = torch.empty(size, dtype=dtype, device=device)
        # not a subclass's, whose `fill` may quantise what it is asked for
        InitialWeights.fill(self, name, size, 0, matrix.view(-1))
        return pack(matrix)
