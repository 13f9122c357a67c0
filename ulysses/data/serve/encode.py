"""Tokenise records, with a weight in the loss for every token, and cut those that are too long.

sequence   prompt answer            every assistant turn is trained (or the last one, or everything); where the chat
                                    template rewrites earlier turns, an example has several sequences
pair       prompt chosen | prompt rejected     both sides have the same prompt tokens; the answers are trained
ranked     prompt answer | prompt answer ...   the same with any number of answers
unpaired   prompt answer            the answer is trained
prompt     prompt with the assistant's turn opened, nothing is trained
text       BOS document EOS         cut into pieces of max_length that overlap by one token, so that every token but the
                                    first is predicted exactly once

Of a sequence that is longer than data.max_length, "keep_start" cuts the end. "keep_end" cuts the beginning but keeps
BOS; for pairs and unpaired answers it shortens the prompt from its beginning, to no less than a quarter of max_length,
before it cuts the end of an answer. A prompt without an answer always keeps its end, which opens the assistant's turn.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from ulysses.config.schema import DataSection
from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.chat import ChatTemplate, Encoded, Rendered, TextEncoder
from ulysses.data.read.counts import Event
from ulysses.data.read.formats import Record, dropping
from ulysses.data.read.templates import bounded_time
from ulysses.parallel.batch import Sequence, common_prefix, restored

# The columns of one example as the files of a dataset hold them (dataset.py): tokens, weights and numbers.
Columns = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One training example: its sequences (pair: chosen, rejected; separate turns: the last one first) and its numbers.

    columns: prompt_length, but not of a sequence; margin (ranked, whose sequences have the column rank); label, 1 or 0
    (unpaired); prompt_id (unpaired, prompt), the same for equal prompts. index: its place in the dataset.
    """

    index: int
    sequences: tuple[Sequence, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> "Example":
        """The same example whose sequences share no prompt."""
        owners = (self.sequences[i - s.prefix_owner] for i, s in enumerate(self.sequences))
        return replace(self, sequences=tuple(map(restored, self.sequences, owners)))


def encode_records(
    records: Iterable[Record],
    kind: str,
    template: ChatTemplate,
    settings: DataSection,
    events: list[Event],
) -> Iterator[Columns]:
    """Tokenise the conversations of one batch together; what cannot be trained on is dropped and counted."""
    rendered = []
    with bounded_time():
        for record in records:
            with dropping(events, record.where, settings.bad_rows):
                rendered.append((record, _render(record, kind, template, settings)))
    texts = [text for _, sides in rendered for text in sides]
    encode = partial(template.encode_batch, as_whole=kind == "sequence")
    try:
        encoded = iter(encode(texts))
    except BadRowError:  # which row it was is found below
        encoded = None
    for record, sides in rendered:
        with dropping(events, record.where, settings.bad_rows):
            found = [next(encoded) for _ in sides] if encoded else encode(sides)
            yield _columns(record, kind, found, template.encoder.bos, settings, events)


def _render(
    record: Record, kind: str, template: ChatTemplate, settings: DataSection
) -> list[Rendered]:
    """Render a record as one text for each of its answers, or as several texts for the turns of a sequence."""
    texts = []
    first, turns = len(record.prompt), settings.turns if kind == "sequence" else "together"
    for answer in record.answers:
        messages = record.prompt + answer
        trained = [i for i, m in enumerate(messages) if m.role == "assistant" and i >= first]
        if kind == "sequence" and settings.train_on != "assistant":
            if settings.train_on == "all" and any(messages[i].weight == 0 for i in trained):
                raise BadRowError(
                    "has an answer that is not to be trained, but data.train_on is all; set it to assistant"
                )
            trained = trained[-1:]
        trained = [i for i in trained if messages[i].weight != 0] or trained
        texts += template.render(messages, record.tools, trained, turns, record.variables)
    return texts


def _columns(
    record: Record,
    kind: str,
    sides: list[Encoded],
    bos: int | None,
    settings: DataSection,
    events: list[Event],
) -> Columns:
    """Make the example of one record; each sequence of separate turns is cut by itself, as a row of its own."""
    is_sequence = kind == "sequence"
    if is_sequence and settings.train_on == "all":
        sides = [(tokens, [1.0] * len(tokens)) for tokens, _ in sides]
        if record.answers[0][-1].role != "assistant":
            events.append(("notes", "turns after the last answer left out", record.where))
    sequences: list[Sequence] = []
    problems, longest = [], 0
    for group in [[side] for side in sides] if is_sequence else [sides]:
        try:
            found, start = _cut(group, record, kind, bos, settings)
            sequences += found
            longest = max(longest, *(len(tokens) for tokens, _ in group))
        except DropRowError as error:
            problems.append(error)
    if not sequences:
        raise problems[0]
    notes = [f"turns left out, {problem}" for problem in problems]
    if is_sequence and len(sides) > 1:
        notes.append("conversations whose turns are trained separately")
    if longest > settings.max_length:
        notes.append("truncated")
    events += [("notes", note, record.where) for note in notes]
    first, sizes = sequences[0], []
    for sequence, rank in zip(sequences, record.ranks if kind == "ranked" else repeat(0)):
        shared = 0 if sequence is first else common_prefix(first, sequence)
        sizes += len(sequence.tokens), shared, rank
    columns = {
        **record.columns,
        "tokens": np.concatenate([sequence.tokens for sequence in sequences]),
        "weights": np.concatenate([sequence.loss_weights for sequence in sequences]),
        "_sizes": sizes,
        "_counts": len(sequences),
        "_source": record.source,
    }
    if not is_sequence:
        columns["prompt_length"] = start
    if kind in ("unpaired", "prompt"):
        prompt = hashlib.sha256(first.tokens[:start].tobytes()).digest()
        columns["_prompt"] = np.frombuffer(prompt, np.int64)[0]
    if kind == "prompt":
        row = json.dumps(record.row, ensure_ascii=False, default=str).encode()
        columns |= {"_row_size": len(row), "_rows": np.frombuffer(row, np.uint8)}
    return columns


def _cut(
    sides: list[Encoded], record: Record, kind: str, bos: int | None, settings: DataSection
) -> tuple[list[Sequence], int]:
    """Cut sequences with one prompt to max_length; return them and the prompt's length."""
    limit, longest = settings.max_length, max(len(tokens) for tokens, _ in sides)
    arrays = [(np.asarray(t, np.int32), np.asarray(w, np.float32)) for t, w in sides]
    first, weights = arrays[0]
    if not len(first):
        raise DropRowError("the chat template writes nothing")
    if longest > limit and settings.truncation == "drop":
        raise DropRowError("longer than max_length")
    if longest > limit and settings.truncation == "error":
        raise DataError(
            f"{record.where} has {longest} tokens but data.max_length is {limit}; raise it, or "
            "set data.truncation to keep_start, keep_end or drop"
        )
    # The prompt ends and the answers begin at `start`; a sequence and a prompt alone are cut as one.
    start = longest
    if kind in ("pair", "ranked", "unpaired"):
        start = int((weights != 0).argmax())
        if len({(t[:start].tobytes(), (w != 0).argmax()) for t, w in arrays}) > 1:
            raise DropRowError(
                "the prompts of chosen and rejected differ once the chat template is applied"
            )
    room = max(limit - (longest - start), min(start, limit // 4), 1)
    keeps_end = settings.truncation == "keep_end" or kind == "prompt"
    cut, after_bos = max(0, start - room) * keeps_end, int(first[0] == bos)
    removed = slice(after_bos, after_bos + cut)
    sequences = []
    for side in arrays:
        tokens, weights = (np.delete(array, removed)[:limit] for array in side)
        sequences.append(Sequence(tokens, weights))
        if kind != "prompt" and not weights[1:].any():
            after = " after truncation" if longest > limit else ""
            raise DropRowError(f"no trained token is left{after}")
    answers = {(s.tokens.tobytes(), rank) for s, rank in zip(sequences, record.ranks)}
    if len({tokens for tokens, _ in answers}) < len(answers):
        raise DropRowError("chosen and rejected are the same tokens")
    return sequences, start - cut


def encode_documents(
    records: Iterable[Record], encoder: TextEncoder
) -> list[tuple[str, int, np.ndarray]]:
    """Tokenise documents or parts of them; return where each stands, the index of its source, and its tokens."""
    found = []
    for record in records:
        text = record.text if record.continues else encoder.begin(record.text)
        with dropping([], record.where, "error"):
            (tokens,) = encoder.encode_texts([text])
        found.append((record.where, record.source, np.asarray(tokens, np.int32)))
    return found


def cut_documents(
    parts: Iterable[tuple[str, int, np.ndarray]], encoder: TextEncoder, limit: int
) -> Iterator[Columns]:
    """Join the parts of each document, and cut it into pieces of at most `limit` tokens, as the files hold them.

    Truncation does not apply: no token is lost.
    """
    for (_, source), document in groupby(parts, key=itemgetter(0, 1)):
        ends = np.asarray([encoder.eos], np.int32)
        left = ends[:0] if encoder.bos is None else np.asarray([encoder.bos], np.int32)
        for *_, ids in chain(document, [(ends,)]):
            left = np.append(left, ids)
            is_end = ids is ends
            while len(left) > limit or (is_end and len(left) > 1):
                piece = left[:limit]
                yield {
                    "tokens": piece,
                    "_sizes": [len(piece), 0, 0],
                    "_counts": [1],
                    "_source": [source],
                }
                left = left[limit - 1 :]  # the last token predicts the next piece's first
