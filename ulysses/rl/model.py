"""The policy as an episode calls it, and the record of its turns, which becomes trajectories.

    turn = await model.chat(messages, tools=...)     rendered by the run's chat template
    turn = await model.complete(tokens)              tokens as they are

    prompt 1            said 1     prompt 2 is all of this, and more     said 2
    [ p p p p p p p ]   [ a a ]    [ t t t ]                             [ a a a ]       one trajectory
    prompt 3 does not begin with all that is held: it begins a branch, another trajectory of the same episode

What the policy said must stand in the next prompt token by token as it was drawn. Where a conversation goes on behind a
turn and the chat template writes what was said, white space and the spelling of calls aside, only what follows is
rendered, behind the tokens that are held. Where it writes something else (without the thinking of earlier turns, say),
the template has the last word, and the prompt begins a branch.
"""

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter, index
from typing import Any

from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message, parse_messages, parse_tools
from ulysses.data.read.tokenizer import MARKS, PreTrainedTokenizerFast, Rendered
from ulysses.rl.sampler import Completion
from ulysses.rl.tool_calls import split_calls
from ulysses.rl.trajectory import Trajectory, prompt_tokens

# the characters that templates may not be given
NO_MARKS = dict.fromkeys(map(ord, MARKS), "\ufffd")


class EpisodeOverError(BaseException):
    """An episode whose tokens have no room for another turn calls the model; its function does not go on."""


@dataclass(kw_only=True)
class Turn(Completion):
    """What the model said in one call: a completion, and what it means.

    number: of the call in the episode.
    prompt: the tokens that it answers.
    text: what it said, without special tokens.
    tool_calls: the calls in it, each with "id", "name" and "arguments" (an object).
    message: all of this as a message in OpenAI's form, to be appended to the conversation.
    messages: of a chat the conversation, with this message.
    rendered: how many units (characters and special tokens) the prompt of a chat was rendered to, and their hash.
    """

    number: int
    prompt: list[int]
    text: str
    tool_calls: list[dict[str, Any]]
    message: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    rendered: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Model:
    """The policy in one episode.

    Args:
        ask: (number of the call, prompt, most new tokens) -> the completion.
        base_url, api_key: where and how a client of OpenAI's chat completions calls this model, in this episode.
        vocabulary: the number of tokens that the policy knows.
        longest: the most tokens of a trajectory.
        max_new_tokens: of a turn.

    Attributes:
        turns: those that have come.
        calls: how many have been asked for, with room or without.
        without_room: the number of the newest of them that had no room; -1 if all had.
        was_refused: whether a program that asks at base_url has been told so.
    """

    ask: Callable[[int, list[int], int], Coroutine[Any, Any, Completion]]
    base_url: str
    api_key: str
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate
    vocabulary: int
    longest: int
    max_new_tokens: int
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    without_room: int = -1
    was_refused: bool = False

    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Answer a conversation; it and the tools are in OpenAI's form.

        Raises DataError if the chat template cannot render it.
        """
        said, described = parse_messages([*messages]), parse_tools([*tools])
        prompt, rendered = self._rendered(said, described)
        turn = await self._turn(prompt, max_tokens, described)
        turn.messages, turn.rendered = said + parse_messages([turn.message]), rendered
        return turn

    async def complete(self, tokens: Iterable[int], max_tokens: int | None = None) -> Turn:
        """Continue tokens."""
        return await self._turn(tokens, max_tokens, [])

    async def _turn(self, tokens: Iterable[int], most: int | None, tools: list[Any]) -> Turn:
        prompt = prompt_tokens(tokens, self.vocabulary, "a prompt")
        most = self.max_new_tokens if most is None else index(most)
        if most < 1:
            raise ValueError(f"max_tokens is {most} but must be at least 1")
        number, self.calls = self.calls, self.calls + 1
        room = self.longest - len(prompt)
        if room < 1:
            self.without_room = number
            raise EpisodeOverError(
                f"{len(prompt)} tokens leave no room for a turn: ppo.max_episode_tokens is {self.longest}"
            )
        drawn = await self.ask(number, prompt, min(room, self.max_new_tokens, most))
        text = self.tokenizer.decode(drawn.tokens, skip_special_tokens=True).translate(NO_MARKS)
        content, calls = split_calls(text, tools) if tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        for i, call in enumerate(calls):
            call["id"] = f"c{number:05}{i:03}"  # some templates want nine letters and digits
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            function = {"name": call["name"], "arguments": arguments}
            written = {"id": call["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(written)
        turn = Turn(
            **vars(drawn),
            number=number,
            prompt=prompt,
            text=text,
            tool_calls=calls,
            message=message,
        )
        self.turns.append(turn)
        return turn

    # ---------------------------------------------------------------- prompts

    def _rendered(
        self, messages: list[Message], tools: list[Any]
    ) -> tuple[list[int], tuple[int, int]]:
        """Return the prompt of a conversation, and what Turn.rendered tells of it."""
        [rendered] = self.template.render(messages, tools)
        units = [
            unit for part, _ in rendered for unit in (part if isinstance(part, str) else [part])
        ]
        held, begin = list[int](), 0
        for turn in reversed(self.turns):
            count, end = len(turn.messages), turn.rendered[0]
            is_same = count and messages[:count] == turn.messages
            if is_same and turn.rendered == _measured(units[:end]):
                written = "".join(takewhile(lambda unit: isinstance(unit, str), units[end:]))
                if _meaning(written, tools) == _meaning(turn.text, tools):
                    held = turn.prompt + turn.tokens
                    # the token that ends the turn has been said, unless the turn was cut
                    begin = end + len(written) + turn.ended
                    break
        rest: Rendered = []
        for kind, run in groupby(units[begin:], type):
            parts = [*run]
            rest += [(part, 0.0) for part in (["".join(parts)] if kind is str else parts)]
        prompt = held + self.template.encoder.encode_batch([rest])[0][0]
        return prompt, _measured(units)

    # ---------------------------------------------------------------- the record

    def trajectories(self, episode: int, row: int) -> list[Trajectory]:
        """Return what was told and said: one trajectory, or several if the episode has branches.

        The branch with the last turn comes last.
        """
        branches: list[Trajectory] = []
        turns = sorted(self.turns, key=attrgetter("number"))
        # an episode without room may have gone on with a shorter conversation
        ended = all(turn.ended and turn.number > self.without_room for turn in turns[-1:])
        for turn in turns:
            prompt = turn.prompt
            for branch in branches:
                held = branch.prompt + branch.tokens
                if prompt[: len(held)] == held:
                    branches.remove(branch)
                    break
            else:
                held, branch = prompt, Trajectory(prompt, [], [], [], ended, 0, episode, row)
            branches.append(branch)
            told = prompt[len(held) :]
            branch.tokens += told + turn.tokens
            branch.logps += [0.0] * len(told) + turn.logps
            branch.sampled += [False] * len(told) + [True] * len(turn.tokens)
        return branches


def _measured(units: list[str | int]) -> tuple[int, int]:
    return len(units), hash(tuple(units))


def _meaning(text: str, tools: list[Any]) -> tuple[str, list[Any]]:
    """Return what a turn says and calls, whatever its white space and the spelling of its calls."""
    content, calls = split_calls(text, tools)
    return "".join(content.split()), calls
