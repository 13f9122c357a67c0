"""Turn rows into records: a conversation, a pair of answers to one prompt, a prompt alone, or a document.

`detect_format` names the format of a row from its keys, and `parse_row` reads it as what the stage needs. The format
says how the prompt is written; how the answers are written follows from their own keys.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.messages import (
    ROLES,
    Message,
    Messages,
    first_key,
    number,
    parse_messages,
    parse_tools,
    parse_transcript,
    string,
    type_name,
)
from ulysses.data.sources import FORMATS, Source, read_rows

Row = Mapping[str, Any]
# the index of its source, its file and number, and the row as it was read
LocatedRow = tuple[int, str, Any]
Event = tuple[str, str, str]  # the arguments of Report.count
Scored = list[tuple[Messages, float]]  # answers with their scores; a higher one is better
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "question", "query")
ANSWER_KEYS = ("completion", "response", "answer", "output")
RANKED_KEYS = ("completions", "responses", "answers", "outputs", "output")
LABEL_KEYS = ("label", "kto_tag")
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
EXAMPLES_PER_REASON = 5


@dataclass(frozen=True)
class Record:
    """One training example before tokenisation.

    Attributes:
        prompt: the messages before the answer; they are not trained.
        answers: one list of messages (sequence, unpaired), chosen and rejected (pair), several (ranked), or an empty
            list (prompt). Their assistant messages are trained.
        ranks: of ranked answers; the best have 0.
        columns: numbers that go with the example, such as the margin of a pair.
        text: a document of stage pt, or a part of one; parts of the same document have the same source and `where`.
        where: file and row number, for messages; source: index of the source; row: of a prompt, as it was read.
    """

    prompt: Messages
    answers: list[Messages]
    tools: Sequence[Any] = ()
    columns: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    where: str = ""
    source: int = 0
    row: Any = None
    ranks: Sequence[int] = ()


@dataclass
class Report:
    """Counts of what happened to the rows, with examples that name file and row; vars() of it is JSON data."""

    read: int = 0
    kept: int = 0
    tokens: int = 0
    shared: int = 0  # of the tokens: prompts that a further answer does not repeat
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, what: str, where: str) -> None:
        """Count a row in `dropped` or `notes`."""
        counts: Counter[str] = getattr(self, name)
        counts[what] += 1
        if counts[what] <= EXAMPLES_PER_REASON:
            self.examples.setdefault(what, []).append(where)

    def __str__(self) -> str:
        lines = [
            f"read {self.read} rows, kept {self.kept} examples, dropped {sum(self.dropped.values())} rows"
        ]
        if self.shared:
            lines.append(
                f"  {self.shared / self.tokens:.1%} of the tokens are prompts that another answer has"
            )
        for title, counts in (("dropped, ", self.dropped), ("", self.notes)):
            for reason, count in Counter(counts).most_common():
                examples = ", ".join(self.examples[reason])
                more = ", ..." if count > EXAMPLES_PER_REASON else ""
                lines.append(f"  {title}{reason}: {count} ({examples}{more})")
        return "\n".join(lines)


@contextmanager
def dropping(events: list[Event], where: str, bad_rows: str) -> Iterator[None]:
    """Drop and count a row that cannot be used; DataError if it breaks its format and `bad_rows` is "error"."""
    try:
        yield
    except DropRowError as error:
        events.append(("dropped", str(error), where))
    except (BadRowError, RecursionError) as error:
        too_deep = isinstance(error, RecursionError)
        problem = "is nested too deeply" if too_deep else str(error)
        if bad_rows != "drop":
            raise DataError(f"{where} {problem}") from None
        events.append(("dropped", problem.split(":")[0], where))


def locate_rows(sources: Sequence[Source], report: Report) -> Iterator[LocatedRow]:
    """Stream the rows of all sources in order, and count them in `report`.

    A file that cannot be read comes as a DataError in the place of its next row.
    """
    for index, source in enumerate(sources):
        where = source.path
        try:
            for file, number, row in islice(read_rows(source), source.max_examples or None):
                previous, where = where, f"{file} row {number}"
                report.read += where != previous  # a long document comes in several parts
                yield index, where, row
        except DataError as error:
            yield index, where, error


def read_records(
    rows: Iterable[LocatedRow],
    sources: Sequence[Source],
    kind: str,
    events: list[Event],
    *,
    bad_rows: str = "error",
) -> Iterator[Record]:
    """Read rows as records.

    Args:
        events: where to add what a Report is to count.
        kind: text, sequence, pair, ranked, unpaired or prompt: what the stage needs.
        bad_rows: "error" stops at a row that breaks its format, "drop" counts it.

    Raises DataError: a missing or broken file, or a row that breaks its format.
    """
    for index, where, row in rows:
        source = sources[index]
        with dropping(events, where, bad_rows):
            records = parse_row(_checked(row, source.columns), source.format, kind)
            if len(records) > 1:
                events.append(("notes", "rows that gave several examples", where))
            kept = row if kind == "prompt" else None
            for record in records:
                yield replace(record, where=where, source=index, row=kept)


def _checked(row: Any, columns: Mapping[str, str]) -> Row:
    """Return the row under our keys; BadRowError if it is none, or lacks a key that `columns` names."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, Mapping):
        raise BadRowError(f"is {type_name(row)}, not an object with keys")
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRowError("is not valid UTF-8, or holds an unpaired surrogate") from None
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    renamed |= {ours: _column(row, theirs) for ours, theirs in columns.items()}
    if media := next((key for key in MEDIA_KEYS if renamed.get(key)), None):
        raise BadRowError(
            f"has the column {media!r}, but only text is supported; to train on the text alone set "
            f'columns = {{unused = "{media}"}}'
        )
    return renamed


def _column(row: Row, name: str) -> Any:
    """Return what a row holds under a name; "a.b" is the key b of the object a, unless the row has it as it is."""
    value: Any = row
    for key in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRowError(
                f"has no column {name!r}, which columns names (it has {_keys(row)})"
            )
        value = value[key]
    return value


def detect_format(row: Row) -> str:
    """Name the format of a row from its keys; BadRowError lists the keys if none fits."""
    if first_key(row, CONVERSATION_KEYS):
        return "messages"
    if "instruction" in row:
        return "alpaca"
    if "chosen" in row and "rejected" in row:
        return "preference"
    if first_key(row, PROMPT_KEYS) or _whole_conversation(row, first_key(row, ANSWER_KEYS)):
        return "prompt_completion"
    if "text" in row:
        return "text"
    raise BadRowError(
        f"has the keys {_keys(row)}, which fit none of the formats {', '.join(FORMATS)}; "
        'name the format, or map the keys with columns = {prompt = "their_name", ...}'
    )


def parse_row(row: Row, row_format: str, kind: str) -> list[Record]:
    """Read one row as records of `kind`: several for ranked lists, and for unpaired answers from preference data.

    Raises BadRowError: the row breaks its format. Raises DropRowError: it cannot be trained on.
    """
    # parquet fills with None
    row = {key: value for key, value in row.items() if value is not None}
    if kind == "text":
        key = _required(row, ("text", "content"))
        if not string(row[key], key).strip():
            raise DropRowError("empty text")
        return [Record([], [], text=row[key])]
    if row_format == "auto":
        row_format = detect_format(row)
    if row_format == "text":
        raise BadRowError(
            "holds plain text, which only stage pt trains on; map its keys with columns"
        )
    tools = parse_tools(row.get("tools"))
    prompt, answer, scored = _read(row, row_format, kind)
    if kind == "prompt":
        prompt = prompt or answer or []
        while prompt and prompt[-1].role == "assistant" and not prompt[-1].begun:
            prompt = prompt[:-1]
        if not prompt or prompt[-1].role == "system":
            raise DropRowError("no user message to answer")
        return [Record(prompt, [[]], tools)]
    if scored:
        if kind == "sequence":
            raise BadRowError(
                'holds chosen and rejected answers; to train on one set columns = {completion = "chosen"}'
            )
        pairs = [[good, bad] for good, high in scored for bad, low in scored if high > low]
        for chosen, rejected in pairs:
            _check_completion(chosen, "chosen")
            _check_completion(rejected, "rejected")
            if chosen == rejected:
                raise DropRowError("chosen and rejected are the same")
        if kind == "ranked":
            answers, scores = zip(*scored)
            ranks = [sorted(set(scores), reverse=True).index(score) for score in scores]
            margin = number(row.get("margin", 0.0), "margin")
            return [Record(prompt, list(answers), tools, {"margin": margin}, ranks=ranks)]
        if kind == "pair":
            return [Record(prompt, pair, tools) for pair in pairs]
        return [
            Record(prompt, [answer], tools, {"label": label})
            for pair in pairs
            for answer, label in zip(pair, (1.0, 0.0))
        ]
    if kind in ("pair", "ranked"):
        raise BadRowError("has no chosen and rejected answers (nor a ranked list of answers)")
    label = _label(row)
    if kind == "unpaired" and label is None:
        raise BadRowError(
            f"has no {_either(LABEL_KEYS)}: true for a desirable answer, false for an undesirable one"
        )
    if answer is None:
        raise BadRowError(f"has no answer: none of {', '.join(ANSWER_KEYS)}")
    if kind == "unpaired":
        if not prompt:
            prompt, answer = answer[:-1], answer[-1:]
        _check_completion(answer, "the conversation")
        return [Record(prompt, [answer], tools, {"label": float(label)})]
    if label is False:
        raise DropRowError("its label is false")
    trained = [message for message in answer if message.role == "assistant"]
    if not trained:
        raise DropRowError("no assistant message")
    if any(message.is_empty for message in trained):
        raise DropRowError("empty answer")
    if row_format == "alpaca":  # the assistant's turns in its history are training data too
        prompt, answer = [], prompt + answer
    return [Record(prompt, [answer], tools)]


def _check_completion(messages: Messages, name: str) -> None:
    _check_end(messages, name)
    if messages[0].role != "assistant":
        raise BadRowError(
            f"{name} must begin with an assistant message, not {messages[0].role}"
        )
    if messages[-1].is_empty:
        raise DropRowError("empty answer")


def _check_end(messages: Messages, name: str) -> None:
    if not messages or messages[-1].role != "assistant":
        raise DropRowError(f"{name} does not end with an assistant message")


# ---------------------------------------------------------------------------------------------- prompts and answers


def _read(row: Row, row_format: str, kind: str) -> tuple[Messages, Messages | None, Scored]:
    """Read the prompt, and either its answer or scored ones; a whole conversation counts as an answer."""
    prompt: Messages = []
    answer: Messages | None = None
    scored: Scored = []
    is_conversation = row_format in ("messages", "sharegpt")
    if is_conversation:
        prompt = parse_messages(row[_required(row, CONVERSATION_KEYS)])
    elif row_format == "alpaca":
        prompt = _alpaca_prompt(row)
    elif key := first_key(row, PROMPT_KEYS):
        prompt = _prompt(row[key], key)
    key, ranked, given = first_key(row, ANSWER_KEYS), _ranked_key(row), prompt
    is_preference = row_format == "preference"
    # What else a prompt's row holds is for the reward function. The prompt of preference rows may be in their answers.
    if kind != "prompt" or not prompt or is_preference:
        if "chosen" in row or (is_preference and not ranked):
            prompt, scored = _preference(row, prompt)
        elif ranked:
            scored = _ranked(row, ranked)
        elif is_conversation and (not key or (prompt and prompt[-1].role == "assistant")):
            prompt, answer = [], prompt
        elif not prompt:
            conversation = _whole_conversation(row, key)
            prompt, answer = conversation[:-1], conversation[-1:] or None
        elif key:
            answer = _answer(row[key], key)
    if not prompt and answer is None:
        raise BadRowError(f"has no {_either(PROMPT_KEYS)} (it has {_keys(row)})")
    answers = [messages for messages, _ in scored] or ([answer] if answer else [])
    is_prefill = prompt is given and not (is_conversation and kind == "prompt")
    if is_prefill and prompt and prompt[-1].role == "assistant" and not prompt[-1].tool_calls:
        if all(messages and messages[0].role == "assistant" for messages in answers):
            *prompt, begun = prompt
            size = len(begun.content)
            if kind == "prompt":
                prompt.append(replace(begun, begun=size))
            for messages in answers:
                continued = messages[0]
                text, more = begun.content + continued.content, {**begun.more, **continued.more}
                messages[0] = replace(continued, content=text, more=more, begun=size)
    if system := row.get("system"):
        first = prompt or answer or prompt
        if not first or first[0].role != "system":
            first.insert(0, Message("system", string(system, "system")))
    return prompt, answer, scored


def _alpaca_prompt(row: Row) -> Messages:
    texts = (string(row.get(key, ""), key) for key in ("instruction", "input"))
    text, history = "\n".join(filter(None, texts)), row.get("history") or []
    if not text.strip():
        raise DropRowError("empty prompt")
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise BadRowError("'history' must be a list of [user, assistant] pairs")
    messages = [
        Message(role, string(said, "history"))
        for turn in history
        for role, said in zip(("user", "assistant"), turn)
    ]
    return [*messages, Message("user", text)]


def _prompt(value: Any, key: str) -> Messages:
    if isinstance(value, list):
        return parse_messages(value)
    if not string(value, key).strip():
        raise DropRowError("empty prompt")
    turns = parse_transcript(value) or [Message("user", value)]
    return turns[:-1] if turns[-1].role == "assistant" and turns[-1].is_empty else turns


def _answer(value: Any, key: str) -> Messages:
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return parse_messages(value)
    return [Message("assistant", string(value, key))]


def _preference(row: Row, prompt: Messages) -> tuple[Messages, Scored]:
    """Read chosen and rejected: answers to the prompt, or two whole conversations or transcripts that share theirs."""
    keys = [_required(row, (key,)) for key in ("chosen", "rejected")]
    chosen, rejected = (_whole_conversation(row, key) for key in keys)
    if chosen and rejected:
        inner = chosen[:-1]
        if inner != rejected[:-1]:
            raise DropRowError("the prompts of chosen and rejected differ")
        said = [message.content for message in inner if message.role != "system"]
        outside = [message.content for message in prompt if message.role != "system"]
        if outside and outside not in (said, said[:1]):
            raise DropRowError("the prompt differs from the one inside chosen and rejected")
        if prompt and prompt[0].role == "system" and inner[0].role != "system":
            inner.insert(0, prompt[0])
        return inner, [(chosen[-1:], 1.0), (rejected[-1:], 0.0)]
    return prompt, [(_answer(row[key], key), score) for key, score in zip(keys, (1.0, 0.0))]


def _ranked_key(row: Row) -> str:
    key = first_key(row, RANKED_KEYS)
    answers = row.get(key)
    if not isinstance(answers, list):
        return ""
    if key == "output" and not all(isinstance(answer, str) for answer in answers):
        return ""  # one answer, written as messages
    return key


def _ranked(row: Row, key: str) -> Scored:
    """Score a list of answers by `scores` (higher is better), `ranks` (lower) or their places in the list."""
    answers = [_answer(value, key) for value in row[key]]
    scores = [-float(place) for place in range(len(answers))]
    for name, sign in (("scores", 1.0), ("ranks", -1.0)):
        if (values := row.get(name)) is not None:
            if not isinstance(values, list) or len(values) != len(answers):
                raise BadRowError(
                    f"has {len(answers)} {key} but its {name!r} is not a list of as many numbers"
                )
            scores = [sign * number(value, name) for value in values]
    if len(set(scores)) < 2:
        raise DropRowError("no answer is ranked above another")
    return list(zip(answers, scores))


def _whole_conversation(row: Row, key: str) -> Messages:
    """Read an answer that includes its prompt: a transcript, or messages that begin before it; else return []."""
    answer, turns = row.get(key), []
    if isinstance(answer, str):
        turns = parse_transcript(answer)
    elif isinstance(answer, list) and answer and isinstance(answer[0], Mapping):
        role = answer[0].get("role", answer[0].get("from"))
        turns = [] if ROLES.get(role) == "assistant" else parse_messages(answer)
    if turns:
        _check_end(turns, key)
    return turns


# ------------------------------------------------------------------------------------------------------ small checks


def _required(row: Row, keys: tuple[str, ...]) -> str:
    key = first_key(row, keys)
    if not key:
        raise BadRowError(f"has no {_either(keys)} (it has {_keys(row)})")
    return key


def _either(keys: tuple[str, ...]) -> str:
    return " or ".join(map(repr, keys))


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row)))


def _label(row: Row) -> bool | None:
    key = first_key(row, LABEL_KEYS)
    label = LABELS.get(str(row.get(key)).strip().lower())
    if key and label is None:
        raise BadRowError(f"{key!r} is {row[key]!r}, not true or false")
    return label
