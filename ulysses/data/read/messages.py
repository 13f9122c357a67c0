"""Read messages as people write them: OpenAI and ShareGPT lists, transcripts, tool calls and tools."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from types import UnionType
from typing import Any

from ulysses.data import BadRowError

ROLES = {
    name: role
    for role, names in {
        "system": "system developer",
        "user": "user human",
        "assistant": "assistant gpt model bot chatgpt function_call",
        "tool": "tool observation function function_response ipython",
    }.items()
    for name in names.split()
}
# Marks of how much a message counts in the loss. A message has them, or its row has a list of them. Several are
# multiplied, so that a message which one of them marks with 0 or false is not trained.
WEIGHT_KEYS = (
    "loss_weight", "weight", "train", "loss", "loss_mask", "loss_masks", "loss_weights", "training", "trainable",
    "train_turn", "train_on_turn",
)  # fmt: skip
THINKING_PARTS = ("reasoning", "thinking")  # types of parts of a content
THINKING_KEYS = ("reasoning_content", *THINKING_PARTS)  # of a message, besides its content
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
LARGEST = 1e30  # a number of a row with which float32 can still count
MOST_WEIGHT = 1e6
KNOWN_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *WEIGHT_KEYS}
# names of other columns that may tell which messages are trained
MARKS = re.compile("mask|train|loss|learn|label", re.IGNORECASE)
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
# messages that a file holds as text, as JSON or as Python prints them
WRITTEN_MESSAGES = re.compile(
    r"""(?s)\s*\[\s*\{.*?["'](role|from)["']\s*:\s*["'](system|user|human|assistant|gpt)["']"""
)
PAIR_KEYS = {"chosen", "rejected"}
CALL_KEYS = {"name", "arguments", "id", "type", "index", "function"}
# other names of a call's arguments
OTHER_ARGUMENTS = re.compile(
    "(.*_)?(kw)?(args?|arguments?|params?|parameters?|inputs?)(_.*)?", re.IGNORECASE
)
Row = Mapping[str, object]  # a row, or another object of JSON


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        weight: how much an assistant's message counts in the loss; messages of other roles are not trained.
        tool_calls: in OpenAI's form, with Arguments.
        more: its other keys, such as reasoning_content, for templates that read them.
        begun: how many characters of the content stand in the prompt already, as the beginning of the answer.
    """

    role: str
    content: str
    weight: float = 1.0
    tool_calls: tuple[dict[str, object], ...] = ()
    more: Row = field(default_factory=dict)
    begun: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.content[self.begun :].strip() and not self.tool_calls


class Arguments(dict[str, object]):
    """The arguments of a call: an object, which is its JSON text where a template prints it or joins it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


Messages = list[Message]


def parse_messages(value: object, row: Mapping[str, object] = {}) -> Messages:
    """Read a list of OpenAI (role, content) or ShareGPT (from, value) messages, in any mixture.

    Args:
        row: the row of the messages, which may have lists of marks under WEIGHT_KEYS, with a mark for each message.
    """
    value = decoded(value, "messages are no list", list)
    lists = [(key, row[key]) for key in WEIGHT_KEYS if isinstance(row.get(key), list)]
    if wrong := [key for key, marks in lists if len(marks) != len(value)]:
        raise BadRowError(
            f"has {len(value)} messages but another number of marks in {wrong[0]!r}"
        )
    for key in {key for key in row if MARKS.search(key)} - {*WEIGHT_KEYS}:
        marks = row[key]
        is_list = isinstance(marks, list) and len(marks) == len(value)
        if is_list and all(mark in (0, 1, None) for mark in marks):
            raise BadRowError(
                f"has a mark for each message in {key!r}, which is not known here; to read it set columns = "
                f'{{loss_mask = "{key}"}}, to ignore it {{unused = "{key}"}}'
            )
    return [
        _message(item, [(key, marks[i]) for key, marks in lists], f"message {i + 1}")
        for i, item in enumerate(value)
    ]


def parse_transcript(text: str) -> Messages:
    """Split a text as in hh-rlhf, "\\n\\nHuman: ...\\n\\nAssistant: ...", into messages; return [] for other text."""
    start, *turns = TRANSCRIPT_TURN.split(text)
    if start or "\n\nAssistant:" not in text:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], words.strip()) for who, words in zip(turns[::2], turns[1::2])]


def _message(item: object, marks: Iterable[tuple[str, object]], where: str) -> Message:
    if not isinstance(item, Mapping):
        raise BadRowError(f"{where} is {type_name(item)}, not an object with role and content")
    for keys in (("role", "from"), ("content", "value")):
        values = [*map(item.get, keys)]
        if all(values) and len({ROLES.get(str(value), str(value)) for value in values}) > 1:
            raise BadRowError(
                f"{where} has {keys[0]!r} and {keys[1]!r}, which mean the same, with different values; remove one"
            )
    name = item.get(first_key(item, ("role", "from")))
    if str(name) not in ROLES:
        raise BadRowError(
            f"{where} has the role {name!r} (its keys are {', '.join(map(str, item))}); known roles are "
            f"{', '.join(ROLES)}"
        )
    content = item.get(first_key(item, ("content", "value")))
    tool_calls = decoded(item.get("tool_calls"), f"{where} has tool_calls that are not JSON")
    function_call = item.get("function_call")
    if sum(map(bool, (tool_calls, function_call, name == "function_call"))) > 1:
        raise BadRowError(
            f"{where} has calls in two places, tool_calls and function_call; remove one"
        )
    calls = [call for call in (*as_list(tool_calls), function_call) if call]
    more = {k: v for k, v in item.items() if k not in KNOWN_KEYS and v is not None}
    if isinstance(content, list):
        parts = [_content_part(part, where) for part in content]
        content = "".join(text for is_text, text in parts if is_text)
        thinking = [text for is_text, text in parts if not is_text]
        thinks_first = parts == sorted(parts, key=itemgetter(0))
        has_key = bool(more.keys() & {*THINKING_KEYS})
        if thinking and (ROLES[name] != "assistant" or not thinks_first or has_key):
            raise BadRowError(
                f"{where} has thinking in its content; only an assistant's can have it, before all text, and not "
                "in a key of its own besides"
            )
        if thinking:
            more["reasoning_content"] = "".join(thinking)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRowError(f"{where} has no text content (it is {type_name(content)})")
    if name == "function_call":
        calls = as_list(decoded(content, f"{where} should hold a tool call as JSON"))
        content = ""
    weights = weights_of((*item.items(), *marks))
    weight, role = math.prod(weights), ROLES[name]
    if weights and weight and role != "assistant":
        raise BadRowError(
            f"{where} gives the weight {weight:g} to a {role} message; only assistant messages can be trained"
        )
    if weight and not 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT:
        raise BadRowError(
            f"{where} has the weight {weight:g}; give 0, or one from {1 / MOST_WEIGHT:g} to {MOST_WEIGHT:g}"
        )
    if calls and role != "assistant":
        raise BadRowError(
            f"{where} has calls in a {role} message; only an assistant's can have them"
        )
    calls = tuple(_call(call, where) for call in calls)
    return Message(role, content, weight, calls, more)


def _content_part(part: object, where: str) -> tuple[bool, str]:
    """Return whether a part is text and not thinking, and what it says."""
    if isinstance(part, str):
        return True, part
    fields = part if isinstance(part, Mapping) else {"type": type_name(part)}
    part_type = fields.get("type")
    text = fields.get(first_key(fields, ("text", "value", *THINKING_PARTS)))
    if isinstance(text, list):
        text = "".join(_content_part(each, where)[1] for each in text)
    if part_type not in ("text", *THINKING_PARTS) or not isinstance(text, str):
        raise BadRowError(
            f"{where} has content of the type {part_type!r}; only text is supported"
        )
    return part_type == "text", text


def _call(call: Any, where: str) -> dict[str, object]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"{where} has a tool call without a name")
    fields = {key: value for key, value in {**call, **function}.items() if value is not None}
    unread = sorted(fields.keys() - CALL_KEYS)
    if "arguments" in fields:
        unread = [key for key in unread if fields[key] and OTHER_ARGUMENTS.fullmatch(key)]
    if unread:
        raise BadRowError(
            f"{where} has a tool call with the key {unread[0]!r}, which is not read; its arguments stand in 'arguments'"
        )
    problem = f"{where} has a tool call whose arguments are not JSON of an object"
    inner, outer = (
        decoded(part.get("arguments"), problem, Mapping | None) or {}
        for part in (function, call)
    )
    if inner and outer and inner != outer:
        raise BadRowError(
            f"{where} has a tool call with 'arguments' in its function and others beside it; remove one"
        )
    identity = {"id": call["id"]} if call.get("id") else {}
    function = {"name": function["name"], "arguments": Arguments(inner or outer)}
    return {"type": "function", "function": function, **identity}


def parse_tools(value: object) -> list[Row]:
    """Read a row's tools: a list of descriptions or one of them, also as JSON text."""
    problem = "'tools' must be a list of tool descriptions"
    tools = [decoded(tool, problem, Mapping) for tool in as_list(decoded(value, problem) or [])]
    tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    tools = [{**t, "function": decoded(t["function"], problem, Mapping)} for t in tools]
    if not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise BadRowError("has a tool without a name in 'tools'")
    return tools


# ------------------------------------------------------------------------------------------------------ small checks


def role_of(messages: Messages, index: int) -> str:
    """Return the role of a message; "" if there are none."""
    return messages[index].role if messages else ""


def first_key(row: Row, keys: tuple[str, ...]) -> str:
    """Return the first of `keys` with a value in the row, else the first with an empty value; "" if there is none."""
    present = [key for key in keys if row.get(key) is not None]
    filled = [key for key in present if row[key] not in ("", [])]
    return (*filled, *present, "")[0]


def weights_of(pairs: Iterable[tuple[str, object]]) -> list[float]:
    """Return the marks of how much something counts in the loss, among pairs of a key and a value."""
    return [
        number(value, key)
        for key, value in pairs
        if key in WEIGHT_KEYS and value not in (None, "")
    ]


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and a single value as a list."""
    return value if isinstance(value, list) else [value]


def string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} is {type_name(value)}, not a string")
    return value


def number(value: object, name: str) -> float:
    """Return a number, or 1 or 0 for true or false, any of which is text in CSV; BadRowError for other values."""
    # OverflowError is a long integer's, ValueError that of a text which is no number
    with suppress(OverflowError, ValueError):
        parsed = from_json(value.strip().lower()) if isinstance(value, str) else value
        if isinstance(parsed, int | float) and abs(parsed) <= LARGEST:
            return float(parsed)
    raise BadRowError(f"{name!r} is {value!r:.40}, not a finite number up to {LARGEST:g}")


def type_name(value: object) -> str:
    return "missing" if value is None else type(value).__name__


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON; ValueError if a key stands in it twice, for only the last value would be kept."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"an object has the key {max(names, key=names.count)!r} twice")
    return dict(pairs)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


from_json = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite
).decode


def decoded(value: object, problem: str, types: type | UnionType = object) -> Any:
    """Return a value that may be written as JSON text, once or several times over; BadRowError if it is no JSON.

    Args:
        problem: the beginning of the refusal.
        types: the types that the value may have.
    """
    try:
        while isinstance(value, str):
            value = from_json(value.strip() or "null")
            json.dumps(value, ensure_ascii=False).encode()  # an unpaired surrogate is no text
    except ValueError as error:
        raise BadRowError(f"{problem}: {error}") from None
    if not isinstance(value, types):
        raise BadRowError(f"{problem} but {type_name(value)}")
    return value
