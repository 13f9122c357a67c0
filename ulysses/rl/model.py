"""The policy as an episode calls it, and the record of its calls, which becomes trajectories.

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

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message, parse_messages, parse_tools
from ulysses.data.read.tokenizer import MARKS, PreTrainedTokenizerFast, Rendered
from ulysses.rl.sampler import Completion
from ulysses.rl.tool_calls import split_calls
from ulysses.rl.trajectory import Trajectory

Units = list[
    str | int
]  # a rendered text: its characters, and the ids of the special tokens between them

# the characters that templates may not be given
NO_MARKS = dict.fromkeys(map(ord, MARKS), "\ufffd")


class EpisodeOverError(BaseException):
    """An episode whose tokens have no room for another turn calls the model; its function does not go on."""


@dataclass(frozen=True)
class Turn:
    """What the model said in one call.

    text: without special tokens.
    tokens: with the one that ended it.
    message: the same as a message in OpenAI's form, to be appended to the conversation.
    prompt: the tokens that it answers.
    ended: whether the model ended it and it was not cut.
    """

    text: str
    tokens: list[int]
    message: dict[str, Any]
    prompt: list[int]
    ended: bool

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools, {"id", "type", "function": {"name", "arguments": {...}}}."""
        return self.message.get("tool_calls", [])


@dataclass
class Call:
    """A prompt, its completion once it is there, and for a chat the conversation and how its prompt was rendered."""

    number: int
    prompt: list[int]
    completion: Completion | None = None
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    units: Units = field(default_factory=list)


@dataclass(eq=False)
class Model:
    """The policy in one episode.

    Args:
        ask: (number of the call, prompt, most new tokens) -> the completion.
        vocabulary: the number of tokens that the policy knows.
        longest: the most tokens of a trajectory.
        max_new_tokens: of a turn.
        address: returns base_url and api_key.

    Attributes:
        is_over: whether a call had no room.
    """

    ask: Callable[[int, list[int], int], Coroutine[Any, Any, Completion]]
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate | None
    vocabulary: int
    longest: int
    max_new_tokens: int
    address: Callable[[], tuple[str, str]]
    calls: list[Call] = field(default_factory=list)
    is_over: bool = False

    @property
    def base_url(self) -> str:
        """Where a client of OpenAI's chat completions calls this model, in this episode."""
        return self.address()[0]

    @property
    def api_key(self) -> str:
        """What such a client sends as its key."""
        return self.address()[1]

    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Answer a conversation, both in OpenAI's form.

        Raises DataError if the chat template cannot render it.
        """
        if self.template is None:
            raise ValueError("there is no chat template; set data.chat_template")
        said, described = parse_messages([*messages]), parse_tools([*tools])
        prompt, units = self._rendered(said, described)
        call = await self._call(prompt, max_tokens)
        turn = self._turn(call, described)
        call.messages, call.units = [*said, *parse_messages([turn.message])], units
        return turn

    async def complete(self, tokens: Iterable[int], max_tokens: int | None = None) -> Turn:
        """Continue tokens."""
        return self._turn(await self._call([*map(int, tokens)], max_tokens), [])

    async def _call(self, prompt: list[int], most: int | None) -> Call:
        if not prompt or not all(0 <= token < self.vocabulary for token in prompt):
            raise ValueError(
                f"a prompt has tokens, and they are from 0 to {self.vocabulary - 1}"
            )
        room = self.longest - len(prompt)
        if room < 1:
            self.is_over = True
            raise EpisodeOverError(
                f"{len(prompt)} tokens leave no room for a turn: ppo.max_episode_tokens is {self.longest}"
            )
        call = Call(len(self.calls), prompt)
        self.calls.append(call)
        limit = min(room, self.max_new_tokens, max(1, most or room))
        call.completion = await self.ask(call.number, prompt, limit)
        return call

    def _turn(self, call: Call, tools: list[Any]) -> Turn:
        tokens, ended = call.completion.tokens, call.completion.ended
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        call.text = content = text.translate(NO_MARKS)
        message, functions = {"role": "assistant"}, []
        if tools:
            content, functions = split_calls(content, tools)
        message["content"] = content
        if functions:
            # some templates want nine letters and digits
            message["tool_calls"] = [
                {"id": f"c{call.number:05}{i:03}", "type": "function", "function": function}
                for i, function in enumerate(functions)
            ]
        return Turn(call.text, tokens, message, call.prompt, ended)

    # ---------------------------------------------------------------- prompts

    def _rendered(self, messages: list[Message], tools: list[Any]) -> tuple[list[int], Units]:
        """Return the prompt of a conversation, and how the template writes it."""
        [rendered] = self.template.render(messages, tools)
        units = _units(rendered)
        for call in reversed(self.calls):
            count, begin = len(call.messages), len(call.units)
            if count and messages[:count] == call.messages and units[:begin] == call.units:
                written = "".join(takewhile(lambda unit: isinstance(unit, str), units[begin:]))
                if _meaning(written, tools) == _meaning(call.text, tools):
                    # the token that ends the turn has been said, unless the turn was cut
                    begin += len(written) + call.completion.ended
                    held = call.prompt + call.completion.tokens
                    return held + self._encoded(units[begin:]), units
        return self._encoded(units), units

    def _encoded(self, units: Units) -> list[int]:
        rendered: Rendered = []
        for kind, run in groupby(units, type):
            parts = [*run]
            rendered += [(part, 0.0) for part in (["".join(parts)] if kind is str else parts)]
        return self.template.encoder.encode_batch([rendered])[0][0]

    # ---------------------------------------------------------------- the record

    def trajectories(self, number: int, row: int) -> list[Trajectory]:
        """Return what was told and said, in one trajectory, or in several if the episode branches."""
        branches: list[Trajectory] = []
        calls = [call for call in self.calls if call.completion]
        for call in calls:
            prompt, said = call.prompt, call.completion
            held = [(branch.prompt + branch.tokens, branch) for branch in branches]
            held = [(len(each), b) for each, b in held if prompt[: len(each)] == each]
            new = Trajectory.of(prompt, Completion(), group=0, episode=number, row=row)
            length, branch = max(held, key=itemgetter(0), default=(len(prompt), new))
            if branch is new:
                branches.append(new)
            told = prompt[length:]
            branch.tokens += told + said.tokens
            branch.logps += [0.0] * len(told) + said.logps
            branch.sampled += [False] * len(told) + [True] * len(said.tokens)
        for branch in branches:
            branch.ended = calls[-1].completion.ended and not self.is_over
        return branches


def _meaning(text: str, tools: list[Any]) -> tuple[str, list[Any]]:
    """Return what a turn says and calls, whatever its white space and the spelling of its calls."""
    content, calls = split_calls(text, tools)
    return "".join(content.split()), calls


def _units(rendered: Rendered) -> Units:
    return [
        unit for part, _ in rendered for unit in (part if isinstance(part, str) else [part])
    ]
