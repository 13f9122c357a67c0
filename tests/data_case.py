"""Rows of a test as a tokenised dataset."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import write_rows
from ulysses.config.schema import DataSection
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.sources import Source, parse_sources
from ulysses.data.read.tokenizer import Encoded
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.tokenise import Tokenising, common_prefix
from ulysses.parallel.batch import Sequence


def content(sequence: Sequence) -> list[Any]:
    """All that a sequence holds, to be compared."""
    columns = [[*column] for column in sequence.token_columns.values()]
    return [[*sequence.tokens], [*sequence.loss_weights], *columns]


def sharing(sequences: list[Sequence], prompt: int = 0) -> list[Sequence]:
    """Let sequences say what they have in common with the one before, as far as they do not train it."""
    parts = [Encoded(s.tokens, s.loss_weights) for s in sequences]
    heads = [1, *(common_prefix(*two) + 1 for two in pairwise(parts))]
    return [replace(s, prompt=prompt, prompt_length=n) for s, n in zip(sequences, heads)]


@cache
def built_in(tokenizer: Any, name: str, variables: str) -> ChatTemplate:
    """Make a template that many tests read once."""
    return ChatTemplate(tokenizer, name, json.loads(variables))


def open_data(
    sources: list[Source],
    kind: str,
    tokenizer: Any,
    data: DataSection,
    *,
    share_prompts: bool = False,
    **more: Any,
) -> TokenizedDataset:
    """Open the sources with the template that the table names."""
    template = None
    if kind != "text":
        name, variables = data.chat_template, data.chat_template_kwargs
        if name in ("chatml", "qwen3"):
            template = built_in(tokenizer, name, json.dumps(variables))
        else:
            template = ChatTemplate(tokenizer, name, variables)
    tokenising = Tokenising(sources, kind, tokenizer, template, data, **more)
    return tokenising.open(share_prompts=share_prompts)


def open_sources(
    given: Any, kind: str = "sequence", length: int = 512, *, folder: Path, tokenizer: Any, cache: str = "cache",
    template: str = "chatml", share_prompts: bool = False, held_out: bool = False, vocabulary: int = 0,
    **settings: Any,
) -> TokenizedDataset:  # fmt: skip
    """Tokenise what a setting such as data.train names; tests may cut shorter than a run may."""
    given = parse_sources(given)
    settings |= {"cache": str(folder / cache), "chat_template": template, "max_length": length}
    data = DataSection.model_construct(**{"workers": 1, **settings})
    more = {"held_out": held_out, "share_prompts": share_prompts, "vocabulary": vocabulary}
    return open_data(given, kind, tokenizer, data, **more)


def open_rows(
    rows: list | str, *how: Any, folder: Path, name: str = "rows.jsonl", source: dict[str, Any] | None = None,
    **more: Any,
) -> TokenizedDataset:  # fmt: skip
    """Write rows to a file of the folder and tokenise it."""
    given = {"path": write_rows(folder / name, rows), **(source or {})}
    return open_sources(given, *how, folder=folder, **more)
