"""Messages as people write them: OpenAI and ShareGPT lists, tool calls and tool schemas, hh-rlhf transcripts."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ulysses.data.records import BadRowError, Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
WEIGHT_KEYS = ("loss_weight", "weight", "train", "loss")
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def parse_messages(value: Any) -> list[Message]:
    """Read OpenAI (role, content) or ShareGPT (from, value) messages, in any mixture."""
    if not isinstance(value, list):
        raise BadRowError(f"messages are {type_name(value)}, not a list")
    return [_message(item, index) for index, item in enumerate(value)]


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, Mapping):
        raise BadRowError(
            f"message {index + 1} is {type_name(item)}, not an object with role and content"
        )
    name = item.get("role", item.get("from"))
    if name not in ROLES:
        raise BadRowError(
            f"message {index + 1} has the role {name!r}; known roles are {', '.join(ROLES)}"
        )
    role = ROLES[name]
    content = item.get("content", item.get("value"))
    calls = list(item.get("tool_calls") or [])
    if isinstance(content, list):
        content, more = _content_parts(content, index)
        calls += more
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRowError(f"message {index + 1} has no text content (it is {type_name(content)})")
    if name == "function_call":
        calls, content = _json_calls(content, index), ""
    check_unicode(content, f"message {index + 1}")
    weight = None
    for key in WEIGHT_KEYS:
        if item.get(key) is not None:
            weight = float(item[key]) if isinstance(item[key], bool) else number(item[key], key)
    if role != "assistant" and weight:
        raise BadRowError(
            f"message {index + 1} gives the weight {weight:g} to a {role} message; "
            "only assistant messages can be trained"
        )
    if weight is not None and weight < 0:
        raise BadRowError(f"message {index + 1} has the negative weight {weight:g}")
    return Message(role, content, weight, tuple(_openai_call(call, index) for call in calls))


def _content_parts(parts: list[Any], index: int) -> tuple[str, list[Any]]:
    texts, calls = [], []
    for part in parts:
        part_type = part.get("type") if isinstance(part, Mapping) else "text"
        value = part if isinstance(part, str) else part.get("text", part.get("value"))
        if part_type == "text" and isinstance(value, str):
            texts.append(value)
        elif part_type in ("tool_call", "tool_calls") and isinstance(value, str):
            calls += _json_calls(value, index)
        else:
            raise BadRowError(
                f"message {index + 1} has content of the type {part_type!r}; only text is supported"
            )
    return "".join(texts), calls


def _json_calls(text: str, index: int) -> list[Any]:
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise BadRowError(f"message {index + 1} should hold a tool call as JSON: {error}") from None
    return calls if isinstance(calls, list) else [calls]


def _openai_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"message {index + 1} has a tool call without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # some data calls with free text; templates print it as a JSON string
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadRowError(f"'tools' is not valid JSON: {error}") from None
    if not value:
        return ()
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRowError("'tools' must be a list of tool descriptions")
    return tuple(
        dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in value
    )


def is_transcript(text: str) -> bool:
    """True for hh-rlhf style text: turns opened by "\\n\\nHuman:" and "\\n\\nAssistant:"."""
    return TRANSCRIPT_TURN.match(text) is not None and "\n\nAssistant:" in text


def parse_transcript(text: str) -> list[Message]:
    """Split "\\n\\nHuman: ...\\n\\nAssistant: ..." into messages."""
    parts = TRANSCRIPT_TURN.split(text)
    if parts[0].strip():
        raise BadRowError("a transcript must begin with Human: or Assistant:")
    check_unicode(text, "the transcript")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[parts[i]], parts[i + 1].strip()) for i in range(1, len(parts), 2)]


def type_name(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} is {type_name(value)}, not a string")
    check_unicode(value, repr(name))
    return value


def check_unicode(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(
            f"{name} holds an unpaired surrogate, which is not valid Unicode"
        ) from None


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise BadRowError(f"{name!r} is {value!r}, not a number")
    return float(value)
