"""Read messages as people write them: OpenAI and ShareGPT lists, tool calls, tools, and hh-rlhf transcripts."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
KNOWN_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *WEIGHT_KEYS}
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        weight: its weight in the loss; None: 1 for the assistant, 0 for everyone else.
        more: its other keys, such as reasoning_content, for templates that read them.
        begun: how many characters of the content the prompt already holds, as a beginning that the answer continues.
    """

    role: str
    content: str
    weight: float | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    begun: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.content[self.begun :].strip() and not self.tool_calls


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
    calls = [*(item.get("tool_calls") or []), *filter(None, [item.get("function_call")])]
    if isinstance(content, list):
        content = "".join(_content_part(part, where) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRowError(f"{where} has no text content (it is {type_name(content)})")
    if name == "function_call":
        found = _from_json(content, f"{where} should hold a tool call as JSON")
        calls, content = found if isinstance(found, list) else [found], ""
    key = first_key(item, WEIGHT_KEYS)
    weight = number(item[key], key) if key else None
    if weight and ROLES[name] != "assistant":
        raise BadRowError(
            f"{where} gives the weight {weight:g} to a {ROLES[name]} message; "
            "only assistant messages can be trained"
        )
    if weight and weight < 0:
        raise BadRowError(f"{where} has the negative weight {weight:g}")
    more = {k: v for k, v in item.items() if k not in KNOWN_KEYS and v is not None}
    calls = tuple(_call(call, where) for call in calls)
    return Message(ROLES[name], content, weight, calls, more)


def _content_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        part = {"type": type_name(part)}
    kind, text = part.get("type"), part.get("text", part.get("value"))
    if kind != "text" or not isinstance(text, str):
        raise BadRowError(f"{where} has content of the type {kind!r}; only text is supported")
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"{where} has a tool call without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # some data calls with free text; templates print it as a JSON string
        with suppress(ValueError):
            arguments = json.loads(arguments)
    named = {"id": call["id"]} if call.get("id") else {}
    function = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "function": function, **named}


def parse_tools(value: Any) -> list[Any]:
    """Read a row's tools: a list of descriptions or one of them, also as JSON text."""
    if isinstance(value, str):
        value = _from_json(value.strip() or "null", "'tools' is not valid JSON")
    tools = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("'tools' must be a list of tool descriptions")
    return [t if "function" in t else {"type": "function", "function": t} for t in tools]


def parse_transcript(text: str) -> Messages:
    """Split text as in hh-rlhf, "\\n\\nHuman: ...\\n\\nAssistant: ...", into messages; return [] for other text."""
    start, *turns = TRANSCRIPT_TURN.split(text)
    if start or "\n\nAssistant:" not in text:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], said.strip()) for who, said in zip(turns[::2], turns[1::2])]


# ------------------------------------------------------------------------------------------------------ small checks


def first_key(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the first of `keys` that the row has a value for; "" if there is none."""
    for key in keys:
        if row.get(key) is not None:
            return key
    return ""


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} is {type_name(value)}, not a string")
    return value


def number(value: Any, name: str) -> float:
    with suppress(OverflowError):  # of a long integer
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    raise BadRowError(f"{name!r} is {str(value)[:40]}, not a finite number")


def type_name(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def _from_json(text: Any, problem: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise BadRowError(f"{problem}: {error}") from None
