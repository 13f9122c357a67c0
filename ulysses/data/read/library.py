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
    """Return the commit that a dataset's revision names now; without an answer of the hub, that of the cached copy."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS).sha
    except Exception as error:
        try:
            snapshot = snapshot_download(
                name, repo_type="dataset", revision=revision, local_files_only=True
            )
            return Path(snapshot).name
        except Exception:
            raise error from None


def files_by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Sort files by the split that their names or folders tell, as the hub does; without any, all are of "train"."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    # The rules see a folder that holds nothing but the names of the data files: no README or log may tell a split.
    with TemporaryDirectory() as names, suppress(FileNotFoundError):
        for file in files:
            name = names / file.relative_to(folder)
            name.parent.mkdir(parents=True, exist_ok=True)
            name.touch()
        splits = DataFilesDict.from_patterns(get_data_patterns(names), names)
        return {
            str(split): sorted({folder / Path(name).relative_to(names) for name in members})
            for split, members in splits.items()
        }
    return {"train": files}  # the hub would read none of them


def load_rows(path: Path, subset: str | None, split: str, revision: str | None) -> Any:
    """Open a parquet file, a saved folder (a dict if it has several splits), or else a dataset of the hub."""
    import datasets

    if path.is_file():
        files = escape(str(path.absolute()))  # its name may look like a pattern
        return datasets.load_dataset(
            "parquet",
            data_files=files,
            split="train",
            streaming=True,
            batch_size=ROWS_AT_ONCE,  # of a file without rows it would be 0
        )
    if path.is_dir():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path), subset, split=split, revision=revision)


def written_rows(rows: Iterable[dict[str, object]]) -> Iterator[tuple[int, object]]:
    """Yield the rows, numbered from 1, as they were written."""
    features = getattr(rows, "features", None) or {}
    for number, row in enumerate(rows, 1):
        yield number, {key: _as_written(value, features.get(key)) for key, value in row.items()}


def _as_written(value: object, feature: object) -> object:
    """Return what was written in a column of objects, without the keys that only other rows have.

    Arrow gives all objects of a column the same keys, and a null for each key that an object lacks. A key whose type
    is null has no value in any row, so its null was written.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        return {
            key: _as_written(v, feature[key])
            for key, v in value.items()
            if v is not None or getattr(feature[key], "dtype", "") == "null"
        }
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_as_written(v, feature.feature) for v in value]
    return value
