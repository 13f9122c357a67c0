"""Tokenise rows into a folder of examples that is named by all that decides its content, once per machine.

rows  -- batches of them, in several processes -->  records  -->  tokens with weights in the loss  -->  files

sequence   prompt answer            every assistant turn is trained (or the last one, or everything); an example has
                                    several sequences where the chat template rewrites earlier turns
pair       prompt chosen | prompt rejected     both sides have the same prompt tokens; the answers are trained
ranked     prompt answer | prompt answer ...   the same with any number of answers
unpaired   prompt answer            the answer is trained
prompt     prompt with the assistant's turn opened, nothing is trained
trajectory tokens that were drawn elsewhere, with a mask of those that are trained
text       BOS document EOS         cut into pieces of max_length that overlap by one token, so that every token but the
                                    first is predicted exactly once

A sequence that is longer than data.max_length loses its end with "keep_start", and its beginning, but not BOS, with
"keep_end". For pairs, ranked lists and unpaired answers "keep_end" shortens the prompt from its beginning, to no less
than a quarter of max_length, before it cuts the end of an answer. A prompt without an answer always keeps its end,
which opens the assistant's turn.

The files of a folder:

    index.json        kind, report                       _sizes.int64   tokens, prefix and rank of each sequence
    tokens.int32      of all sequences, end to end       _counts.int64  the number of sequences of each example
    weights.float32   of every token; none of documents  NAME.TYPE      a number of each example (_rows: prompts' JSON)
    token_NAME.TYPE   of every token, of trajectories

The prefix of a sequence is the number of its first tokens that it need not repeat after the sequence before it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ulysses.config.schema import DataSection
from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.cache import build_once, check_once, digest_of_value, known_files
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.formats import Record, dropping, read_row
from ulysses.data.read.sources import (
    RawRow,
    Report,
    Source,
    locate_rows,
    note_sources,
    pinned,
    safe_parts,
    source_digest,
    source_files,
)
from ulysses.data.read.tokenizer import (
    Encoded,
    PreTrainedTokenizerFast,
    Rendered,
    TextEncoder,
    tokenizer_digest,
)
from ulysses.data.serve.dataset import DIGESTS, TokenizedDataset
from ulysses.data.serve.workers import in_order
from ulysses.disk import digest_of
from ulysses.progress import progress

FORMAT_VERSION = 16
BAR_AFTER_SECONDS = 2.0
ROWS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 21  # of a batch, to bound memory
# settings of the [data] table that decide tokens, besides sources, tokenizer and template
DECIDING = ("max_length", "truncation", "train_on", "bad_rows", "eval_fraction")
Columns = dict[str, Any]  # examples as the files hold them: tokens, weights and numbers
# a part of a document: the document's row and source, and the part's tokens
Part = tuple[str, int, np.ndarray]


@dataclass
class Tokenising:
    """Turns sources into a folder of tokens, and opens it.

    Args:
        kind: what a stage needs: text, sequence, pair, ranked, unpaired, prompt or trajectory.
        template: the chat template of conversations; None for text.
        settings: the [data] table. Its sources and its template are the other arguments.
        held_out: take the rows that are held out for evaluation, and not the others.
        vocabulary: how many tokens a trajectory may consist of.

    From when this object is made until the folder is complete, the files of the sources must not change.

    Raises DataError: missing or broken data, named by file and row, in every process.
    """

    sources: list[Source]
    kind: str
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate | None
    settings: DataSection
    held_out: bool = False
    vocabulary: int = 0

    def __post_init__(self) -> None:
        template, settings = self.template, self.settings
        self.cache = Path(settings.cache)
        self.sources = [pinned(s) if s.is_on_hub else s for s in self.sources]
        for source in self.sources:
            if template and self.kind != "trajectory":
                setting = f"chat_template_kwargs of {source.path}"
                template.check_variables(source.chat_template_kwargs, setting)
            elif source.system or source.chat_template_kwargs:
                raise DataError(
                    f"{source.path} has system or chat_template_kwargs, which only conversations use; remove them"
                )
        self.encoder = template.encoder if template else TextEncoder(self.tokenizer)
        self._files_at_start = self._files()
        content = [
            FORMAT_VERSION,
            self.kind,
            {name: getattr(settings, name) for name in DECIDING} | {"held_out": self.held_out},
            [source_digest(source, self.cache) for source in self.sources],
            tokenizer_digest(self.tokenizer),
            template.text if template else None,
            template.with_tools.text if template and template.with_tools else None,
            settings.chat_template_kwargs,
            self.vocabulary if self.kind == "trajectory" else None,
        ]
        self.folder = self.cache / "tokenized" / digest_of_value(content)[:32]

    def open(self, *, share_prompts: bool = False) -> TokenizedDataset:
        """Open the folder; the first process to come tokenises the sources if data.cache does not hold it yet.

        Args:
            share_prompts: let the examples say which sequences begin with the same prompt.
        """
        build_once(self.folder, self.build)
        check_once(self.folder / DIGESTS, self.cache, self.folder)
        sources = self.sources
        if self.held_out:  # which are read whole, and may have no row of a small source
            sources = [replace(source, probability=None) for source in sources]
        dataset = TokenizedDataset(
            self.folder,
            sources,
            self.settings.stopping_strategy,
            max_length=self.settings.max_length,
            share_prompts=share_prompts,
        )
        note_sources(self.sources, dataset.report)
        return dataset

    def _files(self) -> Path:
        """Return a path that changes with the names, sizes and times of the sources' files."""
        files = (source_files(source)[0] for source in self.sources)
        return known_files(chain.from_iterable(files), self.cache)

    def build(self, folder: Path) -> None:
        """Write all examples into `folder`; DataError if there are none, or if a file changes meanwhile."""
        report = Report()
        names = ", ".join(source.path for source in self.sources)
        chunks = self._encoded(report)
        if self.kind == "text":
            parts = chain.from_iterable(chunks)
            chunks = _cut_documents(parts, self.encoder, self.settings.max_length)
        _write_columns(folder, chunks, report)
        if not report.kept:
            reasons = str(report).replace("\n  ", "; ")
            raise DataError(f"no example is left of {names}: {reasons}")
        sizes = np.fromfile(folder / "_sizes.int64", np.int64).reshape(-1, 3)
        report.tokens, report.shared, _ = sizes.sum(0).tolist()
        index = {"kind": self.kind, "report": vars(report)}
        (folder / "index.json").write_text(json.dumps(index, indent=1))
        digests = {path.name: digest_of(path) for path in folder.iterdir()}
        (folder / DIGESTS).write_text(json.dumps(digests, indent=1))
        if self._files() != self._files_at_start:
            raise DataError(
                f"{names} changed while it was read; start again when nothing writes there any more"
            )

    def _encoded(self, report: Report) -> Iterator[Any]:
        """Yield what `encode` makes of batches of rows, in the order of the rows, and count it in `report`."""
        rows = locate_rows(self.sources, report, self.settings.eval_fraction, self.held_out)
        rows = progress(rows, desc="tokenising", unit="rows", delay=BAR_AFTER_SECONDS)
        for encoded, counted in in_order(self.encode, _batches(rows), self.settings.workers):
            report.add(counted)
            yield encoded

    # ---------------------------------------------------------------- what every process does with its batches

    def encode(self, rows: list[RawRow]) -> tuple[Columns | list[Part], Report]:
        """Return the columns of the rows' examples end to end, or the parts of documents; and what was counted."""
        report = Report()
        rendered = []
        encoded = []
        may_drop = partial(dropping, report, self.settings.bad_rows)
        variables = self.template.variables if self.template else ()
        # Rendering all rows before tokenising them takes a sixth less time than both for one row after the other.
        for row in rows:
            source = self.sources[row.source]
            with may_drop(row.where) as note:
                if self.kind == "trajectory":
                    from ulysses.data.read.trajectories import read_trajectory

                    longest = self.settings.max_length
                    encoded.append(
                        read_trajectory(row, source.columns, self.vocabulary, longest, note)
                    )
                    continue
                for record in read_row(row.value, source, self.kind, note, variables):
                    if self.kind == "text":
                        encoded += self._document_parts(row, record.text)
                        continue
                    with may_drop(row.where):
                        rendered.append((row, record, self._render(record, note)))
        for row, record, texts in rendered:
            with may_drop(row.where) as note:
                encoded.append(self._example(row, record, texts, note))
        if self.kind == "text":
            return encoded, report
        names = encoded[0] if encoded else ()
        columns = {name: np.hstack([example[name] for example in encoded]) for name in names}
        return columns, report

    def _document_parts(self, row: RawRow, text: str) -> list[Part]:
        """Tokenise a document, or the part of one that a row holds; a long one in parts, to bound memory."""
        if not row.continues:
            text = self.encoder.with_space(text)
        encoded = map(self.encoder.encode_text, safe_parts(text))
        return [(row.where, row.source, np.array(ids, np.int32)) for ids in encoded]

    def _example(
        self, row: RawRow, record: Record, texts: list[Rendered], note: Callable[[str], None]
    ) -> Columns:
        """Make the example of one record from its rendered texts."""
        is_conversation = self.kind == "sequence"
        encoded = self.encoder.encode_batch(texts, as_whole=is_conversation)
        if is_conversation and self.settings.train_on == "all":
            encoded = [Encoded(ids, [1.0] * len(ids)) for ids, _ in encoded]
            if record.answers[0][-1].role != "assistant":
                note("turns after the last answer left out")
        # answers to one prompt are cut together; turns that are trained separately are cut each for itself
        groups = [[turn] for turn in encoded] if is_conversation else [encoded]
        sequences = []
        problems = []
        longest = 0
        for group in groups:
            try:
                cut, prompt_length = self._cut(group, row.where, record.ranks)
                sequences += cut
                longest = max(longest, *(len(ids) for ids, _ in group))
            except DropRowError as error:
                problems.append(error)
        if not sequences:
            raise problems[0]
        for problem in problems:
            note(f"turns left out, {problem}")
        if len(groups) > 1:
            note("conversations whose turns are trained separately")
        if longest > self.settings.max_length:
            note("truncated")
        return self._columns(row, record, sequences, prompt_length)

    def _columns(
        self, row: RawRow, record: Record, sequences: list[Encoded], prompt_length: int
    ) -> Columns:
        """Return an example as the files hold it."""
        tokens, weights, sizes = [], [], []
        for i, (ids, weights_of_ids) in enumerate(sequences):
            prefix = common_prefix(sequences[i - 1], sequences[i]) if i else 0
            rank = record.ranks[i] if self.kind == "ranked" else 0
            sizes += [len(ids), prefix, rank]
            tokens += ids
            weights += weights_of_ids
        columns = {
            **record.numbers,
            "tokens": np.array(tokens, np.int32),
            "weights": np.array(weights, np.float32),
            "_sizes": sizes,
            "_counts": len(sequences),
            "_source": row.source,
        }
        if self.kind != "sequence":
            columns["prompt_length"] = prompt_length
        if self.kind in ("unpaired", "prompt"):
            prompt = hashlib.sha256(columns["tokens"][:prompt_length].tobytes()).digest()
            columns["_prompt"] = np.frombuffer(prompt, np.int64)[0]
        if self.kind == "prompt":
            text = json.dumps(record.row, ensure_ascii=False, default=str).encode()
            columns |= {"_row_size": len(text), "_rows": np.frombuffer(text, np.uint8)}
        return columns

    def _render(self, record: Record, note: Callable[[str], None]) -> list[Rendered]:
        """Render a record: one text for each answer; of a sequence one text, or several where its turns need them."""
        is_conversation = self.kind == "sequence"
        train_on = self.settings.train_on if is_conversation else "assistant"
        texts = []
        for answer in record.answers:
            messages = record.prompt + answer
            start = len(record.prompt)
            answers = [i for i, m in enumerate(answer, start) if m.role == "assistant"]
            if train_on == "all":
                weights = {messages[i].weight for i in answers}
                if 0 in weights:
                    raise BadRowError(
                        "has an answer that is not to be trained, but data.train_on is all; set it to assistant"
                    )
                if weights - {1}:
                    note("weights of answers not read, data.train_on is all")
            if train_on != "assistant":
                answers = answers[-1:]
            trained = [i for i in answers if messages[i].weight] or answers
            texts += self.template.render(
                messages, record.tools, trained, is_conversation, record.variables, note
            )
        return texts

    def _cut(
        self, sequences: list[Encoded], where: str, ranks: Iterable[int]
    ) -> tuple[list[Encoded], int]:
        """Cut sequences that have one prompt to max_length; return them and the prompt's length.

        Raises DropRowError, or with truncation = "error" a DataError, for sequences that cannot be trained on.
        """
        limit, truncation = self.settings.max_length, self.settings.truncation
        first = sequences[0].ids
        if not first:
            raise DropRowError("the chat template writes nothing")
        longest = max(len(sequence.ids) for sequence in sequences)
        if longest > limit and truncation == "drop":
            raise DropRowError("longer than max_length")
        if longest > limit and truncation == "error":
            raise DataError(
                f"{where} has {longest} tokens but data.max_length is {limit}; raise it, or "
                "set data.truncation to keep_start, keep_end or drop"
            )
        # Sequences and prompts without an answer are cut as one text, all of which counts as a prompt here.
        prompt_length = longest
        if self.kind in ("pair", "ranked", "unpaired"):
            prompts = {tuple(ids[: _first_trained(weights)]) for ids, weights in sequences}
            if len(prompts) > 1:
                raise DropRowError(
                    "the prompts of chosen and rejected differ once the chat template is applied"
                )
            prompt_length = len(prompts.pop())
        removed = 0
        if truncation == "keep_end" or self.kind == "prompt":
            # The longest answer comes first, but a quarter of max_length stays for the prompt.
            room_beside_answer = limit - (longest - prompt_length)
            least_prompt = max(1, min(prompt_length, limit // 4))
            removed = max(0, prompt_length - max(room_beside_answer, least_prompt))
        start = 1 if first[0] == self.encoder.bos else 0  # BOS stays
        end = start + removed
        cut = []
        for ids, weights in sequences:
            ids, weights = ids[:start] + ids[end:], weights[:start] + weights[end:]
            cut.append(Encoded(ids[:limit], weights[:limit]))
        if self.kind != "prompt" and not all(any(weights[1:]) for _, weights in cut):
            after = " after truncation" if longest > limit else ""
            raise DropRowError(f"no trained token is left{after}")
        answers = {(tuple(ids), rank) for (ids, _), rank in zip(cut, ranks)}
        if len({ids for ids, _ in answers}) < len(answers):
            raise DropRowError("chosen and rejected are the same tokens")
        return cut, prompt_length - removed


def _batches(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Group rows, fewer of them where they are long as text."""
    batch = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.value if isinstance(row.value, bytes) else str(row.value))
        if len(batch) == ROWS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut_documents(
    parts: Iterable[Part], encoder: TextEncoder, limit: int
) -> Iterator[Columns]:
    """Join the parts of each document, and cut it into pieces of at most `limit` tokens, as the files hold them.

    data.truncation does not apply: no token is lost.
    """
    eos = np.array([encoder.eos], np.int32)
    bos = eos[:0] if encoder.bos is None else np.array([encoder.bos], np.int32)
    for (_, source), document in groupby(parts, key=itemgetter(0, 1)):
        left = bos
        more = (tokens for _, _, tokens in document)
        for tokens in chain(more, [eos]):
            left = np.append(left, tokens)
            is_complete = tokens is eos
            while len(left) > limit or (is_complete and len(left) > 1):
                piece = left[:limit]
                size = [len(piece), 0, 0]
                yield {"tokens": piece, "_sizes": size, "_counts": [1], "_source": [source]}
                left = left[limit - 1 :]  # the last token predicts the first of the next piece


def _write_columns(folder: Path, chunks: Iterable[Columns], report: Report) -> None:
    """Write chunks of examples as they come, a file for each column, and count the examples."""
    files = {}
    with ExitStack() as stack:
        for chunk in chunks:
            for name, values in chunk.items():
                array = np.asarray(values)
                if name not in files:
                    file = folder / f"{name}.{array.dtype}"
                    files[name] = stack.enter_context(file.open("wb"))
                files[name].write(array)
            report.kept += len(chunk.get("_counts", ()))


def _first_trained(weights: Sequence[float]) -> int:
    return next((i for i, weight in enumerate(weights) if weight), 0)


def common_prefix(first: Encoded, other: Encoded) -> int:
    """Count the first tokens that `other` may leave out, because `first` has them too and `other` trains none of them.

    The last token in common is not left out, for it predicts the first token that differs.
    """
    count = 0
    for token, other_token, weight in zip(first.ids, other.ids, other.weights):
        if token != other_token or (count and weight):
            break
        count += 1
    return max(0, count - 1)
