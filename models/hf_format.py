"""Hugging Face model folders: find them, read slices of their weights (adapters added in), write new ones.

    model.safetensors  =  8 bytes: header length | JSON header: name -> dtype, shape, offsets | raw tensor bytes

Reading touches only the bytes asked for; writing never holds more than one shard.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.arch import ModelConfig

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "*.jinja",
)
# "*.safetensors" comes with them where weights are needed
DOWNLOADED = ("*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja")
NOT_DOWNLOADED = ("original/*", "*/*.safetensors", "consolidated*")

_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CHUNK_BYTES = 1 << 26
SHARD_BYTES = 2 << 30  # written to one file, and held in host memory meanwhile


def resolve_model(
    path_or_id: str,
    revision: str | None = None,
    *,
    need_weights: bool = True,
    key: str = "model.path",
) -> Path:
    """Return a local folder: the given one, or the hub snapshot of a model id at `revision` (fetched if absent).

    `key` is the setting that named the model; errors begin with it.

    Honours HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. Only json, safetensors and tokenizer files are fetched, without the
    weights if `need_weights` is false (a tokenizer or a config alone); the hub client's file locks let every process of
    a node call at once and one of them download. Raises FileNotFoundError (ValueError for files that cannot be used)
    saying what was tried.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(
            f"{key} is the file {folder.absolute()} but must be a folder with config.json; name its folder"
        )
    looks_local = path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1
    if looks_local or folder.parent.is_dir():
        raise FileNotFoundError(
            f"{key} is {path_or_id!r} but there is no folder {folder.absolute()} and the value is not a hub "
            "id of the form owner/name; correct the path"
        )
    from huggingface_hub import constants, snapshot_download

    weights = "*.safetensors"
    allowed = [*DOWNLOADED, weights] if need_weights else list(DOWNLOADED)
    ignored = list(NOT_DOWNLOADED)
    try:
        fetched = snapshot_download(
            path_or_id, revision=revision, allow_patterns=allowed, ignore_patterns=ignored
        )
    # one of a dozen classes; they all mean that the model cannot be fetched
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        offline = constants.HF_HUB_OFFLINE
        where = "offline (HF_HUB_OFFLINE is set)" if offline else f"at {constants.ENDPOINT}"
        raise FileNotFoundError(
            f"{key} is {path_or_id!r}: there is no folder {folder.absolute()}, and revision "
            f"{revision or 'main'} was not found {where} or in the cache {constants.HF_HUB_CACHE} "
            f"({type(error).__name__}: {reason}); give a folder, correct the id, or log in for a gated model"
        ) from error
    if need_weights and not any(Path(fetched).glob(weights)):
        raise ValueError(
            f"model {path_or_id} has no .safetensors weights on the hub and other formats can run code when loaded; "
            "convert it to safetensors or name a repository that has them"
        )
    return Path(fetched)


def read_config(folder: Path | str) -> ModelConfig:
    """Read config.json of a model folder; an adapter's folder without one has its base's."""
    return ModelConfig.from_hf(_read_json(folder_with(Path(folder), CONFIG) / CONFIG))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}; a model folder needs it")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path.absolute()} is not a JSON object ({error}); download or write it again"
        ) from None


# Fields of adapter_config.json that change what an adapter computes, and the values of a plain LoRA.
_PLAIN_LORA: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}
_PREFIX = "base_model.model."


def read_adapter_config(folder: Path | str) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises ValueError naming the first field that makes the adapter more than plain LoRA with, at most, a score head.
    """
    path = Path(folder) / ADAPTER_CONFIG
    raw = _read_json(path)
    for field, plain in _PLAIN_LORA.items():
        if raw.get(field) not in plain:
            raise ValueError(
                f"{path.absolute()} has {field} = {raw.get(field)!r} but only plain LoRA is read; merge the adapter "
                "into its base with PEFT"
            )
    others = set(raw.get("modules_to_save") or ()) - {"score", "classifier"}
    if others:
        raise ValueError(
            f"{path.absolute()} has modules_to_save = {sorted(others)} but only a score head is read besides LoRA; "
            "merge the adapter into its base with PEFT"
        )
    return raw


def base_folder(folder: Path | str, *, need_weights: bool = True) -> Path:
    """Return the local folder of the base model that an adapter's adapter_config.json names."""
    raw, path = read_adapter_config(folder), (Path(folder) / ADAPTER_CONFIG).absolute()
    base = raw.get("base_model_name_or_path")
    key = f"base_model_name_or_path in {path}"
    if not base:
        raise ValueError(f"{key} is missing; write the base model's folder or hub id there")
    found = resolve_model(base, raw.get("revision"), need_weights=need_weights, key=key)
    if found.resolve() == Path(folder).resolve():
        raise ValueError(f"{key} names the adapter's own folder; write the base model's there")
    return found


def folder_with(folder: Path, pattern: str) -> Path:
    """Return the folder to read such a file from: the model's own or, for an adapter that lacks it, its base's."""
    if (folder / ADAPTER_CONFIG).exists() and not any(folder.glob(pattern)):
        return folder_with(base_folder(folder, need_weights=False), pattern)
    return folder


class _File:
    """One safetensors file, of whose tensors ranges of elements are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt"):  # checks the header against the file's size
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path.absolute()} is not a whole safetensors file ({error}); download it again"
            ) from None
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            self.entries: dict[str, dict[str, Any]] = json.loads(f.read(length))
        self.entries.pop("__metadata__", None)
        self.start = 8 + length

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        stored = self.entries[name]["dtype"]
        if stored not in _DTYPES:
            raise ValueError(
                f"{name} in {self.path.absolute()} has dtype {stored}, which is not read; convert the weights"
            )
        return _DTYPES[stored]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        entry, dtype = self.entries[name], self.dtype(name)
        out = torch.empty(stop - start, dtype=dtype)
        raw: Any = out.view(torch.uint8).numpy()
        offset = self.start + entry["data_offsets"][0] + start * dtype.itemsize
        done = 0
        # pread, not mmap: pages read never count as this process's memory
        with self.path.open("rb", buffering=0) as f:
            while done < len(raw):
                count = os.preadv(f.fileno(), [raw[done : done + _CHUNK_BYTES]], offset + done)
                if count == 0:
                    raise ValueError(
                        f"{self.path.absolute()} ended while {name} was read; download it again"
                    )
                done += count
        return out


class WeightFiles:
    """Read the weights of a model folder by name, whole or as flat slices, touching only the bytes asked for.

    The folder of a LoRA adapter is read together with its base model: a slice of an adapted matrix is the base's slice
    plus scale * B A, added in float32. A score head in the adapter's file replaces the base's.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.adapter: dict[str, Any] | None = None  # adapter_config.json
        self._where: dict[str, tuple[_File | WeightFiles, str]] = {}  # name -> (where, name there)
        self._adapted: set[str] = set()
        if (self.folder / ADAPTER_CONFIG).is_file():
            self._read_adapter()
        else:
            files = [_File(path) for path in _weight_paths(self.folder)]
            self._where = {name: (file, name) for file in files for name in file.entries}

    def _read_adapter(self) -> None:
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
        rank, alpha = self.adapter["r"], self.adapter.get("lora_alpha", 8)
        self._scale = alpha / (math.sqrt(rank) if self.adapter.get("use_rslora") else rank)
        self._pairs, base = _File(path), WeightFiles(base_folder(self.folder))
        self._where = {name: (base, name) for name in base.names()}
        for stored in self._pairs.entries:
            name, dot, kind = stored.removeprefix(_PREFIX).partition(".lora_")
            if dot and kind in ("A.weight", "B.weight"):
                self._adapted.add(f"{name}.weight")
            elif name == "score.weight":
                self._where[name] = (self._pairs, stored)
            else:
                raise ValueError(
                    f"{path.absolute()} holds {stored}, which is neither a LoRA matrix nor a score head; merge the "
                    "adapter into its base with PEFT"
                )
        for name in self._adapted:
            a, b = (self._pairs.entries.get(key, {}).get("shape") for key in _pair(name))
            if name not in base or [a, b] != [
                [rank, base.shape(name)[1]],
                [base.shape(name)[0], rank],
            ]:
                raise ValueError(
                    f"{path.absolute()} adapts {name} by matrices of shape {a} and {b}, which the base model "
                    f"{base.folder.absolute()} does not fit; correct base_model_name_or_path"
                )

    def names(self) -> list[str]:
        """List the stored tensors' names."""
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> torch.Size:
        """Return a tensor's shape."""
        file, stored = self._where[name]
        return file.shape(stored)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype; an adapted matrix has its base's, although it is read in float32."""
        file, stored = self._where[name]
        return file.dtype(stored)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return the tensor in its shape or, if either end is given, its flat elements [start, stop), row-major."""
        shape, (file, stored) = self.shape(name), self._where[name]
        first, last, _ = slice(start, stop).indices(shape.numel())
        last = max(first, last)
        flat = file.read(stored, first, last)
        if name in self._adapted:
            flat = flat.float() + self._update(name, first, last, shape[1])
        return flat.view(shape) if start is None and stop is None else flat

    def _update(self, name: str, start: int, stop: int, width: int) -> Tensor:
        """Return elements [start, stop) of scale * B A, from the rows of B that they lie in."""
        a, b = _pair(name)
        rank, first, last = self._pairs.shape(a)[0], start // width, -(-stop // width)
        down = self._pairs.read(a, 0, rank * width).float().view(rank, width)
        up = self._pairs.read(b, first * rank, last * rank).float().view(last - first, rank)
        return (self._scale * (up @ down)).view(-1)[start - first * width : stop - first * width]

    def check(
        self, expected: Mapping[str, torch.Size], *, may_lack: tuple[str, ...] = ()
    ) -> list[str]:
        """Compare with a model's parameters (name -> shape) and return the names of `may_lack` that are not stored.

        Raises ValueError on any other missing parameter or a different shape. Stored tensors that the model does not
        have are ignored if they are a head, a tied copy or a cached table, and refused otherwise.
        """
        missing = [name for name in expected if name not in self._where]
        fatal = [name for name in missing if name not in may_lack]
        if fatal:
            raise ValueError(
                f"{self.folder.absolute()} lacks {len(fatal)} of {len(expected)} parameters, first {fatal[0]}; "
                "check that config.json belongs to these weights"
            )
        for name, shape in expected.items():
            if name in self._where and self.shape(name) != shape:
                raise ValueError(
                    f"{name} is {list(self.shape(name))} in {self.folder.absolute()} but config.json asks for "
                    f"{list(shape)}; check that config.json belongs to these weights"
                )
        extra = [
            name for name in self._where if name not in expected and not name.endswith(_UNUSED)
        ]
        if extra:
            raise ValueError(
                f"{self.folder.absolute()} holds {len(extra)} tensors that the model does not have, first {extra[0]}; "
                "merge adapters or use the weights of a plain Llama-3 or Qwen2.5 model"
            )
        return missing


def _pair(name: str) -> tuple[str, str]:
    stem = _PREFIX + name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


_UNUSED = ("lm_head.weight", "score.weight", "rotary_emb.inv_freq")


def _weight_paths(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(_read_json(folder / INDEX)["weight_map"].values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{(folder / INDEX).absolute()} names the shard {name!r}, which is not in the folder; download it "
                    "again"
                )
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    unread = {".bin", ".pth", ".pt", ".gguf"}
    others = sorted(path.name for path in folder.glob("*") if path.suffix in unread)
    found = f"only {others[0]}, which is not read" if others else "none"
    raise FileNotFoundError(
        f"there is neither {WEIGHTS} nor {INDEX} in {folder.absolute()} (weights found: {found}); convert the model "
        "to safetensors"
    )


class WeightWriter:
    """Write a folder's weights as transformers does, one tensor at a time, holding one shard in memory.

    Args:
        folder: an empty folder; the caller moves it into place when all is written.
        max_shard_bytes: bounds a file; a larger tensor has a file of its own.
    """

    def __init__(self, folder: Path | str, max_shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_shard_bytes = max_shard_bytes
        self._written: list[list[str]] = []  # the names in each file
        self._shard: dict[str, Tensor] = {}
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor from any device to the current shard."""
        if self._shard and self._bytes + tensor.nbytes > self.max_shard_bytes:
            self._write_shard()
        self._shard[name] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, name the files after their number and write the index."""
        self._write_shard()
        weight_map: dict[str, str] = {}
        count = len(self._written)
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else WEIGHTS
            (self.folder / f"{number}.tmp").rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_json(self.folder / INDEX, index)

    def _write_shard(self) -> None:
        path = self.folder / f"{len(self._written)}.tmp"  # its name will tell how many there are
        save_file(self._shard, path, metadata={"format": "pt"})
        self._written.append(list(self._shard))
        self._total += self._bytes
        self._shard, self._bytes = {}, 0


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_config(
    folder: Path | str, config: ModelConfig, *, dtype: torch.dtype, reward: bool = False
) -> None:
    """Write config.json for weights stored as `dtype`."""
    write_json(
        Path(folder) / CONFIG, config.to_hf(dtype=str(dtype).removeprefix("torch."), reward=reward)
    )


def copy_side_files(
    source: Path | str, target: Path | str, patterns: Iterable[str] = (GENERATION, *TOKENIZER_FILES)
) -> None:
    """Copy tokenizer, chat template and generation config as they are."""
    for pattern in patterns:
        for path in Path(source).glob(pattern):
            shutil.copyfile(path, Path(target) / path.name)
