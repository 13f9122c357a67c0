"""Turn rows into records: a conversation, several answers to one prompt, a prompt alone, or a document.

The format of a row, which its keys tell, says how the prompt is written; how the answers are written follows from
their own keys.
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
    PAIR_KEYS,
    Message,
    Messages,
    Row,
    decoded,
    first_key,
    from_json,
    number,
    parse_messages,
    parse_tools,
    role_of,
    string,
    type_name,
    weights_of,
)
from ulysses.data.read.sources import ANSWER_KEYS, FORMATS, PROMPT_KEYS, Source

Event = tuple[str, str, str]  # what is counted: dropped or notes, what it is, and file and row
RANKED_KEYS = ("completions", "responses", "answers", "outputs", "output")
ALIASES = {"functions": "tools", "system_prompt": "system"}
ASKED = ("prompt", "scored")  # of a model that is not trained on it
LABEL_KEYS = ("label", "kto_tag")
OUR_LABELS = ("true", "false", "none")  # in sft, where another task may label the rows
LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
# columns that are not read, though they mean something elsewhere
UNREAD = re.compile(
    "context|documents?|margin|reasoning.*|think|thinking.*|thoughts?|cot|chain_of_thought|rationale|System|system_.*|"
    "apis?|api_.*|Tools|tool|toolset|tools?[_-].*|.*_tools|function|functions?[_-].*|.*_functions"
)
# what may be a row's prompt, in the order of FORMATS, or in rows that are answered its answer
ASKS = (*FORMATS["messages"], *FORMATS["alpaca"], *PROMPT_KEYS)
# or what messages may hold already
ANSWERS = (
    *ANSWER_KEYS,
    *RANKED_KEYS,
    *FORMATS["text"],
    *LABEL_KEYS,
    *FORMATS["messages"],
    "chosen",
    "system",
)
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD]")
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
# of the answers in such a list: the best has the highest number, or the lowest
RANKINGS = {"scores": 1, "rewards": 1, "ratings": 1, "ranks": -1}


@dataclass(frozen=True)
class Record:
    """One training example before tokenisation.

    Attributes:
        prompt: the messages before the answer; they are not trained.
        answers: one list of messages (sequence, unpaired), chosen and rejected (pair), several (ranked), or an empty
            list (prompt). Their assistant messages are trained.
        variables: of the chat template besides messages and tools, such as enable_thinking.
        ranks: of the answers; the best have 0.
        columns: numbers that go with the example, such as the margin of a pair.
        text: a document of stage pt, or a part of one.
        row: as it was read.
    """

    prompt: Messages
    answers: list[Messages]
    tools: Sequence[object] = ()
    columns: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    ranks: Sequence[int] = (0, 1)
    variables: Row = field(default_factory=dict)
    row: Row = field(default_factory=dict)


@contextmanager
def dropping(events: list[Event], bad_rows: str, where: str) -> Iterator[None]:
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


def read_row(
    found: object,
    source: Source,
    kind: str,
    note: Callable[[str], None],
    variables: Iterable[str] = (),
) -> list[Record]:
    """Read one row as records: several for ranked lists, and for unpaired answers from preference data.

    Args:
        found: the row, a line of JSON, or the error that was found in its place.
        kind: text, sequence, pair, ranked, unpaired or prompt: what the stage needs; scored takes any answers.
        note: is told what is to be counted.
        variables: of the chat template, which are no columns.

    Raises BadRowError: the row breaks its format. Raises DropRowError: it cannot be trained on.
    """
    row = _checked(found)
    given = _renamed(row, source)
    if kind == "sequence" and str(given.get("label")).lower() not in OUR_LABELS:
        del given["label"]
        note("'label' is neither true nor false, and was not read")
    only_alpaca = () if first_key(given, FORMATS["alpaca"]) else ("input", "history")
    unread = {name for name in given.keys() - ALIASES.keys() if UNREAD.fullmatch(name)}
    unread |= given.keys() & {*variables, *only_alpaca}
    records = _records(given, source, kind)
    for name in sorted(unread | _second(given, source, kind, records)):
        if given[name] not in ("", []):
            note(f"the column {name!r} was not read")
    if len(records) > 1:
        note("rows that gave several examples")
    return [replace(record, row=row) for record in records]


def _checked(found: object) -> Row:
    """Return the row that was found, which may be a line of JSON; BadRowError if it is none, or not all Unicode."""
    if isinstance(found, ValueError):
        raise found
    try:
        row = from_json(found.decode("utf-8-sig")) if isinstance(found, bytes) else found
        if row is found or ESCAPED_SURROGATE.search(found):
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
    """Return what the row has under our keys, without nulls; BadRowError if it lacks a key that `columns` names."""
    columns = source.columns
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    renamed |= {ours: _column(row, theirs) for ours, theirs in columns.items()}
    for theirs, ours in ALIASES.items():
        if renamed.get(ours) and renamed.get(theirs):
            raise BadRowError(
                f"has both {ours!r} and {theirs!r}, which mean the same; to ignore one set "
                f'columns = {{unused = "{theirs}"}}'
            )
        renamed[ours] = renamed.get(ours) or renamed.get(theirs)
    renamed["system"] = renamed["system"] or source.system
    if media := next((key for key in MEDIA_KEYS if renamed.get(key)), None):
        raise BadRowError(
            f"has the column {media!r}, but only text is supported; to train on the text alone set "
            f'columns = {{unused = "{media}"}}'
        )
    return {key: value for key, value in renamed.items() if value is not None}


def _column(row: Row, name: str) -> object:
    """Return what a row holds under a name; "a.b" is the key b of the object a, unless the row has it as it is."""
    value: object = row
    for key in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRowError(
                f"has no column {name!r}, which columns names (it has {_keys(row)})"
            )
        value = value[key]
    return value


def _records(row: dict[str, object], source: Source, kind: str) -> list[Record]:
    # lists are marks of messages, and what stands beside a prompt is the reward's own
    lists = list if first_key(row, FORMATS["messages"]) else ()
    own = (item for item in row.items() if kind not in ASKED and not isinstance(item[1], lists))
    if (weight := prod(weights_of(own))) != 1:
        if not weight:
            raise DropRowError("it is marked as not to be trained")
        raise BadRowError(
            f"has the weight {weight:g}, but only messages and sources have weights; to ignore it set columns = "
            '{unused = "its key"}'
        )
    if kind == "text":
        text = string(*_required(row, "text"))
        if not text.strip():
            raise DropRowError("empty text")
        return [Record([], [], text=text)]
    row_format: str = source.format
    if row_format == "auto":
        found = (name for name, keys in FORMATS.items() if first_key(row, keys))
        row_format = next(found, "text")
    if row_format == "sharegpt":  # messages tell themselves how they are written
        row_format = "messages"
    if row_format == "text":
        raise BadRowError(
            f"has the keys {_keys(row)}, which fit none of the formats {', '.join(FORMATS)} (but text, which holds "
            'plain text, which only stage pt trains on); map the keys with columns = {prompt = "their_name", ...}'
        )
    prompt, answers = _read(row, row_format, kind)
    problem = "'chat_template_kwargs' is not JSON of an object"
    own = decoded(row.get("chat_template_kwargs"), problem, Mapping | None) or {}
    variables = source.chat_template_kwargs | {k: v for k, v in own.items() if v is not None}
    record = Record(prompt, answers, parse_tools(row.get("tools")), variables=variables)
    if kind == "prompt":
        while role_of(prompt, -1) == "assistant" and not prompt[-1].begun:
            prompt = prompt[:-1]
        if role_of(prompt, -1) in ("", "system"):
            raise DropRowError("no user message to answer")
        return [replace(record, prompt=prompt, answers=[[]])]
    if kind == "scored" and answers:  # whatever is known of their order
        for answer in answers:
            _check_answer(answer, kind)
        return [record]
    if len(answers) > 1:
        if kind == "sequence":
            raise BadRowError(
                'holds chosen and rejected answers; to train on one set columns = {completion = "chosen"}'
            )
        for answer in answers:
            _check_answer(answer, kind)
        return [replace(record, **changes) for changes in _compared(row, kind, answers)]
    if kind in ("pair", "ranked"):
        raise BadRowError("has no chosen and rejected answers (nor a ranked list of answers)")
    key = first_key(row, LABEL_KEYS)
    label = LABELS.get(str(row.get(key)).lower())
    if label is None and (key or kind == "unpaired"):
        that = " that is true for a desirable answer and false for an undesirable one"
        raise _without(row, LABEL_KEYS, that)
    if not answers:
        raise _without(row, ANSWER_KEYS)
    if kind == "unpaired":
        _check_answer(answers[0], kind)
        return [replace(record, columns={"label": label})]
    if label == 0:
        raise DropRowError("its label is false")
    # the assistant's turns in the history of an alpaca row are training data too
    if row_format == "alpaca":
        record = replace(record, prompt=[], answers=[prompt + answers[0]])
    _check_answer(record.answers[0], kind)
    return [record]


def _second(row: Row, source: Source, kind: str, records: list[Record]) -> set[str]:
    """Return the columns that would be the prompt or the answer if others were not, and that say something else."""
    messages = chain.from_iterable(chain(each.prompt, *each.answers) for each in records)
    texts = [message.content for message in messages]
    columns = FORMATS["text"] if kind == "text" else (*ASKS, "system")
    read = {first_key(row, columns)}
    if kind not in ("text", "prompt"):  # what stands beside a prompt alone is the reward's
        columns += ANSWERS
        answers = _answer_values(row, kind)
        # messages may hold their answer already
        holds = len(answers) == 1 and first_key(row, FORMATS["messages"])
        read |= {
            key
            for key, value in answers
            if not holds or _parse_answer(key, value, False)[-1].content in texts
        }
        read |= {first_key(row, LABEL_KEYS)}
    said = [source.system, *map(row.get, read), *texts]
    return {key for key in row.keys() & {*columns} - read if row[key] not in said}


def _check_answer(answer: Messages, kind: str) -> None:
    trained = [message for message in answer if message.role == "assistant"]
    if not trained:
        raise DropRowError("no assistant message")
    if any(message.is_empty for message in trained):
        raise DropRowError("empty answer")
    if kind != "sequence" and {role_of(answer, 0), role_of(answer, -1)} != {"assistant"}:
        raise DropRowError("an answer does not begin and end with an assistant message")


# ---------------------------------------------------------------------------------------------- prompts and answers


def _read(row: Row, row_format: str, kind: str) -> tuple[Messages, list[Messages]]:
    """Read the prompt and its answers."""
    if row_format == "messages":
        prompt = parse_messages(_required(row, "messages")[0], row)
    else:
        prompt = PROMPTS[row_format](row)
    if row.get("system") and role_of(prompt, 0) != "system":
        prompt.insert(0, Message("system", string(row["system"], "system")))
    ends_with_answer = role_of(prompt, -1) == "assistant"
    asks = any(message.role != "system" for message in prompt)
    values: list[tuple[str, object]] = []
    # What else a prompt's row holds is for the reward function. The prompt of preference rows may be in their answers.
    if kind != "prompt" or not asks or row_format == "preference":
        values = _answer_values(row, kind)
    may_hold_prompt = len(values) > 1 or not asks
    answers = [_parse_answer(key, value, may_hold_prompt) for key, value in values]
    # messages beside a pair may be its prompt, or its prompt and the chosen answer
    if len(answers) > 1 and ends_with_answer and prompt[-1:] == answers[0][-1:]:
        if kind == "sequence":
            values = []
        else:
            prompt, ends_with_answer = prompt[:-1], False
    if row_format == "messages" and len(values) <= ends_with_answer:
        # they hold their answer: in sft all of them, in the rows of prompts none
        begin = {"sequence": 0, "prompt": len(prompt)}.get(kind, len(prompt) - 1)
        return prompt[:begin], [prompt[begin:]]
    first_roles = {role_of(answer, 0) for answer in answers}
    holds_prompt = may_hold_prompt or any(prompt[-1] in answer for answer in answers)
    if holds_prompt and answers and not first_roles & {"", "assistant"}:
        return _inner_prompt(prompt, [key for key, _ in values], answers)
    if not prompt:
        raise _without(row, PROMPT_KEYS)
    if ends_with_answer and not prompt[-1].tool_calls and first_roles <= {"assistant"}:
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


def _instruction(row: Row, between: str = "\n") -> Messages:
    """Read an alpaca row; as LLaMA-Factory v1 does, with nothing between instruction and input, without its history."""
    asked = [string(row.get(name, ""), name) for name in ("instruction", "input")]
    history = (between and row.get("history")) or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise BadRowError("'history' must be a list of [user, assistant] pairs")
    said = zip(cycle(("user", "assistant")), chain(*history))
    before = [Message(role, string(text, "history")) for role, text in said]
    return before + _user(between.join(filter(None, asked)))


def _given_prompt(row: Row) -> Messages:
    key = first_key(row, PROMPT_KEYS)
    value = row.get(key, [])
    if isinstance(value, list):
        return parse_messages(value)
    # the text may be a transcript with the assistant's turn opened at its end
    turns = _parse_transcript(string(value, key)) or _user(value)
    if turns[-1].is_empty:
        del turns[-1]
    return turns


def _user(text: str) -> Messages:
    if not text.strip():
        raise DropRowError("empty prompt")
    return [Message("user", text)]


PROMPTS = {
    "alpaca": _instruction,
    "alpaca_v1": partial(_instruction, between=""),
    "preference": _given_prompt,
    "prompt_completion": _given_prompt,
}


def _parse_answer(key: str, value: object, may_hold_prompt: bool) -> Messages:
    """Read an answer; one that may hold its prompt is also read as a transcript."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return parse_messages(value)
    text = string(value, key)
    turns = _parse_transcript(text) if may_hold_prompt else []
    return turns or [Message("assistant", text)]


def _continued(
    prompt: Messages, answers: list[Messages], kind: str
) -> tuple[Messages, list[Messages]]:
    """Let the answers continue the one that ends the prompt, which is their beginning and is not trained."""
    *prompt, begun = prompt
    begun = replace(begun, begun=len(begun.content))
    for answer in answers:
        text, more = begun.content + answer[0].content, {**begun.more, **answer[0].more}
        answer[0] = replace(answer[0], content=text, more=more, begun=begun.begun)
    return prompt + [begun] * (kind == "prompt"), answers


def _parse_transcript(text: str) -> Messages:
    """Split text as in hh-rlhf, "\\n\\nHuman: ...\\n\\nAssistant: ...", into messages; return [] for other text."""
    start, *turns = TRANSCRIPT_TURN.split(text)
    if start or "\n\nAssistant:" not in text:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], said.strip()) for who, said in zip(turns[::2], turns[1::2])]


# ------------------------------------------------------------------------------------- several answers to one prompt


def _compared(row: Row, kind: str, answers: list[Messages]) -> list[dict[str, object]]:
    """Return what is compared of a row's answers, as fields of its records: all of them, pairs or labelled answers."""
    ranks = _ranks(row, len(answers))
    ranked = list(zip(ranks, answers))
    pairs = [[good, bad] for first, good in ranked for later, bad in ranked if first < later]
    if not pairs:
        raise DropRowError("no answer is ranked above another")
    if any(chosen == rejected for chosen, rejected in pairs):
        raise DropRowError("chosen and rejected are the same")
    if kind == "ranked":
        margin = number(row.get("margin", 0.0), "margin")
        return [{"columns": {"margin": margin}, "ranks": ranks}]
    if kind == "pair":
        return [{"answers": pair} for pair in pairs]
    return [
        {"answers": [answer], "columns": {"label": label}}
        for pair in pairs
        for answer, label in zip(pair, (1.0, 0.0))
    ]


def _inner_prompt(
    prompt: Messages, keys: list[str], conversations: list[Messages]
) -> tuple[Messages, list[Messages]]:
    """Take the prompt out of whole conversations, which have it in common and end with their answers."""
    inner = conversations[0][:-1]
    for key, conversation in zip(keys, conversations):
        if role_of(conversation, -1) != "assistant":
            raise DropRowError(f"{key} does not end with an assistant message")
        if conversation[:-1] != inner:
            raise DropRowError("the prompts of chosen and rejected differ")
    said = [message.content for message in inner]
    system = [message for message in prompt if message.role == "system"]
    if any(m.content not in said and m not in system for m in prompt):
        raise DropRowError("the prompt differs from the one inside chosen and rejected")
    if role_of(inner, 0) != "system":
        inner = system + inner
    return inner, [conversation[-1:] for conversation in conversations]


def _ranks(row: Row, count: int) -> list[int]:
    """Rank the answers, from 0, by the numbers that the row gives them; chosen is above rejected."""
    if PAIR_KEYS <= row.keys():
        return [0, 1]
    orders = set()
    for name, sign in RANKINGS.items():
        if isinstance(given := row.get(name), list) and len(given) == count:
            scores = [sign * number(value, name) for value in given]
            orders.add(tuple(sorted({*scores}, reverse=True).index(score) for score in scores))
    if len(orders) != 1:
        raise BadRowError(
            f"has {count} answers but not one order of them; give as many numbers in 'scores' (the best has the "
            "highest) or 'ranks' (the lowest)"
        )
    return [*orders.pop()]


# ------------------------------------------------------------------------------------------------------ small checks


def _required(row: Row, row_format: str) -> tuple[object, str]:
    """Return what the row has under a key of its format, and that key."""
    if key := first_key(row, FORMATS[row_format]):
        return row[key], key
    raise _without(row, FORMATS[row_format])


def _without(row: Row, keys: tuple[str, ...], that: str = "") -> BadRowError:
    return BadRowError(f"has no {' or '.join(map(repr, keys))}{that} (it has {_keys(row)})")


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row)))
