"""Find the calls of tools in what a model said.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>    Qwen3-Coder, Qwen3.5
    {"name": "add", "parameters": {"a": 1}}                                       Llama 3, as the whole text

What looks like a call and is none stays text, so that the environment can tell the model.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ulysses.data import BadRowError
from ulysses.data.read.messages import decoded

BLOCK = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
Tool = dict[str, Any]  # as OpenAI's interface describes it
Function = dict[str, Any]  # the name and arguments of a call


def split_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[Function]]:
    """Return the text without its calls, and for each call {"name": ..., "arguments": {...}}."""
    calls: list[Function] = []

    def read(block: re.Match[str]) -> str:
        call = _from_json(block[1]) or _from_tags(block[1], tools)
        calls.extend([call] if call else [])
        return "" if call else block[0]

    rest = BLOCK.sub(read, text)
    if not calls and (call := _from_json(text)):
        return "", [call]
    return rest, calls


def _from_json(text: str) -> Function | None:
    with suppress(BadRowError, RecursionError):
        found = decoded(text, "", dict)
        if isinstance(found.get("name"), str):
            arguments = found.get("arguments", found.get("parameters"))
            return {"name": found["name"], "arguments": decoded(arguments, "", dict)}
    return None


def _from_tags(text: str, tools: Sequence[Tool]) -> Function | None:
    if not (found := FUNCTION.fullmatch(text)):
        return None
    name, arguments = found[1], dict[str, Any](PARAMETER.findall(found[2]))
    described = next((t["function"] for t in tools if t["function"]["name"] == name), {})
    for key, value in arguments.items():
        # a value stays a text where its schema is absent, or is none
        with suppress(LookupError, TypeError, BadRowError, RecursionError):
            if not _may_be_text(described["parameters"]["properties"][key]):
                arguments[key] = decoded(value, "")
    return {"name": name, "arguments": arguments}


def _may_be_text(schema: object) -> bool:
    """Return whether a value with this JSON schema may be a text, as one that is not described may be."""
    if not isinstance(schema, Mapping):
        return True
    choices = schema.get("anyOf")
    return (
        any(map(_may_be_text, choices)) if choices else "string" in schema.get("type", "string")
    )
