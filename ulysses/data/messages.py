"""Read messages as people write them: OpenAI and ShareGPT lists, tool calls, tools, and hh-rlhf transcripts."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
WEIGHT_KEYS = ("loss_weight", "weight", "train", "loss")
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


@dataclass(frozen=True)
class Message:
    """One turn; `weight` is its weight in the loss (None: 1 for the assistant, 0 for everyone else)."""

    role: str  # system, user, assistant or tool
    content: str
    weight: float | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.content.strip() and not self.tool_calls


Messages = list[Message]


def parse_messages(value: Any) -> Messages:
    """Read a list of OpenAI (role, content) or ShareGPT (from, value) messages, in any mixture."""
    if not isinstance(value, list):
        raise BadRowError(f"messages are {type_name(value)}, not a list")
    return [_message(item, f"message {place}") for place, item in enumerate(value, 1)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise BadRowError(f"{where} is {type_name(item)}, not an object with role and content")
    name = item.get("role", item.get("from"))
    if name not in ROLES:
        raise BadRowError(f"{where} has the role {name!r}; known roles are {', '.join(ROLES)}")
    content = item.get("content", item.get("value"))
    calls = list(item.get("tool_calls") or [])
    if isinstance(content, list):
        content, more = _content_parts(content, where)
        calls += more
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRowError(f"{where} has no text content (it is {type_name(content)})")
    if name == "function_call":
        calls, content = _json_calls(content, where), ""
    _check_unicode(content, where)
    weight = None
    for key in WEIGHT_KEYS:
        if (given := item.get(key)) is not None:
            weight = number(int(given) if isinstance(given, bool) else given, key)
    if weight and ROLES[name] != "assistant":
        raise BadRowError(
            f"{where} gives the weight {weight:g} to a {ROLES[name]} message; "
            "only assistant messages can be trained"
        )
    if weight is not None and weight < 0:
        raise BadRowError(f"{where} has the negative weight {weight:g}")
    return Message(ROLES[name], content, weight, tuple(_call(call, where) for call in calls))


def _content_parts(parts: list[Any], where: str) -> tuple[str, list[Any]]:
    texts, calls = [], []
    for part in parts:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        value = part.get("text", part.get("value")) if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(value, str):
            texts.append(value)
        elif kind in ("tool_call", "tool_calls") and isinstance(value, str):
            calls += _json_calls(value, where)
        else:
            raise BadRowError(f"{where} has content of the type {kind!r}; only text is supported")
    return "".join(texts), calls


def _json_calls(text: str, where: str) -> list[Any]:
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise BadRowError(f"{where} should hold a tool call as JSON: {error}") from None
    return calls if isinstance(calls, list) else [calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"{where} has a tool call without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # some data calls with free text; templates print it as a JSON string
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parse_tools(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadRowError(f"'tools' is not valid JSON: {error}") from None
    tools = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("'tools' must be a list of tool descriptions")
    return [
        dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in tools
    ]


def is_transcript(text: str) -> bool:
    """True for text as in hh-rlhf, whose turns begin with "\\n\\nHuman:" and "\\n\\nAssistant:"."""
    return TRANSCRIPT_TURN.match(text) is not None and "\n\nAssistant:" in text


def parse_transcript(text: str) -> Messages:
    """Split "\\n\\nHuman: ...\\n\\nAssistant: ..." into messages."""
    start, *turns = TRANSCRIPT_TURN.split(text)
    if start.strip():
        raise BadRowError("a transcript must begin with Human: or Assistant:")
    _check_unicode(text, "the transcript")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], said.strip()) for who, said in zip(turns[::2], turns[1::2])]


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} is {type_name(value)}, not a string")
    _check_unicode(value, repr(name))
    return value


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise BadRowError(f"{name!r} is {value!r}, not a number")
    return float(value)


def type_name(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(
            f"{name} holds an unpaired surrogate, which is not valid Unicode"
        ) from None
