"""Rows of a test as a tokenised dataset."""

from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import write_rows
from ulysses.data.read.sources import Source
from ulysses.data.serve.dataset import TokenizedDataset, open_dataset
from ulysses.data.serve.encode import DataSettings


def open_rows(
    rows: list | str, kind: str, length: int = 512, *, folder: Path, tokenizer: Any, name: str = "rows.jsonl",
    cache: str = "cache", template: str = "chatml", share_prompts: bool = False, workers: int | str = 1,
    **settings: Any,
) -> TokenizedDataset:  # fmt: skip
    """Write rows to a file of the folder and tokenise it."""
    source = Source(write_rows(folder / name, rows))
    return open_dataset(
        [source], kind, tokenizer, DataSettings(length, **settings), folder / cache,
        chat_template=template, share_prompts=share_prompts, workers=workers,
    )  # fmt: skip
