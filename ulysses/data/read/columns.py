"""Prompts and answers in columns of their own: alpaca, prompt and completion, transcripts; imported for them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, cycle

from ulysses.data import BadRowError, DropRowError
from ulysses.data.read.messages import Message, Messages, Row, first_key, parse_messages, string
from ulysses.data.read.sources import PROMPT_KEYS

TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


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
    turns = parse_transcript(string(value, key)) or _user(value)
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


def parse_answer(key: str, value: object, may_hold_prompt: bool) -> Messages:
    """Read an answer; one that may hold its prompt is also read as a transcript."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return parse_messages(value)
    text = string(value, key)
    turns = parse_transcript(text) if may_hold_prompt else []
    return turns or [Message("assistant", text)]


def continued(
    prompt: Messages, answers: list[Messages], kind: str
) -> tuple[Messages, list[Messages]]:
    """Let the answers continue the one that ends the prompt, which is their beginning and is not trained."""
    *prompt, begun = prompt
    begun = replace(begun, begun=len(begun.content))
    for answer in answers:
        text, more = begun.content + answer[0].content, {**begun.more, **answer[0].more}
        answer[0] = replace(answer[0], content=text, more=more, begun=begun.begun)
    return prompt + [begun] * (kind == "prompt"), answers


def parse_transcript(text: str) -> Messages:
    """Split text as in hh-rlhf, "\\n\\nHuman: ...\\n\\nAssistant: ...", into messages; return [] for other text."""
    start, *turns = TRANSCRIPT_TURN.split(text)
    if start or "\n\nAssistant:" not in text:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], said.strip()) for who, said in zip(turns[::2], turns[1::2])]
