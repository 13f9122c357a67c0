"""Find the thinking in an assistant's message, and tell whether a rendered answer holds all of the message."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from ulysses.data.read.messages import THINKING_KEYS
from ulysses.data.read.tokenizer import GUARD, unguarded

TAG = re.compile("</?think>")
Span = tuple[int, int]  # start and stop in a text
TemplateMessage = dict[str, Any]  # a message as templates read it


def assistant_indices(messages: Sequence[TemplateMessage]) -> list[int]:
    """Return the places of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def hidden_messages(messages: Sequence[TemplateMessage], prompt: str) -> list[int]:
    """Return the places of the messages of others whose text a prompt does not show."""
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] != "assistant" and message["content"].strip() not in prompt
    ]


def split_thinking(content: str) -> tuple[str | None, str]:
    """Return the thinking that an answer begins with, None if there is none, and the rest of its text.

    The opening tag may be missing, because a prompt may end with it; the closing tag must then be alone on its line.
    """
    before, closed, rest = content.partition("</think>")
    thinking = before.lstrip().removeprefix("<think>")
    is_alone = before.rstrip(" ")[-1:] in ("", "\n") and rest.lstrip(" ")[:1] in ("", "\n")
    if closed and (thinking != before.lstrip() or (is_alone and "<think>" not in before)):
        return thinking, rest
    return None, content


def spellings(message: TemplateMessage, prompt: str) -> list[TemplateMessage]:
    """Return a message as it is, and then with tags broken that a template would take for the edges of thinking.

    The second spelling breaks the tags in its text and those inside of its thinking. The third breaks the tag that
    closes its thinking: some templates cut all thinking off an answer, although the model begins its answer with it.
    """
    content = message["content"] or ""
    break_tags = partial(TAG.sub, lambda tag: f"{tag[0][:-1]}{GUARD}>")
    thinking, rest = split_thinking(content)
    thinking = thinking or ""
    contents = [
        content.removesuffix(rest).replace(thinking, break_tags(thinking)) + break_tags(rest)
    ]
    if not prompt.rstrip().endswith("</think>"):  # the answer may begin with thinking
        contents.append(content.replace("</think>", f"</think{GUARD}>"))
    return [message, *({**message, "content": text} for text in contents if text != content)]


def why_incomplete(message: TemplateMessage, prompt: str, settings: str) -> str:
    """Say why an answer's thinking cannot stand after the prompt that `settings` made; "" if it can."""
    content = message["content"] or ""
    thinks = split_thinking(content)[0] or any(map(message.get, THINKING_KEYS))
    if thinks and prompt.rstrip().endswith("</think>"):
        because = f" ({settings})" if settings else ""
        return f"an answer has thinking, but the chat template closes it where it opens the assistant's turn{because}"
    if _has_lone_tag(content, prompt):
        return "an answer has <think> or </think> alone, which may be a quotation, or thinking that was cut off"
    return ""


def is_complete(message: TemplateMessage, text: str, span: Span) -> bool:
    """Tell whether a rendered answer holds all of its message, with the thinking where a model writes it."""
    start, stop = span
    prompt, answer = unguarded(text[:start]), unguarded(text[start:stop])
    content = unguarded(message["content"] or "")
    # several keys may hold the same thinking
    under_keys = dict.fromkeys(unguarded(str(message.get(k) or "")) for k in THINKING_KEYS)
    under_key = "".join(under_keys).strip()
    in_content, rest = (None, content) if under_key else split_thinking(content)
    thinking = under_key or (in_content or "").strip()
    if prompt.rstrip().endswith("<think>"):
        answer = "<think>" + answer
    inner = answer
    # a template may write something before the thinking, but no other tag
    if (first := TAG.search(answer)) and first[0] == "<think>":
        inner = answer[first.end() :]
    inner = inner.lstrip()
    after = inner[len(thinking) :].lstrip()
    if inner.startswith(thinking) and after.startswith("</think>"):
        if _has_lone_tag(content, prompt) and not under_key:
            return False
        answer = after.removeprefix("</think>")
    elif thinking:
        # a template may write other tags around what stands under a key
        if not under_key or thinking not in answer:
            return False
        answer = answer.partition(thinking)[2]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    has_calls = all(answer.count(name) >= names.count(name) for name in names)
    # the arguments of calls may name the tags
    has_tags = bool(names) or TAG.findall(rest) == TAG.findall(answer)
    return rest.strip() in answer and has_calls and has_tags


def _has_lone_tag(content: str, prompt: str) -> bool:
    """Tell whether an answer has one tag alone, so that it may be cut off in its thinking, or quote the tag."""
    closes = prompt.rstrip().endswith("<think>") and "</think>" in content.split("<think>")[0]
    thinking, _ = split_thinking(content)
    return thinking is None and (closes or content.lstrip().startswith("<think>"))
