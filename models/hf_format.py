"""Read slices of the weights in Hugging Face model folders, with adapters added to them.

Only the bytes that are asked for are read. models/writing.py writes folders.
"""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.families import Fields
from models.folders import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EMBEDDINGS,
    INDEX,
    LM_HEAD,
    VOCABULARY,
    WEIGHTS,
    base_folder,
    read_adapter_config,
    read_json,
)
from models.multimodal import CARRIED, text_name

STAGED = 32 << 20  # elements that are copied to a GPU at a time


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file."""

    file: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    is_packed: bool = False

    def pages(self) -> Tensor:
        """Return a view of the file's pages, of which none is read yet."""
        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name)

    def whole(self) -> Tensor:
        """Return the tensor on the CPU."""
        return self.read(0, self.shape.numel()).view(self.shape)

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; on the CPU a view of the file's pages."""
        with safe_open(self.file, "pt") as file:
            return self.read_from(file, start, stop, device)

    def read_from(
        self, file: safe_open, start: int, stop: int, device: torch.device | str
    ) -> Tensor:
        """Do what `read` does, with the tensor's file open."""
        part = file.get_tensor(self.name).view(-1)[start:stop]
        if torch.device(device).type == "cuda":
            part = _on_gpu(part, device)
        # if any element is no number, neither are the least and the greatest
        if part.numel() and not torch.isfinite(torch.stack(part.aminmax())).all():
            raise FloatingPointError(
                f"{self.name} in {self.file.absolute()} holds infinite weights, or some that are not numbers; download "
                "it again"
            )
        return part


def _on_gpu(pages: Tensor, device: torch.device | str) -> Tensor:
    """Copy a view of a file's pages to a GPU through pinned memory.

    All of torch's threads fill the next piece of pinned memory while the GPU copies one. CUDA's own copy would read the
    file by one thread, which waits for the disk at every few pages.
    """
    out = torch.empty_like(pages, device=device)
    for target, piece in zip(out.split(STAGED), pages.split(STAGED)):
        target.copy_(piece.pin_memory(), non_blocking=True)
    return out


def _stored_tensors(path: Path) -> dict[str, Any]:
    """Read a safetensors file's header; ValueError if it is broken, or holds weights in a form that is not read."""
    tensors: dict[str, Any] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)  # maps the file's pages, and reads none
                tensors[name] = StoredTensor(path, name, tensor.shape, tensor.dtype)
    except SafetensorError as error:
        raise ValueError(
            f"{path.absolute()} is not a whole safetensors file ({error}); download it again"
        ) from None
    if any(".quant_state." in name for name in tensors):
        from models.quantized import join_packed

        join_packed(path, tensors)
    for name, tensor in tensors.items():
        # the parts of matrices in MXFP4, which models/expert_files.py joins
        is_mxfp4 = tensor.dtype == torch.uint8 and name.endswith(("_blocks", "_scales"))
        if not is_mxfp4 and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1):
            raise ValueError(
                f"{path.absolute()} holds {name} as {tensor.dtype}, but quantised weights cannot be trained; use the "
                "model that they were made from, or dequantise them to bfloat16"
            )
    return tensors


def lora_scale(rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor of B A in what an adapter adds to a matrix."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def low_rank(a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return what an adapter adds to a matrix, or to each expert's: scale * B A in float32, transposed if asked to."""
    update = scale * (b.float() @ a.float())
    return update.mT if transposed else update


class StoredAdapter(NamedTuple):
    """A and B of a matrix [outputs, inputs], or of the matrices of N experts, as PEFT's files hold them.

    a: [r, inputs], or [N * r, inputs]. b: [outputs, r], or [outputs, r * N], the expert's number last.
    transposed: the matrices are [inputs, outputs].
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    experts: int
    transposed: bool

    def read(self) -> tuple[Tensor, Tensor]:
        """Return A [r, inputs] and B [outputs, r], or [N, r, inputs] and [N, outputs, r]."""
        a, b = self.a.whole(), self.b.whole()
        if not self.experts:
            return a, b
        a, b = a.unflatten(0, (self.experts, -1)), b.unflatten(1, (-1, self.experts))
        return a, b.permute(2, 0, 1)


class NamedTensors(dict[str, Any]):
    """The tensors of a folder by name; ValueError for a second one of the same name, in whatever form files hold it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __setitem__(self, name: str, tensor: Any) -> None:
        if name in self:
            raise ValueError(
                f"{self.folder.absolute()} holds {name} more than once: in two files, under two names, or whole and in "
                "parts (experts one by one, blocks of MXFP4); remove all but one"
            )
        super().__setitem__(name, tensor)


class WeightFiles:
    """Read the weights of a model folder by name, as flat slices, touching only the bytes asked for.

    The folder of a LoRA adapter is read together with its base model: a slice of an adapted matrix is the base's slice
    plus scale * B A, added in float32. A score head in the adapter's file replaces the base's.

    tensors: the stored tensors by name: StoredTensors, or what models/expert_files.py and models/quantized.py make of
        several. An adapted matrix has its base's dtype, although it is read in float32.
    adapter: adapter_config.json of an adapter's folder.
    dtype: in which the adapters were trained; None without adapters.
    quantize: how the base's matrices were quantised when the adapter was trained, or "none".
    carried: tensors that no model here has, of vision and of MTP, which exports hold as they are.
    paths: the files that hold the tensors, and adapter_config.json, which has the scale of an adapter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Any] = NamedTensors(folder)
        self.carried: dict[str, Any] = NamedTensors(folder)
        self.adapter: Fields | None = None
        self.dtype: torch.dtype | None = None
        self.quantize = "none"
        # of each adapted matrix, the topmost last
        self._adapters: dict[str, list[StoredAdapter]] = {}
        if (self.folder / ADAPTER_CONFIG).is_file():
            self._read_adapter()
        else:
            self.paths = weight_paths(self.folder)
            for name, tensor in chain(*(_stored_tensors(path).items() for path in self.paths)):
                if name.startswith(CARRIED):
                    self.carried[name] = tensor
                else:
                    self.tensors[text_name(name)] = tensor
            if any(".experts." in name for name in self.tensors):
                from models.expert_files import join_blocks, join_experts

                join_experts(self.tensors)
                join_blocks(self.tensors)

    def _read_adapter(self) -> None:
        from models.expert_files import adapted_name

        path = self.folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path.absolute()}; convert the adapter to safetensors"
            )
        if (self.folder / WEIGHTS).exists() or (self.folder / INDEX).exists():
            raise ValueError(
                f"{self.folder.absolute()} holds an adapter and a whole model; remove one of them"
            )
        self.adapter = read_adapter_config(self.folder)
        rank, parameters = self.adapter["r"], self.adapter["target_parameters"]
        scale = lora_scale(rank, self.adapter["lora_alpha"], self.adapter["use_rslora"])
        base = WeightFiles(base_folder(self.folder))
        self.tensors, self._adapters = dict(base.tensors), base._adapters
        is_tied = LM_HEAD not in base.tensors and self.adapter.get("task_type") != "SEQ_CLS"
        self.carried = base.carried
        self.paths = [*base.paths, path, self.folder / ADAPTER_CONFIG]
        pairs: dict[str, dict[str, StoredTensor]] = {}
        with safe_open(path, "pt") as file:
            self.quantize = (file.metadata() or {}).get("quantize", "none")
        if self.quantize not in ("none", "nf4"):
            raise ValueError(
                f"{path.absolute()} was trained on a base of {self.quantize} numbers, which is read no more; merge the "
                "adapter into its base with PEFT"
            )
        stored = NamedTensors(self.folder)
        for name, tensor in _stored_tensors(path).items():
            name = text_name(name.removeprefix("base_model.model."))
            stored[name] = tensor
            self.dtype = tensor.dtype
            stem, _, kind = name.partition(".lora_")
            if stem in ("score.weight", *VOCABULARY):
                self.tensors[stem] = tensor
            elif kind in ("A.weight", "B.weight"):
                pairs.setdefault(adapted_name(stem, parameters), {})[kind[0]] = tensor
            else:
                raise ValueError(
                    f"{path.absolute()} holds {tensor.name}, which is neither a LoRA matrix nor a score head; merge "
                    "the adapter into its base with PEFT"
                )
        replaced = [x for x in VOCABULARY if self.tensors.get(x) != base.tensors.get(x)]
        if (
            replaced
            and is_tied
            and (len(replaced) < 2 or not torch.equal(*map(self.read, replaced)))
        ):
            raise ValueError(
                f"{path.absolute()} has another lm_head than embedding, which are one matrix in its base model; merge "
                "the adapter into its base with PEFT"
            )
        for name, pair in pairs.items():
            shapes = {kind: list(tensor.shape) for kind, tensor in pair.items()}
            sides = list(self.tensors[name].shape) if name in self.tensors else []
            experts = sides.pop(0) if len(sides) == 3 else 0
            # of experts, those with transposed matrices have biases, and no others
            transposed = f"{name}_bias" in self.tensors
            if transposed:
                sides.reverse()
            rows = rank * (experts or 1)
            if len(sides) != 2 or shapes != {"A": [rows, sides[1]], "B": [sides[0], rows]}:
                raise ValueError(
                    f"{path.absolute()} adapts {name} by matrices of shapes {shapes}, which the base model "
                    f"{base.folder.absolute()} does not fit; correct base_model_name_or_path"
                )
            adapter = StoredAdapter(pair["A"], pair["B"], scale, experts, transposed)
            self._adapters.setdefault(name, []).append(adapter)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        quantize: str = "none",
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the flat elements [start, stop), row-major, of a tensor; all of them by default.

        With `quantize` a matrix of a layer, which must be read whole, is quantised and dequantised before adapters are
        added.
        """
        stored, adapters = self.tensors[name], self._adapters.get(name, ())
        stop = stored.shape.numel() if stop is None else stop
        flat = stored.read(start, stop, "cpu" if adapters else device)
        endings = "_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"
        is_matrix = name.removesuffix(".weight").endswith(endings)
        if quantize != "none" and is_matrix and not stored.is_packed:
            from models.quantized import Packed, pack

            data = pack(flat.view(stored.shape))
            flat = Packed(stored.shape).unpack(data, torch.float32).view(-1)
        # the rows, or the experts, that these elements lie in
        size = stored.shape[1:].numel()
        first, last = start // size, -(-stop // size)
        for adapter in adapters:
            a, b = adapter.read()
            a = a[first:last] if adapter.experts else a
            update = low_rank(a, b[first:last], adapter.scale, adapter.transposed)
            flat = flat.float() + update.flatten()[start - first * size :][: len(flat)]
        return flat

    def take_adapter(self) -> dict[str, StoredAdapter]:
        """Take the topmost adapter out of the weights; return its matrices by the names of what they adapt."""
        return {name: adapters.pop() for name, adapters in self._adapters.items()}

    def base(self, name: str) -> Tensor:
        """Return all elements of a tensor, without adapters."""
        return self.tensors[name].read(0, self.tensors[name].shape.numel())

    def check(
        self, expected: Mapping[str, torch.Size], *, may_lack: tuple[str, ...] = ()
    ) -> None:
        """Compare with a model's parameters (name -> shape).

        Raises ValueError for a parameter of another shape, and for one that is missing and not in `may_lack`. Of stored
        tensors that the model does not have, an unused head, an equal copy of tied embeddings and a cached table are
        ignored, and others are refused.
        """
        ignored = (LM_HEAD, "score.weight", "rotary_emb.inv_freq")
        stored = {
            name: tensor.shape
            for name, tensor in self.tensors.items()
            if name in expected or not name.endswith(ignored)
        }
        wrong = [
            name
            for name in {**expected, **stored}
            if stored.get(name) != expected.get(name)
            and (name in stored or name not in may_lack)
        ]
        if wrong:
            name = wrong[0]
            fault = "is missing" if name in expected else "has no place in the model"
            if name in expected and name in stored:
                fault = f"has the shape {[*stored[name]]} instead of {[*expected[name]]}"
            raise ValueError(
                f"{self.folder.absolute()} does not fit its config.json: {name} {fault}, the first of {len(wrong)} "
                "differences; merge adapters, or check that config.json belongs to these weights"
            )
        is_tied = not {LM_HEAD, "score.weight"} & expected.keys()
        # where files hold two different ones, transformers would leave them untied
        if (
            is_tied
            and {*VOCABULARY} <= self.tensors.keys()
            and not torch.equal(*map(self.read, VOCABULARY))
        ):
            raise ValueError(
                f"{self.folder.absolute()} holds another {LM_HEAD} than {EMBEDDINGS}, but its config.json "
                "says that they are one matrix; set tie_word_embeddings to false there"
            )


def weight_paths(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights; FileNotFoundError or ValueError if one is absent."""
    names = [WEIGHTS]
    # an index beside a whole file is left from an earlier save in several files; transformers prefers the file too
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = []
        if isinstance(weight_map, dict):
            names = sorted({str(name) for name in weight_map.values()})
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(
                f"{(folder / INDEX).absolute()} must hold a weight_map from parameters to names of files in its own "
                "folder; download it again"
            )
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"there is no {name} in {folder.absolute()}; download it again, or convert the model to safetensors"
            )
    return [folder / name for name in names]
