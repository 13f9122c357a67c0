"""What `datasets` and the Hugging Face hub read for us: parquet, saved folders, splits of folders, hub datasets."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HUB_SECONDS = 5.0  # that the hub may take to name a commit
ROWS_AT_ONCE = 256


def hub_commit(name: str, revision: str | None) -> str:
    """Return the commit that a dataset's revision names: the present one, or the cached one without an answer."""
    from huggingface_hub import HfApi, snapshot_download

    asked = {"revision": revision}
    try:
        return HfApi().dataset_info(name, timeout=HUB_SECONDS, **asked).sha
    except Exception as error:
        asked |= {"repo_type": "dataset", "local_files_only": True}
        try:
            return Path(snapshot_download(name, **asked)).name
        except Exception:
            raise error from None


def files_by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Sort files by the split that their names or folders tell, as the hub does; all are of train if none tells one."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    # only data may tell splits, not a README or a log, so the rules see a folder of nothing but the data's names
    with TemporaryDirectory() as names, suppress(FileNotFoundError):
        for file in files:
            name = names / file.relative_to(folder)
            name.parent.mkdir(parents=True, exist_ok=True)
            name.touch()
        found = DataFilesDict.from_patterns(get_data_patterns(names), names)
        return {
            str(split): sorted({folder / Path(name).relative_to(names) for name in own})
            for split, own in found.items()
        }
    return {"train": files}  # the hub reads none of them


def opened(path: Path, subset: str | None, split: str, revision: str | None) -> Any:
    """Open a parquet file, a saved folder, which may be one of several splits, or else a dataset of the hub."""
    import datasets

    if path.is_file():
        files = escape(str(path.absolute()))  # its name may look like a pattern
        # that of a file without rows would be 0
        more = {"split": "train", "streaming": True, "batch_size": ROWS_AT_ONCE}
        return datasets.load_dataset("parquet", data_files=files, **more)
    if path.is_dir():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path), subset, split=split, revision=revision)


def written_rows(rows: Iterable[dict[str, object]]) -> Iterator[tuple[int, object]]:
    """Yield the rows, numbered from 1, as they were written."""
    kinds = getattr(rows, "features", None) or {}
    for number, row in enumerate(rows, 1):
        yield number, {name: _as_written(value, kinds.get(name)) for name, value in row.items()}


def _as_written(value: object, kind: object) -> object:
    """Return what was written in a column of objects, without the keys that only other rows have.

    Arrow gives all objects of a column the same keys, and null to those that an object lacks. A key whose type is null
    has a value in no row, so its null was written.
    """
    if isinstance(value, dict) and isinstance(kind, dict):
        return {
            key: _as_written(v, kind[key])
            for key, v in value.items()
            if v is not None or getattr(kind[key], "dtype", "") == "null"
        }
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [_as_written(v, kind.feature) for v in value]
    return value
