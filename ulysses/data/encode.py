"""Records -> token sequences with loss weights: which tokens are trained, and what happens to long ones.

sequence   prompt + answer, every assistant turn trained (or the last one, or everything)
pair       prompt chosen | prompt rejected: the same prompt tokens in both, completions trained
unpaired   prompt completion
prompt     prompt with the assistant's turn opened, nothing trained
text       BOS document EOS, cut into pieces of max_length that overlap by one token, so that every token but the
           first is predicted exactly once
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from ulysses.data.chat import ChatTemplate, Encoded, TextEncoder
from ulysses.data.records import DataError, DropRowError, Message, Record, Report

ROWS_AT_ONCE = 256
CHARACTERS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class DataSettings:
    """What decides tokens besides sources, tokenizer and template.

    Args:
        max_length: longest sequence in tokens (for pairs: of each side).
        truncation: "keep_start" cuts the end of a longer sequence. "keep_end" cuts its beginning but keeps BOS; for
            pairs and unpaired answers it shortens the prompt from its beginning, down to a quarter of max_length,
            before it cuts the end of a completion. "drop" leaves it out, "error" stops. A prompt without answer
            always keeps its end, which opens the assistant's turn.
        train_on: "assistant" (every assistant turn), "last" (the last one) or "all" (every token); sequences only.
        bad_rows: "error" stops at a row that breaks its format, "drop" counts it.
    """

    max_length: int
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    train_on: Literal["assistant", "last", "all"] = "assistant"
    bad_rows: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise DataError(
                f"max_length is {self.max_length} but a sequence needs at least 2 tokens"
            )


@dataclass
class EncodedExample:
    """One example as it is stored: int32 tokens and float32 weights of each sequence, and its numbers."""

    tokens: list[np.ndarray]
    weights: list[np.ndarray]
    columns: dict[str, float] = field(default_factory=dict)
    raw: Any = None
    source: int = 0
    truncated: bool = False


def encode_records(
    records: Iterable[Record],
    kind: str,
    template: ChatTemplate,
    settings: DataSettings,
    report: Report,
) -> Iterator[EncodedExample]:
    """Tokenise conversations in batches; what cannot be trained on is dropped and counted."""
    encode = {
        "sequence": _sequence,
        "pair": _completions,
        "unpaired": _completions,
        "prompt": _prompt,
    }[kind]
    for group in _groups(records, ROWS_AT_ONCE):
        conversations = [
            (r.prompt + answer, r.tools, not r.answers)
            for r in group
            for answer in (r.answers or ((),))
        ]
        outcomes = iter(template.encode_batch(conversations))
        for record in group:
            found = [next(outcomes) for _ in (record.answers or ((),))]
            try:
                example = encode(
                    record, [_encoded(side) for side in found], template.encoder, settings
                )
            except DropRowError as error:
                report.drop(str(error), record.where)
                continue
            example.source = record.source
            report.kept += 1
            if example.truncated:
                report.truncate(record.where)
            yield example


def _encoded(side: Encoded | DropRowError) -> Encoded:
    if isinstance(side, DropRowError):
        raise side
    return side


def _sequence(
    record: Record, sides: list[Encoded], encoder: TextEncoder, settings: DataSettings
) -> EncodedExample:
    tokens, spans = sides[0]
    assistants = [m for m in record.prompt + record.answers[0] if m.role == "assistant"]
    first = sum(m.role == "assistant" for m in record.prompt)
    if settings.train_on == "last":
        first = len(spans) - 1
    weights = _weights(len(tokens), spans, assistants, first)
    if settings.train_on == "all":
        weights[:] = 1.0
    ids = np.asarray(tokens, np.int32)
    long = _too_long(len(ids), record, settings)
    if long:
        keep = _kept(len(ids), settings.max_length, settings.truncation, ids[0] == encoder.bos)
        ids, weights = ids[keep], weights[keep]
    _check_trained(weights, long)
    return EncodedExample([ids], [weights], truncated=long)


def _completions(
    record: Record, sides: list[Encoded], encoder: TextEncoder, settings: DataSettings
) -> EncodedExample:
    before = sum(m.role == "assistant" for m in record.prompt)
    start = sides[0].spans[before][0]
    prompt = sides[0].tokens[:start]
    if any(side.spans[before][0] != start or side.tokens[:start] != prompt for side in sides):
        raise DropRowError(
            "the prompts of chosen and rejected differ once the chat template is applied"
        )
    longest = max(len(side.tokens) for side in sides)
    head, limit = list(range(start)), settings.max_length
    long = _too_long(longest, record, settings)
    if long and settings.truncation == "keep_end":
        room = max(limit - (longest - start), min(start, limit // 4), 1)
        has_bos = prompt[0] == encoder.bos
        head = (
            [*([0] if has_bos else []), *range(start - room + has_bos, start)]
            if room < start
            else head
        )
    example = EncodedExample(
        [], [], dict(record.columns) | {"prompt_length": len(head)}, truncated=long
    )
    for side, answer in zip(sides, record.answers):
        assistants = [m for m in record.prompt + answer if m.role == "assistant"]
        weights = _weights(len(side.tokens), side.spans, assistants, before)
        keep = np.asarray([*head, *range(start, len(side.tokens))][:limit])
        example.tokens.append(np.asarray(side.tokens, np.int32)[keep])
        example.weights.append(weights[keep])
        _check_trained(example.weights[-1], long)
    if len(sides) == 2 and np.array_equal(example.tokens[0], example.tokens[1]):
        raise DropRowError("chosen and rejected are the same tokens")
    return example


def _prompt(
    record: Record, sides: list[Encoded], encoder: TextEncoder, settings: DataSettings
) -> EncodedExample:
    ids = np.asarray(sides[0].tokens, np.int32)
    long = _too_long(len(ids), record, settings)
    if long:
        ids = ids[_kept(len(ids), settings.max_length, "keep_end", ids[0] == encoder.bos)]
    numbers: dict[str, float] = {"prompt_length": len(ids)}
    return EncodedExample(
        [ids], [np.zeros(len(ids), np.float32)], numbers, raw=record.raw, truncated=long
    )


def _weights(
    length: int, spans: list[tuple[int, int]], assistants: list[Message], first: int
) -> np.ndarray:
    """Weights [length] of the tokens: assistant message i >= first has its own weight (1 without one), the rest 0."""
    weights = np.zeros(length, np.float32)
    for index, ((start, stop), message) in enumerate(zip(spans, assistants)):
        if index >= first:
            weights[start:stop] = 1.0 if message.weight is None else message.weight
    return weights


def _check_trained(weights: np.ndarray, truncated: bool) -> None:
    if not weights[1:].any():
        raise DropRowError("no trained token is left" + (" after truncation" if truncated else ""))


def _too_long(length: int, record: Record, settings: DataSettings) -> bool:
    """True if the sequence must be cut; drops it or stops where the policy says so."""
    if length <= settings.max_length:
        return False
    if settings.truncation == "drop":
        raise DropRowError("longer than max_length")
    if settings.truncation == "error":
        raise DataError(
            f"{record.where} has {length} tokens but data.max_length is {settings.max_length}; raise it or "
            "set data.truncation to keep_start, keep_end or drop"
        )
    return True


def _kept(length: int, limit: int, truncation: str, has_bos: bool) -> np.ndarray:
    """Positions that stay of a sequence longer than `limit`."""
    if truncation == "keep_start":
        return np.arange(limit)
    tail = np.arange(length - limit + has_bos, length)
    return np.concatenate([[0], tail]) if has_bos else tail


def encode_documents(
    records: Iterable[Record], encoder: TextEncoder, settings: DataSettings, report: Report
) -> Iterator[EncodedExample]:
    """Tokenise documents of any size, part by part, and cut them into pieces of at most max_length tokens.

    Truncation does not apply: no token is lost.
    """
    limit = settings.max_length
    held = np.empty(0, np.int32)  # tokens of the open document that are not given out yet
    opened: Record | None = None

    def pieces(more: list[int], last: bool) -> Iterator[EncodedExample]:
        nonlocal held
        tokens, start = np.concatenate([held, np.asarray(more, np.int32)]), 0
        while len(tokens) - start > limit or (last and len(tokens) - start > 1):
            piece = tokens[start : start + limit].copy()
            report.kept += 1
            yield EncodedExample(
                [piece], [np.ones(len(piece), np.float32)], source=opened.source if opened else 0
            )
            start += (
                len(piece) - 1
            )  # the next piece begins with this one's last token, which predicts its first
        held = tokens[start:].copy()

    for group in _groups(records, ROWS_AT_ONCE):
        for record, ids in zip(group, encoder.encode_texts([r.text for r in group])):
            if opened is None or (record.file, record.row) != (opened.file, opened.row):
                if opened is not None:
                    yield from pieces([encoder.eos], last=True)
                opened, held = (
                    record,
                    np.asarray([] if encoder.bos is None else [encoder.bos], np.int32),
                )
            yield from pieces(ids, last=False)
    if opened is not None:
        yield from pieces([encoder.eos], last=True)


def _groups(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Batches of up to `size` records, fewer where texts are long, to bound memory."""
    iterator = iter(records)
    while group := list(islice(iterator, 1)):
        characters = len(group[0].text)
        while (
            len(group) < size
            and characters < CHARACTERS_AT_ONCE
            and (more := next(iterator, None)) is not None
        ):
            group.append(more)
            characters += len(more.text)
        yield group
