"""The weights of Hugging Face model folders: read slices of them, adapters added in.

Reading touches only the bytes asked for. models/writing.py writes new ones.
"""

import json
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
    INDEX,
    VOCABULARY,
    WEIGHTS,
    base_folder,
    read_adapter_config,
    read_json,
)
from models.multimodal import CARRIED, inside

NF4_STATE = (
    ".quant_state.bitsandbytes__nf4"  # description of a matrix that bitsandbytes quantised
)
NF4_PARTS = "", ".absmax", ".nested_quant_map", ".nested_absmax"
STAGED = 32 << 20  # elements that are on their way to a GPU together


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file.

    state: of a matrix that bitsandbytes quantised to NF4, its description; the file then holds its codes under its
    name. Others have none.
    """

    file: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    state: Mapping[str, object] = {}

    def read_packed(self) -> Tensor:
        """Return a quantised matrix as models/quantized.py holds it."""
        from models.quantized import join_parts

        with safe_open(self.file, "pt") as file:
            codes, sizes, *numbers = (file.get_tensor(self.name + part) for part in NF4_PARTS)
        mean = torch.tensor([self.state["nested_offset"]])
        return join_parts(codes, sizes, torch.cat([mean, *numbers]))

    def whole(self) -> Tensor:
        """Return the tensor on the CPU."""
        return self.read(0, self.shape.numel()).view(self.shape)

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; on the CPU a view of the file's pages unless quantised."""
        if self.state:
            from models.quantized import unpack

            matrix = unpack(self.read_packed(), self.shape, torch.float32)
            return matrix.view(-1)[start:stop]
        with safe_open(self.file, "pt") as file:
            return self.part(file, start, stop, device)

    def part(
        self, file: safe_open, start: int, stop: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return those elements from its file, which is open, on the CPU as a view of the file's pages."""
        part = file.get_tensor(self.name).view(-1)[start:stop]
        if torch.device(device).type == "cuda":
            part = _on_gpu(part, device)
        # the least and the greatest are not numbers if any element is not one
        if part.numel() and not torch.isfinite(torch.stack(part.aminmax())).all():
            raise FloatingPointError(
                f"{self.name} in {self.file.absolute()} holds infinite weights, or some that are not numbers; download "
                "it again"
            )
        return part


def _on_gpu(pages: Tensor, device: torch.device | str) -> Tensor:
    """Copy a view of a file's pages through pinned memory, which all of torch's threads fill while the GPU takes more.

    CUDA's own copy reads the file by one thread, which waits for the disk at every few pages.
    """
    out = torch.empty_like(pages, device=device)
    for target, piece in zip(out.split(STAGED), pages.split(STAGED)):
        target.copy_(piece.pin_memory(), non_blocking=True)
    return out


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read a safetensors file's header; ValueError if it is broken, or holds quantised weights."""
    found = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)  # nothing is read yet
                found[name] = StoredTensor(path, name, tensor.shape, tensor.dtype)
    except SafetensorError as error:
        raise ValueError(
            f"{path.absolute()} is not a whole safetensors file ({error}); download it again"
        ) from None
    _join_packed(path, found)
    for name, tensor in found.items():
        # those of MXFP4 are joined by models/expert_files.py
        is_mxfp4 = tensor.dtype == torch.uint8 and name.endswith(("_blocks", "_scales"))
        if not is_mxfp4 and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1):
            raise ValueError(
                f"{path.absolute()} holds {name} as {tensor.dtype}, but quantised weights cannot be trained; use the "
                "model that they were made from, or dequantise them to bfloat16"
            )
    return found


def _join_packed(path: Path, found: dict[str, StoredTensor]) -> None:
    """Make one tensor of those that a quantised matrix consists of, under its name and with its former dtype."""
    for description in [name for name in found if name.endswith(NF4_STATE)]:
        name = description.removesuffix(NF4_STATE)
        from models.quantized import BLOCK, OUTER, packed_parts

        try:
            state = json.loads(bytes(found[description].whole().tolist()))
            layout = state["blocksize"], state["nested_blocksize"], state["quant_type"]
            shape, dtype = torch.Size(state["shape"]), getattr(torch, state["dtype"])
            codes, sizes, *numbers = (found[name + part].shape.numel() for part in NF4_PARTS)
            sums = [codes, sizes, 4 * (1 + sum(numbers))]
            is_nf4 = layout == (BLOCK, OUTER, "nf4") and sums == packed_parts(shape)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_nf4 = False
        if not is_nf4:
            raise ValueError(
                f"{path.absolute()} holds {name} otherwise than in NF4 doubly quantised, in blocks of 64 and "
                "256; quantise the original model anew with model.quantize"
            )
        for part in [part for part in found if part.startswith(f"{name}.")]:
            del found[part]
        found[name] = StoredTensor(path, name, shape, dtype, state)


def lora_scale(rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor of B A in an adapted matrix."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def low_rank(a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return what an adapter adds to a matrix, or to those of experts: scale * B A in float32, perhaps transposed."""
    update = scale * (b.float() @ a.float())
    return update.mT if transposed else update


class StoredAdapter(NamedTuple):
    """A and B of a matrix [outputs, inputs], or of those of N experts, as PEFT's files hold them.

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
    """The tensors of a folder by name; a second one of a name, however files hold it, is refused with ValueError."""

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

    tensors: all that is stored, by name: StoredTensors, or what models/expert_files.py makes of several. An adapted
        matrix has its base's dtype, although it is read in float32.
    adapter: adapter_config.json of an adapter's folder.
    dtype: of the adapters, which is the precision that they were trained in; None without them.
    quantize: to what the base's matrices were quantised when the adapter was trained, or "none".
    carried: tensors that no model here has, which exports hold as they are: those of vision, and of MTP.
    paths: the files that hold the tensors, and those that say how much of them adapters add.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Any] = NamedTensors(folder)
        self.carried: dict[str, StoredTensor] = NamedTensors(folder)
        self.adapter: Fields | None = None
        self.dtype: torch.dtype | None = None
        self.quantize = "none"
        # what adapters add to a matrix: scale * B A
        self._updates: dict[str, list[StoredAdapter]] = {}
        if (self.folder / ADAPTER_CONFIG).is_file():
            self._read_adapter()
        else:
            self.paths = weight_paths(self.folder)
            for name, tensor in chain(*(_stored_tensors(path).items() for path in self.paths)):
                if name.startswith(CARRIED):
                    self.carried[name] = tensor
                else:
                    self.tensors[inside(name)] = tensor
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
        rank, parameters = self.adapter["r"], self.adapter.get("target_parameters") or ()
        scale = lora_scale(
            rank, self.adapter.get("lora_alpha") or 8, bool(self.adapter.get("use_rslora"))
        )
        base = WeightFiles(base_folder(self.folder))
        self.tensors, self._updates = dict(base.tensors), base._updates
        is_tied = (
            VOCABULARY[1] not in base.tensors and self.adapter.get("task_type") != "SEQ_CLS"
        )
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
        found = NamedTensors(self.folder)
        for key, tensor in _stored_tensors(path).items():
            found[inside(key.removeprefix("base_model.model."))] = tensor
        for key, tensor in found.items():
            self.dtype = tensor.dtype
            stem, _, kind = key.partition(".lora_")
            if stem in ("score.weight", *VOCABULARY):
                self.tensors[stem] = tensor
            elif kind in ("A.weight", "B.weight"):
                pairs.setdefault(adapted_name(stem, parameters), {})[kind[0]] = tensor
            else:
                raise ValueError(
                    f"{path.absolute()} holds {tensor.name}, which is neither a LoRA matrix nor a score head; merge "
                    "the adapter into its base with PEFT"
                )
        own = [name for name in VOCABULARY if self.tensors.get(name) != base.tensors.get(name)]
        if own and is_tied and (len(own) < 2 or not torch.equal(*map(self.read, own))):
            raise ValueError(
                f"{path.absolute()} has another lm_head than embedding, which are one matrix in its base model; merge "
                "the adapter into its base with PEFT"
            )
        for name, pair in pairs.items():
            adapted = self.tensors.get(name)
            shapes = {kind: list(tensor.shape) for kind, tensor in pair.items()}
            shape = adapted.shape if adapted else ()
            experts, outputs, inputs = {2: (0, *shape), 3: shape}.get(len(shape), (0, 0, 0))
            transposed = f"{name}_bias" in self.tensors  # such experts have biases
            if transposed:
                outputs, inputs = inputs, outputs
            rows = rank * (experts or 1)
            if shapes != {"A": [rows, inputs], "B": [outputs, rows]}:
                raise ValueError(
                    f"{path.absolute()} adapts {name} by matrices of shapes {shapes}, which the base model "
                    f"{base.folder.absolute()} does not fit; correct base_model_name_or_path"
                )
            adapter = StoredAdapter(pair["A"], pair["B"], scale, experts, transposed)
            self._updates.setdefault(name, []).append(adapter)

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

        `quantize` reads a layer's whole matrix as it is after it was quantised so, with adapters.
        """
        stored, updates = self.tensors[name], self._updates.get(name, ())
        stop = stored.shape.numel() if stop is None else stop
        flat = stored.read(start, stop, "cpu" if updates else device)
        endings = "_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"
        is_matrix = name.removesuffix(".weight").endswith(endings)
        if quantize != "none" and is_matrix and not stored.state:
            from models.quantized import pack, unpack

            data = pack(flat.view(stored.shape))
            flat = unpack(data, stored.shape, torch.float32).view(-1)
        # the rows, or the experts, that these elements lie in
        size = stored.shape[1:].numel()
        first, last = start // size, -(-stop // size)
        for adapter in updates:
            a, b = adapter.read()
            a = a[first:last] if adapter.experts else a
            update = low_rank(a, b[first:last], adapter.scale, adapter.transposed)
            flat = flat.float() + update.flatten()[start - first * size :][: len(flat)]
        return flat

    def take_adapter(self) -> dict[str, StoredAdapter]:
        """Take the topmost adapter out of the weights; return what it consists of by the names of what it adapts."""
        return {name: updates.pop() for name, updates in self._updates.items()}

    def base(self, name: str) -> Tensor:
        """Return all elements of a tensor without what adapters add to it."""
        return self.tensors[name].read(0, self.tensors[name].shape.numel())

    def check(
        self, expected: Mapping[str, torch.Size], *, may_lack: tuple[str, ...] = ()
    ) -> None:
        """Compare with a model's parameters (name -> shape).

        Raises ValueError on a missing parameter that is not in `may_lack` or a different shape. Stored tensors that the
        model does not have are ignored if they are a reward model's unused head, an equal copy of tied embeddings or a
        cached table, and refused otherwise.
        """
        unused = ("lm_head.weight", "score.weight", "rotary_emb.inv_freq")
        found = {
            name: stored.shape
            for name, stored in self.tensors.items()
            if name in expected or not name.endswith(unused)
        }
        wrong = [
            name
            for name in {**expected, **found}
            if found.get(name) != expected.get(name) and (name in found or name not in may_lack)
        ]
        if wrong:
            name = wrong[0]
            fault = "is missing" if name in expected else "has no place in the model"
            if name in expected and name in found:
                fault = f"has the shape {[*found[name]]} instead of {[*expected[name]]}"
            raise ValueError(
                f"{self.folder.absolute()} does not fit its config.json: {name} {fault}, the first of {len(wrong)} "
                "differences; merge adapters, or check that config.json belongs to these weights"
            )
        is_tied = not {VOCABULARY[1], "score.weight"} & expected.keys()
        # transformers leaves two such matrices untied
        if (
            is_tied
            and {*VOCABULARY} <= self.tensors.keys()
            and not torch.equal(*map(self.read, VOCABULARY))
        ):
            raise ValueError(
                f"{self.folder.absolute()} holds another {VOCABULARY[1]} than {VOCABULARY[0]}, but its config.json "
                "says that they are one matrix; set tie_word_embeddings to false there"
            )


def weight_paths(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights; FileNotFoundError or ValueError if one is absent."""
    names = [WEIGHTS]
    # beside the whole file, which transformers prefers too, an index is left from an earlier save in several files
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        table = read_json(folder / INDEX).get("weight_map")
        names = (
            sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
        )
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
