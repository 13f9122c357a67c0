"""Turn rows into records: a conversation, several answers to one prompt, a prompt alone, or a document.

The keys of a row tell how its prompt is written, and the keys of its answers how these are written.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle
from math import prod

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.messages import (
    MEDIA_KEYS,
    PAIR_KEYS,
    WRITTEN_MESSAGES,
    Message,
    Messages,
    Row,
    decoded,
    first_key,
    from_json,
    number,
    parse_messages,
    parse_tools,
    parse_transcript,
    role_of,
    string,
    type_name,
    weights_of,
)
from ulysses.data.read.sources import ANSWER_KEYS, FORMATS, PROMPT_KEYS, Report, Source

RANKED_KEYS = ("completions", "responses", "answers", "outputs", "output")
ALIASES = {"functions": "tools", "system_prompt": "system"}
LABEL_KEYS = ("label", "kto_tag")
# what is a label of ours in sft, where the labels of rows may be those of another task
OUR_LABELS = ("true", "false", "none")
LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
# columns that mean something to other programs, and are counted because they are not read here
UNREAD = re.compile(
    "context|documents?|margin|reasoning.*|think|thinking.*|thoughts?|cot|chain_of_thought|rationale|System|system_.*|"
    "apis?|api_.*|Tools|tool|toolset|tools?[_-].*|.*_tools|function|functions?[_-].*|.*_functions"
)
# columns that may be a row's prompt, in the order of FORMATS
PROMPT_COLUMNS = (*FORMATS["messages"], *FORMATS["alpaca"], *PROMPT_KEYS)
# columns that may be its answer, or say what its messages hold already
ANSWER_COLUMNS = (*ANSWER_KEYS, *RANKED_KEYS, *LABEL_KEYS, "chosen", "solution", "system")
ANSWER_COLUMNS += FORMATS["text"] + FORMATS["messages"]
ESCAPED_SURROGATE = re.compile(rb"\\u[dD]")
# numbers of ranked answers: 1 where the best has the highest number, -1 where it has the lowest
RANKINGS = {"scores": 1, "rewards": 1, "ratings": 1, "ranks": -1}


@dataclass(frozen=True)
class Record:
    """One training example before tokenisation.

    Attributes:
        prompt: the messages before the answer; they are not trained.
        answers: one list of messages (sequence, unpaired), chosen and rejected (pair), several (ranked), or an empty
            list (prompt). Their assistant messages are trained.
        tools: descriptions of the tools that the assistant may call.
        numbers: what goes with the example, such as the margin of a pair.
        text: a document of stage pt, or a part of one.
        ranks: the ranks of the answers; the best have 0.
        variables: what the chat template reads besides messages and tools, such as enable_thinking.
        row: the row as it was read.
    """

    prompt: Messages
    answers: list[Messages]
    tools: Sequence[object] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    ranks: Sequence[int] = (0, 1)
    variables: Row = field(default_factory=dict)
    row: Row = field(default_factory=dict)


@contextmanager
def dropping(report: Report, bad_rows: str, where: str) -> Iterator[Callable[[str], None]]:
    """Drop and count a row that cannot be used; DataError if it breaks its format and `bad_rows` is "error".

    The context is a function that counts what else the user should know of the row.
    """
    try:
        yield partial(report.note, where=where)
    except DropRowError as error:
        report.drop(str(error), where)
    except (BadRowError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if bad_rows != "drop":
            raise DataError(f"{where} {problem}") from None
        report.drop(problem.split(":")[0], where)


def read_row(
    value: object,
    source: Source,
    kind: str,
    note: Callable[[str], None],
    variables: Iterable[str] = (),
) -> list[Record]:
    """Read one row as records: several for ranked lists, and for unpaired answers from preference data.

    Args:
        value: the row, a line of JSON, or the error in the place of a row.
        kind: what the stage needs: text, sequence, pair, ranked, unpaired or prompt; scored takes any answers.
        note: is called with what the report should count.
        variables: names of the chat template's variables, which are not read from columns.

    Raises BadRowError: the row breaks its format. Raises DropRowError: it cannot be trained on.
    """
    original = _parsed(value)
    row = _renamed(original, source)
    if kind == "sequence" and str(row.get("label")).lower() not in OUR_LABELS:
        del row["label"]
        note("'label' is neither true nor false, and was not read")
    only_alpaca = () if first_key(row, FORMATS["alpaca"]) else ("input", "history")
    unread = {name for name in row.keys() - ALIASES.keys() if UNREAD.fullmatch(name)}
    unread |= row.keys() & {*variables, *only_alpaca}
    if kind == "ranked":
        unread.discard("margin")
    records = _records(row, source, kind)
    texts = [m.content for each in records for m in chain(each.prompt, *each.answers)]
    for name in sorted(unread | _passed_over(row, source, kind, texts)):
        if row[name] not in ("", []):
            note(f"the column {name!r} was not read")
    if any(map(WRITTEN_MESSAGES.match, texts)):
        note("a text that looks like a list of messages was read as text")
    if len(records) > 1:
        note("rows that gave several examples")
    return [replace(record, row=original) for record in records]


def _parsed(value: object) -> Row:
    """Return a row, which may be a line of JSON; BadRowError if it is no object, or not valid Unicode."""
    if isinstance(value, ValueError):
        raise value
    try:
        row = from_json(value.decode("utf-8-sig")) if isinstance(value, bytes) else value
        if row is value or ESCAPED_SURROGATE.search(value):
            json.dumps(row, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeError:
        raise BadRowError("is not valid UTF-8, or holds an unpaired surrogate") from None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"is not valid JSON: {error}") from None
    if not isinstance(row, Mapping):
        raise BadRowError(f"is {type_name(row)}, not an object with keys")
    if None in row:
        raise BadRowError("has more fields than the first line names columns")
    return row


def _renamed(row: Row, source: Source) -> dict[str, object]:
    """Return the row under our keys, without nulls; BadRowError if it lacks a key that the source's `columns` names."""
    columns = source.columns
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    renamed |= {ours: column_of(row, theirs) for ours, theirs in columns.items()}
    for theirs, ours in ALIASES.items():
        if renamed.get(ours) and renamed.get(theirs):
            raise BadRowError(
                f"has both {ours!r} and {theirs!r}, which mean the same; to ignore one set "
                f'columns = {{unused = "{theirs}"}}'
            )
        renamed[ours] = renamed.get(ours) or renamed.get(theirs)
    renamed["system"] = renamed["system"] or source.system
    if media := [key for key in MEDIA_KEYS if renamed.get(key)]:
        raise BadRowError(
            f"has the column {media[0]!r}, but only text is supported; to train on the text alone set "
            f'columns = {{unused = "{media[0]}"}}'
        )
    # a column without a name is an index that pandas has written
    return {key: value for key, value in renamed.items() if key and value is not None}


def column_of(row: Row, name: str) -> object:
    """Return a column of the row; "a.b" is the key b of the object a, unless the row has a column of that name."""
    value = row
    for key in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRowError(
                f"has no column {name!r}, which columns names (it has {_keys(row)})"
            )
        value = value[key]
    return value


def _records(row: dict[str, object], source: Source, kind: str) -> list[Record]:
    _check_marks(row, kind)
    if kind == "text":
        text = string(*_required(row, "text"))
        if not text.strip():
            raise DropRowError("empty text")
        return [Record([], [], text=text)]
    # each message tells itself how it is written
    row_format = "messages" if source.format == "sharegpt" else source.format
    if row_format == "auto":
        row_format = next((name for name in FORMATS if first_key(row, FORMATS[name])), "text")
    if row_format == "text":
        raise BadRowError(
            f"has the keys {_keys(row)}, which fit none of the formats {', '.join(FORMATS)}, or only the last one, "
            'plain text, which only stage pt trains on; map the keys with columns = {prompt = "their_name", ...}'
        )
    prompt, answers = _read(row, row_format, kind)
    problem = "'chat_template_kwargs' is not JSON of an object"
    of_row = decoded(row.get("chat_template_kwargs"), problem, Mapping | None) or {}
    variables = {**source.chat_template_kwargs}
    variables |= {key: value for key, value in of_row.items() if value is not None}
    record = Record(prompt, answers, parse_tools(row.get("tools")), variables=variables)
    if kind == "prompt":
        while role_of(prompt, -1) == "assistant" and not prompt[-1].begun:
            prompt = prompt[:-1]
        if role_of(prompt, -1) in ("", "system"):
            raise DropRowError("no user message to answer")
        return [replace(record, prompt=prompt, answers=[[]])]
    is_scored, several = kind == "scored" and bool(answers), len(answers) > 1
    if several and kind == "sequence":
        raise BadRowError(
            'holds chosen and rejected answers; to train on one set columns = {completion = "chosen"}'
        )
    if several or is_scored:
        for answer in answers:
            _check_answer(answer, kind)
        return [record] if is_scored else _compared(record, row, kind)
    if kind in ("pair", "ranked"):
        raise BadRowError(f"has no chosen and rejected answers or ranks (it has {_keys(row)})")
    key = first_key(row, LABEL_KEYS)
    label = LABELS.get(str(row.get(key)).lower())
    if label is None and (key or kind == "unpaired"):
        meaning = " that is true for a desirable answer and false for an undesirable one"
        raise _without(row, LABEL_KEYS, meaning)
    if not answers:
        raise _without(row, ANSWER_KEYS)
    if kind == "unpaired":
        record = replace(record, numbers={"label": label})
    elif label == 0:
        raise DropRowError("its label is false")
    elif row_format == "alpaca":
        # the assistant's turns in the history of an alpaca row are training data too
        record = replace(record, prompt=[], answers=[prompt + answers[0]])
    _check_answer(record.answers[0], kind)
    return [record]


def _check_marks(row: Row, kind: str) -> None:
    """Refuse a row whose own marks say that it counts otherwise than 1 in the loss."""
    # what stands beside a prompt is for the reward function, and a list beside messages has their marks
    marks = {} if kind in ("prompt", "scored") else row
    if first_key(row, FORMATS["messages"]):
        marks = {key: value for key, value in marks.items() if not isinstance(value, list)}
    if (weight := prod(weights_of(marks.items()))) != 1:
        if not weight:
            raise DropRowError("it is marked as not to be trained")
        raise BadRowError(
            f"has the weight {weight:g}, but only messages and sources have weights; to ignore it set columns = "
            '{unused = "its key"}'
        )


def _passed_over(row: Row, source: Source, kind: str, texts: list[str]) -> set[str]:
    """Return the columns that were not read because another one means the same, and that say something else."""
    columns = FORMATS["text"] if kind == "text" else (*PROMPT_COLUMNS, "system")
    read = {first_key(row, columns)}
    # what stands beside a prompt alone is for the reward function
    if kind not in ("text", "prompt"):
        columns += ANSWER_COLUMNS
        answers = _answer_values(row, kind)
        read |= {key for key, _ in answers}
        # messages may hold another answer already
        if len(answers) == 1 and first_key(row, FORMATS["messages"]):
            turns = _parse_answer(*answers[0], False)
            if turns and turns[-1].content not in texts:
                read -= {answers[0][0]}
        if len(answers) < 2:
            read.add(first_key(row, LABEL_KEYS))
    values_read = [source.system, *map(row.get, read), *texts]
    return {key for key in row.keys() & {*columns} - read if row[key] not in values_read}


def _check_answer(answer: Messages, kind: str) -> None:
    trained = [message for message in answer if message.role == "assistant"]
    if not trained:
        raise DropRowError("no assistant message")
    if any(message.is_empty for message in trained):
        raise DropRowError("empty answer")
    if kind != "sequence" and {role_of(answer, 0), role_of(answer, -1)} != {"assistant"}:
        raise DropRowError("an answer does not begin and end with an assistant message")
    weights = {message.weight for message in trained}
    if weights == {0} and kind not in ("sequence", "scored"):
        raise DropRowError("it is marked as not to be trained")
    if kind == "ranked" and weights != {1}:
        raise BadRowError("gives an answer a weight, but a reward model scores whole answers")


# ---------------------------------------------------------------------------------------------- prompts and answers


def _read(row: Row, row_format: str, kind: str) -> tuple[Messages, list[Messages]]:
    """Read the prompt and its answers."""
    prompt = PROMPTS[row_format](row)
    has_none = not prompt
    if row.get("system") and role_of(prompt, 0) != "system":
        prompt.insert(0, Message("system", string(row["system"], "system")))
    asks = any(message.role != "system" for message in prompt)
    # Columns beside a prompt are for the reward function. A preference row may have its prompt in its answers alone.
    has_answers = kind != "prompt" or not asks or row_format == "preference"
    values = _answer_values(row, kind) if has_answers else []
    may_hold_prompt = len(values) > 1 or not asks
    answers = [_parse_answer(key, value, may_hold_prompt) for key, value in values]
    ends_with_answer = role_of(prompt, -1) == "assistant"
    # answers to compare may stand beside their prompt, or beside their prompt and one of them
    ends = [answer[-1:] for answer in answers]
    if len(answers) > 1 and ends_with_answer and prompt[-1:] in ends:
        if kind == "sequence" and row_format == "messages" and prompt[-1:] == ends[0]:
            return [], [prompt]  # sft trains messages that end with the chosen answer
        prompt, ends_with_answer = prompt[:-1], False
    if row_format == "messages" and (not answers or (len(answers) == 1 and ends_with_answer)):
        # the messages hold their answer: all of them in sft, none in the rows of prompts, else the last one
        if kind == "sequence":
            return [], [prompt]
        begin = len(prompt) if kind == "prompt" else len(prompt) - 1
        return prompt[:begin], [prompt[begin:]]
    first_roles = {role_of(answer, 0) for answer in answers}
    holds_prompt = may_hold_prompt or any(prompt[-1] in answer for answer in answers)
    if holds_prompt and answers and not first_roles & {"", "assistant"}:
        return _inner_prompt(prompt, [key for key, _ in values], answers, row.get("system"))
    if has_none:
        raise _without(row, PROMPT_KEYS)
    if ends_with_answer and not prompt[-1].tool_calls and first_roles <= {"assistant"}:
        if row_format == "messages" and kind != "sequence":
            raise BadRowError("has messages that end with an answer besides those to compare")
        return _continued(prompt, answers, kind)
    return prompt, answers


def _answer_values(row: Row, kind: str) -> list[tuple[str, object]]:
    """Return the answers of a row with their keys: chosen and rejected, a ranked list, or a single one."""
    if PAIR_KEYS <= row.keys():
        return [("chosen", row["chosen"]), ("rejected", row["rejected"])]
    key = first_key(row, RANKED_KEYS)
    values = row.get(key)
    # a list at "output" may be one answer, written as messages
    if isinstance(values, list) and (
        key != "output" or all(isinstance(value, str) for value in values)
    ):
        if len(values) < 2 and kind != "scored":
            raise DropRowError("no answer is ranked above another")
        return [(key, value) for value in values]
    key = first_key(row, ANSWER_KEYS)
    return [(key, row[key])] if key else []


# --------------------------------------------------------------------------------- columns of prompts and of answers


def _conversation(row: Row) -> Messages:
    return parse_messages(_required(row, "messages")[0], row)


def _instruction(row: Row) -> Messages:
    """Read the prompt of an alpaca row."""
    asked = [string(row.get(name, ""), name) for name in ("instruction", "input")]
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise BadRowError("'history' must be a list of [user, assistant] pairs")
    turns = zip(cycle(("user", "assistant")), chain(*history))
    before = [Message(role, string(text, "history")) for role, text in turns]
    return before + _user("\n".join(filter(None, asked)))


def _prompt_column(row: Row) -> Messages:
    key = first_key(row, PROMPT_KEYS)
    value = row.get(key, [])
    if isinstance(value, list):
        return parse_messages(value)
    # the text may be a transcript with the assistant's turn opened at its end
    turns = parse_transcript(string(value, key)) or _user(value)
    if turns[-1].is_empty:
        del turns[-1]
    return turns


def _user(text: str) -> Messages:
    if not text.strip():
        raise DropRowError("empty prompt")
    return [Message("user", text)]


PROMPTS = {
    "messages": _conversation,
    "alpaca": _instruction,
    "preference": _prompt_column,
    "prompt_completion": _prompt_column,
}


def _parse_answer(key: str, value: object, may_hold_prompt: bool) -> Messages:
    """Read an answer; where it may hold its prompt, its text may be a transcript."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return parse_messages(value)
    text = string(value, key)
    turns = parse_transcript(text) if may_hold_prompt else []
    return turns or [Message("assistant", text)]


def _continued(
    prompt: Messages, answers: list[Messages], kind: str
) -> tuple[Messages, list[Messages]]:
    """Put the message that ends the prompt before each answer, as its beginning, which is not trained."""
    *prompt, opening = prompt
    opening = replace(opening, begun=len(opening.content))
    if kind == "prompt":
        return [*prompt, opening], answers
    for answer in answers:
        text, more = opening.content + answer[0].content, {**opening.more, **answer[0].more}
        answer[0] = replace(answer[0], content=text, more=more, begun=opening.begun)
    return prompt, answers


# ------------------------------------------------------------------------------------- several answers to one prompt


def _compared(record: Record, row: Row, kind: str) -> list[Record]:
    """Return records of what is compared of a row's answers: all of them, each pair, or labelled answers."""
    ranks = _ranks(row, len(record.answers))
    ranked = list(zip(ranks, record.answers))
    pairs = [[good, bad] for first, good in ranked for later, bad in ranked if first < later]
    if not pairs:
        raise DropRowError("no answer is ranked above another")
    if any(chosen == rejected for chosen, rejected in pairs):
        raise DropRowError("chosen and rejected are the same")
    if kind == "ranked":
        margin = number(row.get("margin", 0.0), "margin")
        return [replace(record, numbers={"margin": margin}, ranks=ranks)]
    if kind == "pair":
        return [replace(record, answers=pair) for pair in pairs]
    return [
        replace(record, answers=[answer], numbers={"label": label})
        for pair in pairs
        for answer, label in zip(pair, (1.0, 0.0))
    ]


def _inner_prompt(
    prompt: Messages, keys: list[str], conversations: list[Messages], default_system: object
) -> tuple[Messages, list[Messages]]:
    """Take the prompt out of whole conversations, which have it in common and end with their answers."""
    inner = conversations[0][:-1]
    for key, conversation in zip(keys, conversations):
        if role_of(conversation, -1) != "assistant":
            raise DropRowError(f"{key} does not end with an assistant message")
        if conversation[:-1] != inner:
            raise DropRowError("the prompts of chosen and rejected differ")
    if role_of(prompt, 0) == "system" and role_of(inner, 0) != "system":
        inner = prompt[:1] + inner
    texts = [default_system, *(message.content for message in inner)]
    if any(message.content not in texts for message in prompt):
        raise DropRowError("the prompt differs from the one inside chosen and rejected")
    return inner, [conversation[-1:] for conversation in conversations]


def _ranks(row: Row, count: int) -> list[int]:
    """Rank the answers, from 0, by the numbers that the row gives them; chosen is above rejected."""
    if PAIR_KEYS <= row.keys():
        return [0, 1]
    orders = set()
    for name, sign in RANKINGS.items():
        if isinstance(values := row.get(name), list) and len(values) == count:
            scores = [sign * number(value, name) for value in values]
            orders.add(tuple(sorted({*scores}, reverse=True).index(score) for score in scores))
    if len(orders) != 1:
        raise BadRowError(
            f"has {count} answers but not one order of them; give as many numbers in 'scores' (the best has the "
            "highest) or 'ranks' (the lowest)"
        )
    return [*orders.pop()]


def _required(row: Row, row_format: str) -> tuple[object, str]:
    """Return what the row has under a key of the format, and this key."""
    if key := first_key(row, FORMATS[row_format]):
        return row[key], key
    raise _without(row, FORMATS[row_format])


def _without(row: Row, keys: tuple[str, ...], meaning: str = "") -> BadRowError:
    return BadRowError(f"has no {' or '.join(map(repr, keys))}{meaning} (it has {_keys(row)})")


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row)))
