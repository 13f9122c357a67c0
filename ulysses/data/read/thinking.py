"""Find the thinking in what an assistant says, and tell whether a rendered answer is all of that."""

import re
from functools import partial
from typing import Any

from ulysses.data.read.tokenizer import BEGUN, GUARD

TAG = re.compile("</?think>")
# keys of a message, besides its content, that may hold thinking
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
Span = tuple[int, int]  # start and stop
Plain = dict[str, Any]  # a message as templates read it


def split_thinking(content: str) -> tuple[str | None, str]:
    """Return the thinking that an answer begins with, None if there is none, and the rest of its text.

    Its opening tag may be missing, because a prompt may end with that; the closing one is then alone on its line.
    """
    before, closed, rest = content.partition("</think>")
    thinking = before.lstrip().removeprefix("<think>")
    is_alone = before.rstrip(" ")[-1:] in ("", "\n") and rest.lstrip(" ")[:1] in ("", "\n")
    if closed and (thinking != before.lstrip() or (is_alone and "<think>" not in before)):
        return thinking, rest
    return None, content


def closes(prompt: str) -> bool:
    """Tell whether a prompt ends with a block of thinking, so that the answer cannot have any."""
    return prompt.rstrip().endswith("</think>")


def ways_to_say(message: Plain, prompt: str) -> list[Plain]:
    """Return a message as it is, and with tags broken that a template would take for the edges of thinking.

    First those of its text and those inside of its thinking are broken; then also the one that closes its thinking,
    which some templates cut off every answer, although the model begins its own with it.
    """
    content = message["content"] or ""
    broken = partial(TAG.sub, lambda tag: f"{tag[0][:-1]}{GUARD}>")
    thinking, rest = split_thinking(content)
    texts = [
        content.removesuffix(rest).replace(thinking or "", broken(thinking or ""))
        + broken(rest)
    ]
    if not closes(prompt):
        texts.append(content.replace("</think>", f"</think{GUARD}>"))
    return [message, *({**message, "content": text} for text in texts if text != content)]


def why_unsaid(message: Plain, prompt: str, settings: str) -> str:
    """Say why an answer's thinking cannot stand after its prompt, which `settings` made; "" if it can."""
    content = message["content"] or ""
    if closes(prompt) and (split_thinking(content)[0] or any(map(message.get, THINKING_KEYS))):
        because = f" ({settings})" * bool(settings)
        return f"an answer has thinking, but the chat template closes it where it opens the assistant's turn{because}"
    if _hangs(content, prompt):
        return "an answer has <think> or </think> alone, which may be a quotation, or thinking that was cut off"
    return ""


def _hangs(content: str, prompt: str) -> bool:
    """Tell whether an answer has one tag alone, so that it may be cut off in its thinking, or quote the tag."""
    ends = prompt.rstrip().endswith("<think>") and "</think>" in content.split("<think>")[0]
    thinking, _ = split_thinking(content)
    return thinking is None and (ends or content.lstrip().startswith("<think>"))


def _unguarded(text: object) -> str:
    """Return a text, or "" for none, without the marks that are put into what a template reads."""
    return str(text or "").replace(GUARD, "").replace(BEGUN, "")


def is_said(message: Plain, text: str, span: Span) -> bool:
    """Tell whether a rendered answer is all that the assistant wrote, with its thinking where a model writes it."""
    start, stop = span
    prompt, answer = _unguarded(text[:start]), _unguarded(text[start:stop])
    content = _unguarded(message["content"])
    thinking, rest = split_thinking(content)
    # several keys may hold the same thinking
    under_keys = dict.fromkeys(_unguarded(message.get(key)) for key in THINKING_KEYS)
    if under_key := "".join(under_keys).strip():
        thinking, rest = under_key, content
    if prompt.rstrip().endswith("<think>"):
        answer = "<think>" + answer
    thought, inner = (thinking or "").strip(), answer
    # a template may write something before the thinking, but no other tag
    if (first := TAG.search(answer)) and first[0] == "<think>":
        inner = answer[first.end() :]
    inner = inner.lstrip()
    after = inner[len(thought) :].lstrip()
    if inner.startswith(thought) and after.startswith("</think>"):
        if _hangs(content, prompt) and not under_key:
            return False
        answer = after.removeprefix("</think>")
    elif thought:
        if not under_key or thought not in answer:  # a template may have other tags for a key
            return False
        answer = answer.partition(thought)[2]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    has_calls = all(answer.count(name) >= names.count(name) for name in names)
    # the arguments of calls may name the tags
    has_tags = bool(names) or TAG.findall(rest) == TAG.findall(answer)
    return rest.strip() in answer and has_calls and has_tags
