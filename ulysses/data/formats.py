"""Rows as people write them -> records: messages, ShareGPT, Alpaca, prompt/completion, preference, KTO, text, prompts.

`detect_format` names the format of a row from its keys; `parse_row` turns the row into records of the wanted kind.
Nothing here reads files. BadRowError says that a row breaks its format, DropRowError that it cannot be trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ulysses.data.messages import (
    ROLES,
    is_transcript,
    number,
    parse_messages,
    parse_tools,
    parse_transcript,
    string,
    type_name,
)
from ulysses.data.records import BadRowError, DropRowError, Message, Record

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference", "text")
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "question", "query")
ANSWER_KEYS = ("completion", "response", "answer", "output")
RANKED_KEYS = ("completions", "responses", "answers", "outputs")
LABEL_KEYS = ("label", "kto_tag")


@dataclass
class ParsedRow:
    """A row before its kind is chosen: what comes first, and the answers it carries."""

    prompt: list[Message] = field(default_factory=list)
    answer: list[Message] | None = None  # one answer, or a whole conversation when prompt is empty
    pairs: list[tuple[list[Message], list[Message]]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    label: bool | None = None
    trains_history: bool = False  # the assistant's turns inside `prompt` are training data too
    columns: dict[str, float] = field(default_factory=dict)


def detect_format(row: Mapping[str, Any]) -> str:
    """Name the format of a row from its keys; BadRowError lists the keys when none fits."""
    if first_key(row, CONVERSATION_KEYS):
        return "messages"
    if "instruction" in row:
        return "alpaca"
    if "chosen" in row and "rejected" in row:
        return "preference"
    if first_key(row, PROMPT_KEYS):
        return "prompt_completion"
    if _whole_conversation(row):
        return "prompt_completion"
    if "text" in row:
        return "text"
    raise BadRowError(
        f"has the keys {sorted(map(str, row))}, which fit no known format ({', '.join(FORMATS)}); "
        'name the format, or map the keys with columns = {prompt = "their_name", ...}'
    )


def parse_row(
    row: Mapping[str, Any], row_format: str, kind: str, file: str, number: int
) -> list[Record]:
    """Turn one row into records of `kind` (several for ranked lists and for unpaired preference data)."""
    row = {
        key: value for key, value in row.items() if value is not None
    }  # parquet fills absent keys with None
    if kind == "text":
        return [Record(file, number, text=_text(row))]
    if row_format == "text":
        raise BadRowError(
            f"holds plain text, which only stage pt trains on; this stage needs {_NEEDS[kind]}"
        )
    parsed = _parse(row, row_format, kind)
    return [
        Record(
            file, number, tuple(prompt), tuple(map(tuple, answers)), parsed.tools, columns=columns
        )
        for prompt, answers, columns in _ASSEMBLE[kind](parsed)
    ]


# ---------------------------------------------------------------------------------------------- rows -> ParsedRow


def _parse(row: Mapping[str, Any], row_format: str, kind: str) -> ParsedRow:
    parsed = ParsedRow(
        tools=parse_tools(row.get("tools")),
        label=_label(row) if kind in ("sequence", "unpaired") else None,
    )
    if row_format in ("messages", "sharegpt"):
        conversation = parse_messages(row[_required(row, CONVERSATION_KEYS)])
        unanswered = not conversation or conversation[-1].role != "assistant"
        if "chosen" in row or _ranked_key(row) or (unanswered and first_key(row, ANSWER_KEYS)):
            parsed.prompt = conversation
        else:
            parsed.answer = conversation
    elif row_format == "alpaca":
        parsed.prompt, parsed.trains_history = _alpaca_prompt(row), True
    elif row_format in ("prompt_completion", "preference"):
        key, whole = first_key(row, PROMPT_KEYS), _whole_conversation(row)
        if key is None and row_format == "prompt_completion" and not whole:
            raise BadRowError(f"has no {_either(PROMPT_KEYS)} (it has {sorted(map(str, row))})")
        if key:
            parsed.prompt = _prompt(row, key)
        elif row_format == "prompt_completion":
            parsed.prompt, parsed.answer = whole[:-1], whole[-1:]
    else:
        raise BadRowError(f"cannot be read as {row_format!r}; formats are {', '.join(FORMATS)}")
    system = row.get("system")
    if system and not (parsed.prompt or parsed.answer or [Message("", "")])[0].role == "system":
        message = Message("system", string(system, "system"))
        if parsed.prompt or not parsed.answer:
            parsed.prompt.insert(0, message)
        else:
            parsed.answer.insert(0, message)
    if (
        kind != "prompt" or row_format == "preference"
    ):  # what stands beside a prompt is the reward function's, of any type
        _parse_answers(row, parsed)
    if row_format == "preference" and not parsed.pairs:
        raise BadRowError("is read as preference data but has no chosen and rejected")
    if kind == "pair" and row.get("margin") is not None:
        parsed.columns["margin"] = number(row["margin"], "margin")
    return parsed


def _parse_answers(row: Mapping[str, Any], parsed: ParsedRow) -> None:
    ranked = _ranked_key(row)
    if "chosen" in row or ("rejected" in row and not first_key(row, ANSWER_KEYS)):
        for key in ("chosen", "rejected"):
            _required(row, (key,))
        _parse_preference(row, parsed)
    elif ranked:
        parsed.pairs = _ranked_pairs(row, ranked)
    elif parsed.answer is None:
        name = first_key(row, ANSWER_KEYS)
        if name is not None:
            parsed.answer = _answer(row[name], name)


def _parse_preference(row: Mapping[str, Any], parsed: ParsedRow) -> None:
    chosen, rejected = row["chosen"], row["rejected"]
    if (
        isinstance(chosen, str)
        and isinstance(rejected, str)
        and not parsed.prompt
        and is_transcript(chosen)
    ):
        _split_common_prompt(parse_transcript(chosen), parse_transcript(rejected), parsed)
    elif _is_conversation(chosen) and _is_conversation(rejected):
        given = parsed.prompt
        _split_common_prompt(parse_messages(chosen), parse_messages(rejected), parsed)
        texts = [m.content for m in parsed.prompt if m.role != "system"]
        if given and [m.content for m in given if m.role != "system"] not in (texts, texts[:1]):
            raise DropRowError("the prompt differs from the one inside chosen and rejected")
        if given and given[0].role == "system" and parsed.prompt[0].role != "system":
            parsed.prompt.insert(0, given[0])
    else:
        if not parsed.prompt:
            raise BadRowError(
                "has chosen and rejected but no prompt (nor whole conversations or transcripts in them)"
            )
        parsed.pairs = [
            (_answer(good, "chosen"), _answer(bad, "rejected"))
            for good in _alternatives(chosen)
            for bad in _alternatives(rejected)
        ]


def _split_common_prompt(chosen: list[Message], rejected: list[Message], parsed: ParsedRow) -> None:
    """Both hold whole conversations: the prompt is everything before the last assistant turn, equal in both."""
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not messages or messages[-1].role != "assistant":
            raise DropRowError(f"{name} does not end with an assistant message")
    if chosen[:-1] != rejected[:-1]:
        raise DropRowError("the prompts of chosen and rejected differ")
    parsed.prompt = chosen[:-1]
    parsed.pairs = [(chosen[-1:], rejected[-1:])]


def _ranked_pairs(row: Mapping[str, Any], key: str) -> list[tuple[list[Message], list[Message]]]:
    """All pairs of a list, best first or by `scores` (higher wins) or `ranks` (lower wins); ties make none."""
    answers = [_answer(value, key) for value in row[key]]
    scores = [-float(i) for i in range(len(answers))]
    for name, sign in (("scores", 1.0), ("ranks", -1.0)):
        if row.get(name) is not None:
            if not isinstance(row[name], list) or len(row[name]) != len(answers):
                raise BadRowError(
                    f"has {len(answers)} {key} but its {name!r} is not a list of as many numbers"
                )
            scores = [sign * number(value, name) for value in row[name]]
    everyone = range(len(answers))
    pairs = [(answers[i], answers[j]) for i in everyone for j in everyone if scores[i] > scores[j]]
    if not pairs:
        raise DropRowError("no answer is ranked above another")
    return pairs


def _ranked_key(row: Mapping[str, Any]) -> str | None:
    key = first_key(row, (*RANKED_KEYS, "output"))
    if key is None or not isinstance(row[key], list):
        return None
    if key == "output" and not all(isinstance(answer, str) for answer in row[key]):
        return None  # one answer given as messages
    return key


def _alpaca_prompt(row: Mapping[str, Any]) -> list[Message]:
    parts = [string(row.get(key), key) for key in ("instruction", "input") if row.get(key)]
    if "instruction" not in row:
        raise BadRowError(f"has no 'instruction' (it has {sorted(map(str, row))})")
    if not "".join(parts).strip():
        raise DropRowError("empty prompt")
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRowError(
            f"'history' is {type(history).__name__}, not a list of [user, assistant] pairs"
        )
    for turn in history:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadRowError("'history' must be a list of [user, assistant] pairs")
        messages += [
            Message("user", string(turn[0], "history")),
            Message("assistant", string(turn[1], "history")),
        ]
    return [*messages, Message("user", "\n".join(parts))]


def _prompt(row: Mapping[str, Any], key: str) -> list[Message]:
    value = row[key]
    if isinstance(value, list):
        return parse_messages(value)
    text = string(value, key)
    if not text.strip():
        raise DropRowError("empty prompt")
    if is_transcript(text):
        turns = parse_transcript(text)
        return turns[:-1] if turns[-1].role == "assistant" and turns[-1].is_empty else turns
    return [Message("user", text)]


def _answer(value: Any, key: str) -> list[Message]:
    if isinstance(value, str):
        return [Message("assistant", string(value, key))]
    if isinstance(value, Mapping):
        return parse_messages([value])
    if isinstance(value, list):
        return parse_messages(value)
    raise BadRowError(f"{key!r} is {type_name(value)}, not a string or messages")


def _is_conversation(value: Any) -> bool:
    """A list of messages that begins before the answer: with a system or user message."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return False
    return ROLES.get(value[0].get("role", value[0].get("from"))) != "assistant"


def _whole_conversation(row: Mapping[str, Any]) -> list[Message]:
    """Messages of an answer that begins before it (as in `chosen` without a prompt), where the row has no prompt; else []."""
    key = first_key(row, ANSWER_KEYS)
    if key is None or first_key(row, PROMPT_KEYS):
        return []
    if isinstance(row[key], str):
        return parse_transcript(row[key]) if is_transcript(row[key]) else []
    return parse_messages(row[key]) if _is_conversation(row[key]) else []


def _alternatives(value: Any) -> list[Any]:
    return (
        value
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value)
        else [value]
    )


# ------------------------------------------------------------------------------------------ ParsedRow -> records

_Assembled = list[
    tuple[list[Message], list[list[Message]], dict[str, float]]
]  # prompt, answers, columns


def _assemble_sequence(parsed: ParsedRow) -> _Assembled:
    if parsed.pairs:
        raise BadRowError(
            'holds chosen and rejected answers; to train on one set columns = {completion = "chosen"}'
        )
    if parsed.label is False:
        raise DropRowError("its label is false")
    answer = _one_answer(parsed)
    if not any(m.role == "assistant" for m in answer):
        raise DropRowError("no assistant message")
    if any(m.role == "assistant" and m.is_empty for m in answer):
        raise DropRowError("empty answer")
    return (
        [([], [parsed.prompt + answer], {})]
        if parsed.trains_history
        else [(parsed.prompt, [answer], {})]
    )


def _assemble_pair(parsed: ParsedRow) -> _Assembled:
    if not parsed.pairs:
        raise BadRowError("has no chosen and rejected answers (nor a ranked list of answers)")
    records: _Assembled = []
    for chosen, rejected in parsed.pairs:
        for name, messages in (("chosen", chosen), ("rejected", rejected)):
            _check_completion(messages, name)
        if chosen == rejected:
            raise DropRowError("chosen and rejected are the same")
        records.append((parsed.prompt, [chosen, rejected], {"margin": 0.0} | parsed.columns))
    return records


def _assemble_unpaired(parsed: ParsedRow) -> _Assembled:
    if parsed.pairs:
        pairs = _assemble_pair(parsed)
        return [
            (prompt, [answer], {"label": label})
            for prompt, answers, _ in pairs
            for answer, label in zip(answers, (1.0, 0.0))
        ]
    if parsed.label is None:
        raise BadRowError(
            f"has no {_either(LABEL_KEYS)}: true for a desirable answer, false for an undesirable one"
        )
    answer = _one_answer(parsed)
    prompt = parsed.prompt
    if not prompt:
        prompt, answer = answer[:-1], answer[-1:]
    _check_completion(answer, "the conversation")
    return [(prompt, [answer], {"label": float(parsed.label)})]


def _assemble_prompt(parsed: ParsedRow) -> _Assembled:
    prompt = parsed.prompt or list(parsed.answer or [])
    while prompt and prompt[-1].role == "assistant":
        prompt = prompt[:-1]
    if not prompt or prompt[-1].role == "system":
        raise DropRowError("no user message to answer")
    return [(prompt, [], {})]


_ASSEMBLE = {
    "sequence": _assemble_sequence,
    "pair": _assemble_pair,
    "unpaired": _assemble_unpaired,
    "prompt": _assemble_prompt,
}
_NEEDS = {
    "sequence": "messages, instruction/output or prompt/completion",
    "pair": "chosen and rejected answers",
    "unpaired": "answers with a label",
    "prompt": "prompts",
}


def _one_answer(parsed: ParsedRow) -> list[Message]:
    if parsed.answer is None:
        raise BadRowError(f"has no answer: none of {', '.join(ANSWER_KEYS)}")
    return parsed.answer


def _check_completion(messages: list[Message], name: str) -> None:
    if not messages or messages[-1].role != "assistant":
        raise DropRowError(f"{name} does not end with an assistant message")
    if messages[0].role != "assistant":
        raise BadRowError(f"{name} must begin with an assistant message, not {messages[0].role}")
    if messages[-1].is_empty:
        raise DropRowError("empty answer")


# ------------------------------------------------------------------------------------------------- small checks


def first_key(row: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    """The first of `keys` that the row has with a value."""
    return next((key for key in keys if row.get(key) is not None), None)


def _required(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    key = first_key(row, keys)
    if key is None:
        raise BadRowError(f"has no {_either(keys)} (it has {sorted(map(str, row))})")
    return key


def _either(keys: tuple[str, ...]) -> str:
    return " or ".join(map(repr, keys))


def _text(row: Mapping[str, Any]) -> str:
    key = _required(row, ("text", "content"))
    text = string(row[key], key)
    if not text.strip():
        raise DropRowError("empty text")
    return text


def _label(row: Mapping[str, Any]) -> bool | None:
    key = first_key(row, LABEL_KEYS)
    if key is None:
        return None
    value = row[key]
    named = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str) and value.strip().lower() in named:
        return named[value.strip().lower()]
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise BadRowError(f"{key!r} is {value!r}, not true or false")
