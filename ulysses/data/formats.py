"""Turn rows into records: a conversation, a pair of answers to one prompt, a prompt alone, or a document.

`detect_format` names the format of a row from its keys, and `parse_row` reads it as what the stage needs. The format
says how the prompt is written; how the answers are written follows from their own keys.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.messages import (
    ROLES,
    Message,
    Messages,
    is_transcript,
    number,
    parse_messages,
    parse_tools,
    parse_transcript,
    string,
    type_name,
)
from ulysses.data.sources import FORMATS, Source, read_rows, text_parts

Row = Mapping[str, Any]
Pairs = list[tuple[Messages, Messages]]
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "question", "query")
ANSWER_KEYS = ("completion", "response", "answer", "output")
RANKED_KEYS = ("completions", "responses", "answers", "outputs", "output")
LABEL_KEYS = ("label", "kto_tag")
EXAMPLES_PER_REASON = 5


@dataclass(frozen=True)
class Record:
    """One training example before tokenisation.

    Attributes:
        prompt: the messages before the answer; they are not trained.
        answers: one list of messages (sequence, unpaired), chosen and rejected (pair), or none (prompt). Their
            assistant messages are trained.
        columns: numbers that go with the example, such as the margin of a pair.
        text: a document of stage pt, or a part of one; parts of the same document have the same source and `where`.
        where: file and row number, for messages; source: index of the source; row: the whole row, as it was read.
    """

    prompt: Messages = field(default_factory=list)
    answers: list[Messages] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    columns: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    where: str = ""
    source: int = 0
    row: Any = None


@dataclass
class Report:
    """Counts of what happened to the rows, with examples that name file and row; vars() of it is JSON data."""

    read: int = 0
    kept: int = 0
    duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self._remember(reason, where)

    def note(self, what: str, where: str) -> None:
        self.notes[what] += 1
        self._remember(what, where)

    def _remember(self, reason: str, where: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(where)

    def __str__(self) -> str:
        lines = [
            f"read {self.read} rows, kept {self.kept} examples ({self.duplicates} of them duplicates), "
            f"dropped {sum(self.dropped.values())} rows"
        ]
        for title, counts in (("dropped, ", self.dropped), ("", self.notes)):
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                examples = self.examples[reason]
                more = ", ..." if count > len(examples) else ""
                lines.append(f"  {title}{reason}: {count} ({', '.join(examples)}{more})")
        return "\n".join(lines)


def read_records(
    sources: Iterable[Source], kind: str, report: Report, *, bad_rows: str = "error"
) -> Iterator[Record]:
    """Stream the records of all sources in order, and count in `report` what is left out.

    Args:
        kind: text, sequence, pair, unpaired or prompt: what the stage needs.
        bad_rows: "error" stops at a row that breaks its format, "drop" counts it.

    Raises DataError: a missing or broken file, or a row that breaks its format.
    """
    for index, source in enumerate(sources):
        row_format, previous = source.format, ""
        for file, row_number, row in islice(read_rows(source), source.max_examples or None):
            where = f"{file} row {row_number}"
            report.read += where != previous  # a long document comes in several parts
            previous = where
            try:
                if isinstance(row, BadRowError):
                    raise row
                if not isinstance(row, Mapping):
                    raise BadRowError(f"is {type_name(row)}, not an object with keys")
                renamed = _rename(row, source.columns)
                if row_format == "auto":
                    row_format = "text" if kind == "text" else detect_format(renamed)
                records = parse_row(renamed, row_format, kind)
            except (BadRowError, DropRowError) as error:
                if isinstance(error, BadRowError) and bad_rows != "drop":
                    raise DataError(f"{where} {error}") from None
                report.drop(str(error).split(":")[0], where)
                continue
            if len(records) > 1:
                report.note("rows that gave several examples", where)
            for record in records:
                record = replace(record, where=where, source=index, row=row)
                parts = text_parts([record.text]) if kind == "text" else [(1, "")]
                yield from (replace(record, text=part) for _, part in parts)


def _rename(row: Row, columns: Mapping[str, str]) -> Row:
    absent = [theirs for theirs in columns.values() if theirs not in row]
    if absent:
        raise BadRowError(f"has no column {absent[0]!r}, which columns names (it has {_keys(row)})")
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    return renamed | {ours: row[theirs] for ours, theirs in columns.items()}


def detect_format(row: Row) -> str:
    """Name the format of a row from its keys; BadRowError lists the keys if none fits."""
    if _first_key(row, CONVERSATION_KEYS):
        return "messages"
    if "instruction" in row:
        return "alpaca"
    if "chosen" in row and "rejected" in row:
        return "preference"
    if _first_key(row, PROMPT_KEYS) or _whole_conversation(row):
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
    row = {key: value for key, value in row.items() if value is not None}  # parquet fills with None
    if kind == "text":
        return [Record(text=_not_blank(row, _required(row, ("text", "content")), "empty text"))]
    if row_format == "text":
        raise BadRowError(
            "holds plain text, which only stage pt trains on; map its keys with columns"
        )
    tools = parse_tools(row.get("tools"))
    label = _label(row) if kind in ("sequence", "unpaired") else None
    prompt, answer = _prompt_and_answer(row, row_format)
    pairs: Pairs = []
    # What else a prompt's row holds is for the reward function. The prompt of preference rows may be in their answers.
    if kind != "prompt" or row_format == "preference":
        if "chosen" in row or ("rejected" in row and not _first_key(row, ANSWER_KEYS)):
            prompt, pairs = _preference(row, prompt)
        elif ranked := _ranked_key(row):
            pairs = _ranked_pairs(row, ranked)
        elif answer is None and (key := _first_key(row, ANSWER_KEYS)):
            answer = _answer(row[key], key)
    if row_format == "preference" and not pairs:
        raise BadRowError("is read as preference data but has no chosen and rejected")
    match kind:
        case "prompt":
            return [_prompt_alone(prompt or answer or [], tools)]
        case "sequence":
            if pairs:
                raise BadRowError(
                    "holds chosen and rejected answers; to train on one "
                    'set columns = {completion = "chosen"}'
                )
            if label is False:
                raise DropRowError("its label is false")
            answer = _trainable(answer)
            if row_format == "alpaca":  # the assistant's turns in its history are training data too
                prompt, answer = [], prompt + answer
            return [Record(prompt, [answer], tools)]
        case "unpaired" if not pairs:
            if label is None:
                raise BadRowError(
                    f"has no {_either(LABEL_KEYS)}: true for a desirable answer, false for an undesirable one"
                )
            answer = _given(answer)
            if not prompt:
                prompt, answer = answer[:-1], answer[-1:]
            _check_completion(answer, "the conversation")
            return [Record(prompt, [answer], tools, {"label": float(label)})]
    margin = number(row.get("margin", 0.0), "margin") if kind == "pair" else 0.0
    if not pairs:
        raise BadRowError("has no chosen and rejected answers (nor a ranked list of answers)")
    for chosen, rejected in pairs:
        _check_completion(chosen, "chosen")
        _check_completion(rejected, "rejected")
        if chosen == rejected:
            raise DropRowError("chosen and rejected are the same")
    if kind == "pair":
        return [Record(prompt, list(pair), tools, {"margin": margin}) for pair in pairs]
    return [
        Record(prompt, [answer], tools, {"label": label})
        for pair in pairs
        for answer, label in zip(pair, (1.0, 0.0))
    ]


# ---------------------------------------------------------------------------------- answers that can be trained on


def _prompt_alone(prompt: Messages, tools: Any) -> Record:
    while prompt and prompt[-1].role == "assistant":
        prompt = prompt[:-1]
    if not prompt or prompt[-1].role == "system":
        raise DropRowError("no user message to answer")
    return Record(prompt, tools=tools)


def _given(answer: Messages | None) -> Messages:
    if answer is None:
        raise BadRowError(f"has no answer: none of {', '.join(ANSWER_KEYS)}")
    return answer


def _trainable(answer: Messages | None) -> Messages:
    assistant = [message for message in _given(answer) if message.role == "assistant"]
    if not assistant:
        raise DropRowError("no assistant message")
    if any(message.is_empty for message in assistant):
        raise DropRowError("empty answer")
    return answer


def _check_completion(messages: Messages, name: str) -> None:
    _check_end(messages, name)
    if messages[0].role != "assistant":
        raise BadRowError(f"{name} must begin with an assistant message, not {messages[0].role}")
    if messages[-1].is_empty:
        raise DropRowError("empty answer")


def _check_end(messages: Messages, name: str) -> None:
    if not messages or messages[-1].role != "assistant":
        raise DropRowError(f"{name} does not end with an assistant message")


# ---------------------------------------------------------------------------------------------- prompts and answers


def _prompt_and_answer(row: Row, row_format: str) -> tuple[Messages, Messages | None]:
    """Read the prompt, and the answer where both stand in one list; a whole conversation counts as an answer."""
    prompt: Messages = []
    answer: Messages | None = None
    if row_format in ("messages", "sharegpt"):
        conversation = parse_messages(row[_required(row, CONVERSATION_KEYS)])
        is_open = not conversation or conversation[-1].role != "assistant"
        if "chosen" in row or _ranked_key(row) or (is_open and _first_key(row, ANSWER_KEYS)):
            prompt = conversation
        else:
            answer = conversation
    elif row_format == "alpaca":
        prompt = _alpaca_prompt(row)
    elif key := _first_key(row, PROMPT_KEYS):
        prompt = _prompt(row, key)
    elif row_format == "prompt_completion":
        conversation = _whole_conversation(row)
        if not conversation:
            raise BadRowError(f"has no {_either(PROMPT_KEYS)} (it has {_keys(row)})")
        prompt, answer = conversation[:-1], conversation[-1:]
    if system := row.get("system"):
        first = prompt if prompt or not answer else answer
        if not first or first[0].role != "system":
            first.insert(0, Message("system", string(system, "system")))
    return prompt, answer


def _alpaca_prompt(row: Row) -> Messages:
    parts = [string(row.get(key), key) for key in ("instruction", "input") if row.get(key)]
    _required(row, ("instruction",))
    if not "".join(parts).strip():
        raise DropRowError("empty prompt")
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise BadRowError("'history' must be a list of [user, assistant] pairs")
    for question, answer in history:
        messages.append(Message("user", string(question, "history")))
        messages.append(Message("assistant", string(answer, "history")))
    return [*messages, Message("user", "\n".join(parts))]


def _prompt(row: Row, key: str) -> Messages:
    if isinstance(row[key], list):
        return parse_messages(row[key])
    text = _not_blank(row, key, "empty prompt")
    if not is_transcript(text):
        return [Message("user", text)]
    turns = parse_transcript(text)
    return turns[:-1] if turns[-1].role == "assistant" and turns[-1].is_empty else turns


def _answer(value: Any, key: str) -> Messages:
    if isinstance(value, str):
        return [Message("assistant", string(value, key))]
    if isinstance(value, list | Mapping):
        return parse_messages(value if isinstance(value, list) else [value])
    raise BadRowError(f"{key!r} is {type_name(value)}, not a string or messages")


def _preference(row: Row, prompt: Messages) -> tuple[Messages, Pairs]:
    """Read chosen and rejected: answers to the prompt, or two whole conversations or transcripts that share theirs."""
    chosen, rejected = (row[_required(row, (key,))] for key in ("chosen", "rejected"))
    texts = isinstance(chosen, str) and isinstance(rejected, str)
    if texts and not prompt and is_transcript(chosen):
        return _split_prompt(parse_transcript(chosen), parse_transcript(rejected))
    if _is_conversation(chosen) and _is_conversation(rejected):
        inner, pairs = _split_prompt(parse_messages(chosen), parse_messages(rejected))
        said = [message.content for message in inner if message.role != "system"]
        outside = [message.content for message in prompt if message.role != "system"]
        if prompt and outside not in (said, said[:1]):
            raise DropRowError("the prompt differs from the one inside chosen and rejected")
        if prompt and prompt[0].role == "system" and inner[0].role != "system":
            inner.insert(0, prompt[0])
        return inner, pairs
    if not prompt:
        raise BadRowError(
            "has chosen and rejected but no prompt (nor whole conversations or transcripts in them)"
        )
    return prompt, [
        (_answer(good, "chosen"), _answer(bad, "rejected"))
        for good in _alternatives(chosen)
        for bad in _alternatives(rejected)
    ]


def _split_prompt(chosen: Messages, rejected: Messages) -> tuple[Messages, Pairs]:
    """Split two conversations before their last turn, the assistant's; what precedes it must be equal: the prompt."""
    _check_end(chosen, "chosen")
    _check_end(rejected, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise DropRowError("the prompts of chosen and rejected differ")
    return chosen[:-1], [(chosen[-1:], rejected[-1:])]


def _ranked_key(row: Row) -> str | None:
    key = _first_key(row, RANKED_KEYS)
    if key is None or not isinstance(row[key], list):
        return None
    if key == "output" and not all(isinstance(answer, str) for answer in row[key]):
        return None  # one answer, written as messages
    return key


def _ranked_pairs(row: Row, key: str) -> Pairs:
    """Pair every answer with each worse one: by `scores` (higher is better), `ranks` (lower) or place in the list."""
    answers = [_answer(value, key) for value in row[key]]
    scores = [-float(place) for place in range(len(answers))]
    for name, sign in (("scores", 1.0), ("ranks", -1.0)):
        if (values := row.get(name)) is not None:
            if not isinstance(values, list) or len(values) != len(answers):
                raise BadRowError(
                    f"has {len(answers)} {key} but its {name!r} is not a list of as many numbers"
                )
            scores = [sign * number(value, name) for value in values]
    scored = list(zip(answers, scores))
    pairs = [(good, bad) for good, high in scored for bad, low in scored if high > low]
    if not pairs:
        raise DropRowError("no answer is ranked above another")
    return pairs


def _alternatives(value: Any) -> list[Any]:
    texts = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
    return value if texts else [value]


def _is_conversation(value: Any) -> bool:
    """True for a list of messages that begins before the answer, with a system or user message."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return False
    return ROLES.get(value[0].get("role", value[0].get("from"))) != "assistant"


def _whole_conversation(row: Row) -> Messages:
    """Read an answer that includes its prompt, in a row without a prompt of its own; else return []."""
    key = _first_key(row, ANSWER_KEYS)
    if key is None or _first_key(row, PROMPT_KEYS):
        return []
    if isinstance(row[key], str):
        return parse_transcript(row[key]) if is_transcript(row[key]) else []
    return parse_messages(row[key]) if _is_conversation(row[key]) else []


# ------------------------------------------------------------------------------------------------------ small checks


def _first_key(row: Row, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if row.get(key) is not None), None)


def _required(row: Row, keys: tuple[str, ...]) -> str:
    key = _first_key(row, keys)
    if key is None:
        raise BadRowError(f"has no {_either(keys)} (it has {_keys(row)})")
    return key


def _either(keys: tuple[str, ...]) -> str:
    return " or ".join(map(repr, keys))


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row)))


def _not_blank(row: Row, key: str, problem: str) -> str:
    text = string(row[key], key)
    if not text.strip():
        raise DropRowError(problem)
    return text


def _label(row: Row) -> bool | None:
    key = _first_key(row, LABEL_KEYS)
    if key is None:
        return None
    text = str(row[key]).strip().lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise BadRowError(f"{key!r} is {row[key]!r}, not true or false")
