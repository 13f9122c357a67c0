"""Episodes of several turns: what becomes of the calls of a user's function, and what is refused."""

import asyncio
import json
import socket
import sys
import time
import urllib.request
from contextlib import closing, suppress
from threading import Timer
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
import torch

from examples import calculator
from tests import ROOT, rows_of
from tests.harness import PATIENCE, until
from ulysses.config.section import UserCodeError
from ulysses.config.stage_sections import PpoSection
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.rl import episodes
from ulysses.rl.episodes import EpisodeLoop
from ulysses.rl.model import EpisodeOverError
from ulysses.rl.sampler import Completion
from ulysses.rl.tool_calls import split_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "why": {"type": "string"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call>'
TIGHT = '<tool_call>{"name":"add","arguments":{"a":4}}</tool_call>'


class Scripted:
    """A sampler that says a text, or tokens, for each call of an episode, and ends it unless it is cut.

    pause: seconds before the first answer.
    """

    def __init__(self, tokenizer, *texts, pause=0.0):
        self.tokenizer, self.texts, self.seen, self.batches = tokenizer, texts, [], []
        self.pause = pause

    def serve(self, requests, rollout):
        while requests.is_open:
            taken = requests.take(wait=True)
            self.batches.append(len(taken))
            time.sleep(self.pause * (not self.seen))
            for request in taken:
                self.seen.append(request)
                text = self.texts[request.call]
                said = self.tokenizer(text)["input_ids"] if isinstance(text, str) else text
                tokens = [*said, self.tokenizer.eos_token_id]
                ended = len(tokens) <= request.limit
                tokens = tokens[: request.limit]
                requests.answer(request, Completion(tokens, [-1.0] * len(tokens), ended))


def run(
    tokenizer,
    function,
    *texts,
    rows=({"q": "2 + 2?"},),
    longest=2000,
    template="qwen2.5",
    rollouts=1,
    pause=0.0,
    renew=lambda: None,
    **ppo,
):
    """The trajectories of the last rollout, whose function is `function`, and its sampler."""
    global episode
    episode = function
    settings = PpoSection(rollout=f"{__name__}:episode", **{"max_new_tokens": 100, **ppo})
    shape = SimpleNamespace(vocab_size=len(tokenizer))
    parts = SimpleNamespace(
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer, template),
        weights=SimpleNamespace(shape=shape),
        renew=renew,
    )
    numbered = {3 + n: (40 + n, row) for n, row in enumerate(rows)}
    with closing(EpisodeLoop(settings, parts, longest)) as thread:
        for n in range(rollouts):
            sampler = Scripted(tokenizer, *texts, pause=pause)
            found = thread.draw(numbered, sampler, n)
    return found, sampler


def shown(tokenizer, one):
    """The text of a trajectory, with what was said in brackets."""
    text = tokenizer.decode(one.prompt)
    last = False
    for token, said in zip([*one.tokens, 0], [*one.sampled, False]):
        text += "[" * (said and not last) + "]" * (last and not said)
        text += tokenizer.decode([token])
        last = said
    return text[: -len(tokenizer.decode([0]))]


async def calculates(row, model):
    messages = [{"role": "user", "content": row["q"]}]
    turn = await model.chat(messages, tools=TOOLS)
    messages.append(turn.message)
    for call in turn.tool_calls:
        result = str(call["arguments"]["a"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    turn = await model.chat(messages, tools=TOOLS)
    return float("4" in turn.text)


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("call", [CALL, TIGHT])
def test_tool_results_are_told_and_turns_are_said(tokenizer, template, call):
    """The template writes a call with spaces; the tokens that were drawn stay as they are."""
    [one], sampler = run(tokenizer, calculates, call, "It is 4.", template=template)
    text = shown(tokenizer, one)
    assert text.endswith(
        f"[{call}<|im_end|>]\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[It is 4.<|im_end|>]"
    )
    assert text.count("[<tool_call>") == 1 and one.ended and one.score == 0
    assert one.scores == {f"{__name__}:episode": 1.0} and (one.episode, one.row) == (3, 40)
    assert [x for x, said in zip(one.logps, one.sampled) if said] == [-1.0] * sum(one.sampled)
    # every call got exactly what is trained
    first, second = (list(request.prompt) for request in sampler.seen)
    assert first == one.prompt and second == (one.prompt + one.tokens)[: len(second)]


def test_tokens_that_no_tokenizer_would_give_stay_as_they_were_drawn(tokenizer):
    """The demo's tokenizer has whole words; the policy spells them letter by letter, and the template trims."""
    words = load_tokenizer(ROOT / "configs/demo/data/tokenizer")
    spelled = [token for letter in " the table " for token in words(letter)["input_ids"][-1:]]
    assert len(spelled) > 2 * len(words(" the table ")["input_ids"])

    [one], sampler = run(words, asks_twice, spelled, spelled, template="tokenizer")
    said = [*spelled, words.eos_token_id]
    assert [t for t, is_said in zip(one.tokens, one.sampled) if is_said] == said * 2
    assert list(sampler.seen[1].prompt)[: len(one.prompt) + len(said)] == one.prompt + said


async def asks_twice(row, model):
    messages = [{"role": "user", "content": "1"}]
    for _ in range(2):
        messages.append((await model.chat(messages)).message)
        messages.append({"role": "user", "content": "2"})
    return len(messages)


THINKS = "<think>\nhm\n</think>\n\nyes"


def test_a_template_that_rewrites_turns_makes_branches(tokenizer):
    """Qwen3's leaves out the thinking of turns before a question; each token is trained once."""
    [first, second], _ = run(tokenizer, asks_twice, THINKS, THINKS, template="qwen3")
    assert shown(tokenizer, first).endswith(f"assistant\n[{THINKS}<|im_end|>]")
    assert shown(tokenizer, second).endswith(
        f"assistant\nyes<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n[{THINKS}<|im_end|>]"
    )
    assert first.episode == second.episode and first.scores == second.scores
    [whole], _ = run(tokenizer, asks_twice, THINKS, THINKS, template="chatml")
    assert shown(tokenizer, whole).count(f"[{THINKS}<|im_end|>]\n<|im_start|>user") == 1


def test_a_turn_that_is_cut_is_closed_before_the_next_one(tokenizer):
    [one], _ = run(tokenizer, asks_twice, "abcdefgh", "yes", max_new_tokens=4)
    assert "[abcd]<|im_end|>\n<|im_start|>user\n2" in shown(tokenizer, one)
    assert shown(tokenizer, one).endswith("[yes<|im_end|>]") and one.ended


def test_forks_and_calls_at_the_same_time_are_branches(tokenizer):
    async def forks(row, model):
        start = await model.complete([5, 6])
        ways = [start.prompt + start.tokens + [token] for token in (7, 8)]
        await asyncio.gather(*map(model.complete, ways))

    found, sampler = run(tokenizer, forks, "a", "b", "c", reward="a:b")
    assert [one.prompt for one in found] == [
        [5, 6],
        found[0].prompt + found[0].tokens[:2] + [8],
    ]
    assert [sum(one.sampled) for one in found] == [4, 2]
    assert len({request.key for request in sampler.seen}) == 3 and not found[0].scores


def test_the_branch_with_the_last_turn_comes_last_and_says_how_the_episode_ended(tokenizer):
    """After a helper's conversation, and after one that had no room and went on shorter."""

    async def asks_a_helper(row, model):
        main = await model.complete([5])
        await model.complete([6])
        with suppress(EpisodeOverError):
            await model.complete([7] * 5000)
        await model.complete(main.prompt + main.tokens + [8])

    found, _ = run(tokenizer, asks_a_helper, "a", "b", "", "c", reward="a:b")
    assert [(one.prompt, one.ended) for one in found] == [([6], True), ([5], True)]


async def goes_on(row, model):
    messages = [{"role": "user", "content": "1"}]
    while True:
        messages += [(await model.chat(messages)).message, messages[0]]


def test_an_episode_without_room_for_another_turn_ends(tokenizer):
    """Its last turn is cut, and its function does not go on; without ppo.reward it scores 0."""
    for longest in (150, 300):
        [one], _ = run(tokenizer, goes_on, *["abcdefgh" * 5] * 9, longest=longest)
        assert longest - 40 < len(one.prompt) + len(one.tokens) <= longest
        assert not one.ended and one.scores == {f"{__name__}:episode": 0.0}
    [one], _ = run(tokenizer, goes_on, *["abcdefgh" * 5] * 9, longest=300, reward="a:b")
    assert not one.scores


def test_an_episode_whose_first_prompt_has_no_room_is_left_out(tokenizer):
    """However it takes that, and whatever score it returns; the others stay."""

    async def asks(row, model):
        await model.complete([5] * row["tokens"])

    async def catches(row, model):
        with suppress(EpisodeOverError):
            await asks(row, model)
        return 1.0

    async def by_a_program(row, model):
        assert await status_of(model, content="a" * row["tokens"]) == 200

    for function in (asks, catches, by_a_program):
        rows = [{"tokens": n} for n in (5000, 5, 2000)]
        [one], _ = run(tokenizer, function, "a", rows=rows, reward="a:b")
        assert (one.episode, one.row) == (4, 41)


def test_an_episode_that_gave_up_on_its_calls_is_left_out(tokenizer):
    """As by a time limit of its own, which is no fault of its function; what comes in time stays."""

    async def may_give_up(row, model):
        call = asyncio.ensure_future(model.complete([5]))
        while not model.calls:
            await asyncio.sleep(0)
        if row["gives_up"]:
            call.cancel()
        await asyncio.wait([call])
        return 1.0

    rows = [{"gives_up": False}, {"gives_up": True}]
    [one], sampler = run(tokenizer, may_give_up, "a", rows=rows, pause=0.5)
    assert one.row == 40 and len(sampler.seen) == 2


def test_what_is_raised_from_that_end_is_this_end(tokenizer):
    async def translates(row, model):
        try:
            await goes_on(row, model)
        except EpisodeOverError as error:
            raise RuntimeError("full") from error

    async def groups(row, model):
        await model.complete([5])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(model.complete([5] * 500))

    for function in (translates, groups):
        [one], _ = run(tokenizer, function, *["abcdefgh" * 5] * 9, longest=300)
        assert one.scores == {f"{__name__}:episode": 0.0}


def test_locks_of_a_module_hold_in_all_rollouts(tokenizer):
    lock = asyncio.Lock()

    async def limited(row, model):
        await model.complete([5])
        async with lock:  # it binds itself to an event loop when somebody has to wait for it
            await asyncio.sleep(0.001)
        return 1.0

    found, _ = run(tokenizer, limited, "a", rows=[{}] * 3, rollouts=2)
    assert len(found) == 3


def test_only_its_own_time_counts_against_an_episode(tokenizer):
    """Not what it waits until the event loop, which others use, comes to it."""
    found, _ = run(tokenizer, blocks, "a", rows=[{"sleep": 0.1}] * 15, reward_timeout=1)
    assert len(found) == 15

    async def in_threads(row, model):
        await model.complete([5])
        await asyncio.to_thread(time.sleep, 0.5)
        return 1.0

    found, _ = run(tokenizer, in_threads, "a", rows=[{}] * 150, reward_timeout=2)
    assert len(found) == 150


def test_only_an_episode_whose_clock_runs_is_progress(tokenizer, monkeypatch):
    """While code beside a call holds the event loop, no clock runs, and the watch ends what never gives way."""
    monkeypatch.setattr(episodes, "LOOK_SECONDS", 0.01)
    renewed, during = [], []

    async def holds_the_loop(row, model):
        async def tool():
            before = len(renewed)
            time.sleep(0.5)
            during.append(len(renewed) - before)

        await asyncio.gather(model.complete([5]), tool())
        until(lambda: renewed)
        return 1.0

    run(tokenizer, holds_the_loop, "a", renew=lambda: renewed.append(1))
    assert renewed and during == [0]


def test_a_program_that_asks_beyond_the_end_of_its_episode_is_told_so(tokenizer):
    """Nobody would answer it any more; the run goes on meanwhile."""
    told = []

    async def leaves(row, model):
        await model.complete([5])
        told.append(asyncio.ensure_future(status_of(model)))
        while model.calls < 2:
            await asyncio.sleep(0.001)
        return 1.0

    class Waits(EpisodeLoop):
        def close(self):
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(told[0], 20), self.loop).result()
            super().close()

    answer = episodes.Episodes.answer

    def answers_late(self, request, completion):
        while request.call and request.number in self.running:
            time.sleep(0.001)
        answer(self, request, completion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "EpisodeLoop", Waits)
        patch.setattr(episodes.Episodes, "answer", answers_late)
        run(tokenizer, leaves, "a", "b")
    assert told[0].result() == 410


def test_an_episode_does_not_hold_up_the_end_of_the_run(tokenizer, monkeypatch):
    async def clings(row, model):
        await model.complete([5])
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENCE)

    class EndsSoon(EpisodeLoop):
        def start(self):
            super().start()
            Timer(0.1, self.close).start()

    monkeypatch.setitem(globals(), "EpisodeLoop", EndsSoon)
    with pytest.raises(InterruptedError, match="the run has ended"):
        run(tokenizer, clings, "a")


def test_turns_of_all_episodes_are_answered_together(tokenizer, monkeypatch):
    monkeypatch.setattr(episodes, "MOMENT", PATIENCE)
    _, sampler = run(tokenizer, asks_twice, "a", "b", rows=[{}] * 5)
    assert [*filter(None, sampler.batches)] == [5, 5]
    assert {(r.number, r.call) for r in sampler.seen} == {
        (n, c) for n in range(3, 8) for c in (0, 1)
    }


def wrong(result):
    async def function(row, model):
        await model.complete([5])
        return result

    return function


async def never_calls(row, model):
    return 1.0


async def fails_late(row, model):
    await model.complete([5])
    raise KeyError("no such tool")


async def exits(row, model):
    raise SystemExit("enough")


async def sleeps(row, model):
    await model.complete([5])
    await asyncio.sleep(row["sleep"])
    return 1.0


async def blocks(row, model):
    await model.complete([5])
    time.sleep(row["sleep"])
    return 1.0


def completes(prompt, **more):
    async def function(row, model):
        await model.complete(prompt, **more)

    return function


async def chats_nonsense(row, model):
    await model.chat([{"role": "king", "content": "hi"}])


async def exits_in_a_task(row, model):
    async def tool():
        sys.exit(2)

    await model.complete([5])
    await asyncio.gather(tool(), asyncio.sleep(0))


async def fails_after_its_end(row, model):
    with suppress(EpisodeOverError):
        await model.complete([5] * 5000)
    await model.complete([5])
    raise KeyError("no such tool")


FAULTS = {
    "never called the model, or was refused at model.base_url": never_calls,
    r"failed: KeyError: 'no such tool' \(test_episodes.py, line \d+\)": fails_late,
    "failed: SystemExit: enough": exits,
    r"failed: SystemExit: 2 \(test_episodes.py": exits_in_a_task,
    "failed: KeyError: 'no such tool'": fails_after_its_end,
    r"returned tensor\(\[1., 2.\]\); return a finite number": wrong(torch.tensor([1.0, 2.0])),
    "returned 'much'; return a finite number": wrong("much"),
    "returned nan; return": wrong(float("nan")),
    "returned None; return a finite number": wrong(None),
    "failed: ValueError: a prompt should have tokens, and they are from 0 to": completes(
        [70_000]
    ),
    "failed: ValueError: a prompt should have tokens": completes([5.5]),
    "failed: ValueError: max_tokens is 0 but must be at least 1": completes([5], max_tokens=0),
    "failed: TypeError: 'float' object cannot be interpreted as an integer": completes(
        [5], max_tokens=0.5
    ),
    "failed: .*message 1 has the role 'king'": chats_nonsense,
    "took longer than ppo.reward_timeout, 0.3 s, beside its calls": sleeps,
    "took longer than ppo.reward_timeout, 0.3 s": blocks,
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_what_goes_wrong_in_an_episode_ends_the_run(tokenizer, sentence):
    rows = [{"sleep": 0}, {"sleep": 2.0}]
    timeout = 0.3 if "timeout" in sentence else 60.0
    begin = rf"the rollout {__name__}:episode on example 4[01] "
    with pytest.raises(UserCodeError, match=begin + sentence):
        run(tokenizer, FAULTS[sentence], *["a"] * 3, rows=rows, reward_timeout=timeout)


def test_a_row_that_an_episode_changes_is_its_own(tokenizer):
    async def changes(row, model):
        await model.complete([5])
        row["seen"].append(1)
        return len(row["seen"])

    row = {"seen": []}
    found, _ = run(tokenizer, changes, "a", rows=[row, row])
    assert {one.scores[f"{__name__}:episode"] for one in found} == {1.0} and not row["seen"]


# how the parameters are described, and what the value 4 of `a` then is
PARAMETERS = """
null => "4"
{"properties": null} => "4"
{"properties": "{}"} => "4"
{"properties": {"a": true}} => "4"
{"properties": {"a": {"type": null, "enum": [4, 5]}}} => "4"
{"properties": {"a": {"type": ["integer", "null"]}}} => 4
{"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}} => 4
{"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}} => "4"
"""


@pytest.mark.parametrize("parameters, value", rows_of(PARAMETERS))
def test_values_in_tags_are_of_the_described_types(parameters, value):
    tools = [{"function": {"name": "add", "parameters": json.loads(parameters)}}]
    text = "<tool_call><function=add><parameter=a>4</parameter></function></tool_call>"
    _, [call] = split_calls(text, tools)
    assert call == {"name": "add", "arguments": {"a": json.loads(value)}}


TAGS = "<function=add>\n<parameter=a>\n{}\n</parameter>\n<parameter=why>\n4\n</parameter>\n</function>"
# what a model says, the arguments of the calls in it, and the text beside them; what is no call stays text
CALLS = r"""
CALL => [{"a": 4}] =>
Let me.\nTIGHTCALL => [{"a": 4}, {"a": 4}] => Let me.
<tool_call>\nTAGS\n</tool_call> => [{"a": 4, "why": "4"}] =>
<tool_call>FOUR</tool_call> => [{"a": "four", "why": "4"}] =>
{"name": "add", "parameters": {"a": 4}} => [{"a": 4}] =>
{"name": "add", "arguments": "{\"a\": 4}"} => [{"a": 4}] =>
<tool_call>{"name": "add", "arguments": </tool_call> => [] => SAID
<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call> => [] => SAID
<tool_call>{"name": "add", "arguments": {"a": "\ud800"}}</tool_call> => [] => SAID
{"a": 4} => [] => SAID
four => [] => SAID
"""
WRITTEN = {
    r"\n": "\n",
    "CALL": CALL,
    "TIGHT": TIGHT,
    "TAGS": TAGS.format(4),
    "FOUR": TAGS.format("four"),
}


@pytest.mark.parametrize("said, arguments, rest", rows_of(CALLS))
def test_calls_are_found_in_what_a_model_says(said, arguments, rest):
    for name, text in WRITTEN.items():
        said = said.replace(name, text)
    content, calls = split_calls(said, TOOLS)
    assert calls == [{"name": "add", "arguments": one} for one in json.loads(arguments)]
    assert content == rest.replace("SAID", said)


# ---------------------------------------------------------------------------------------- the endpoint


def posted(url, key, body, timeout=PATIENCE):
    """The status and JSON of a request."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
            if body.get("stream"):
                assert response.headers["Content-Type"] == "text/event-stream"
                text, done = text.removeprefix("data: ").split("\n\n", 1)
                assert done == "data: [DONE]\n\n"
            return response.status, json.loads(text)
    except HTTPError as error:
        return error.code, json.load(error)


def asked(model, content="a", timeout=PATIENCE, **more):
    """The status and JSON of one question of a program to an episode's endpoint."""
    body = {"messages": [{"role": "user", "content": content}], **more}
    url = f"{model.base_url}/chat/completions"
    return asyncio.to_thread(posted, url, model.api_key, body, timeout)


async def status_of(model, **more):
    return (await asked(model, **more))[0]


def test_agents_that_speak_openais_interface_make_the_same_episodes(tokenizer):
    """What they send back is JSON, and calls have their arguments as text."""

    def agent(url, key, **more):
        messages = [{"role": "user", "content": "2 + 2?"}]
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 1.0}
        body |= more
        said = "delta" if more else "message"
        status, first = posted(f"{url}/chat/completions", key, body)
        [choice] = first["choices"]
        assert (status, choice["finish_reason"]) == (200, "tool_calls")
        [call] = choice[said]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 4}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        messages += [choice[said], result]
        status, second = posted(f"{url}/chat/completions", key, {**body, "max_tokens": 50})
        assert second["choices"][0][said]["content"] == "It is 4."
        assert second["choices"][0]["finish_reason"] == "stop"
        usage = second["usage"]
        assert usage["completion_tokens"] == 9
        assert usage["total_tokens"] == usage["prompt_tokens"] + 9
        return 1.0

    async def served(row, model):
        return await asyncio.to_thread(agent, model.base_url, model.api_key)

    async def streamed(row, model):
        return await asyncio.to_thread(agent, model.base_url, model.api_key, stream=True)

    inside, through, in_pieces = (
        run(tokenizer, function, TIGHT, "It is 4.", rows=[{"q": "2 + 2?"}] * 3)[0]
        for function in (calculates, served, streamed)
    )
    assert inside == through == in_pieces


WRONG_REQUESTS = """
temperature is 0.5 but in this run it is 1.0 => {"temperature": 0.5}
n is 2 but => {"n": 2}
stop is ['x'] but in this run it is False => {"stop": ["x"]}
message 1 has the role 'king' => {"messages": [{"role": "king", "content": "a"}]}
max_tokens is 0 but must be at least 1 => {"max_tokens": 0}
max_tokens is -1 but => {"max_completion_tokens": -1, "max_tokens": 5}
'float' object => {"max_tokens": 2.5}
"""


def test_wrong_requests_are_answered_as_openai_answers_them(tokenizer):
    async def asks(row, model):
        url, key = f"{model.base_url}/chat/completions", model.api_key
        for sentence, more in rows_of(WRONG_REQUESTS):
            status, answer = await asked(model, **json.loads(more))
            assert status == 400 and sentence in answer["error"]["message"], answer
            assert answer["error"]["type"] == "invalid_request_error"
        assert (await asyncio.to_thread(posted, f"{url}s", key, {}))[0] == 404
        for given, length, code in (("x", 9**9, 401), (key, 9**9, 413), (key, "x", 400)):
            assert f" {code} " in await asyncio.to_thread(answered, url, given, length)
        assert "KeyError: 'messages'" in str(await asyncio.to_thread(posted, url, key, {}))
        assert await status_of(model) == 200
        status, answer = await asked(model, content="a" * 3000)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        return 1.0

    [one], _ = run(tokenizer, asks, "a")
    assert one.scores == {f"{__name__}:episode": 1.0} and not one.ended


def answered(url, key, length):
    """The first line of the answer to a request whose body does not come."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.0\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), PATIENCE) as client:
        client.sendall(head.encode())
        return client.makefile().readline()


def test_a_byte_behind_a_request_costs_no_turn(tokenizer):
    """Some clients end a body with a line's end."""

    def posts(url, key, calls):
        parts, body = urlsplit(url), b'{"messages": [{"role": "user", "content": "a"}]}'
        head = f"POST {parts.path}/chat/completions HTTP/1.0\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((parts.hostname, parts.port), PATIENCE) as client:
            client.sendall(head.encode() + body)
            until(calls)
            client.sendall(b"\r\n")
            return client.makefile().readline()

    async def asks(row, model):
        given = model.base_url, model.api_key, lambda: model.calls
        assert " 200 " in await asyncio.to_thread(posts, *given)
        return 1.0

    [one], _ = run(tokenizer, asks, "used", pause=0.5)
    assert shown(tokenizer, one).endswith("[used<|im_end|>]")


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_an_answer_that_a_program_gave_up_on_is_not_trained(tokenizer, capfd, seconds):
    """Whether the event loop sees that before the answer comes or, after so many seconds, together with it."""

    async def retries(row, model):
        attempt = asyncio.ensure_future(asked(model, timeout=0.1))
        while not model.calls:
            await asyncio.sleep(0.001)
        time.sleep(seconds)
        with suppress(TimeoutError):
            await attempt
        await asked(model)
        return 1.0

    [one], sampler = run(tokenizer, retries, "nobody reads this", "used", pause=0.5)
    assert shown(tokenizer, one).endswith("[used<|im_end|>]") and len(sampler.seen) == 2
    assert not capfd.readouterr().err


def test_many_programs_may_call_at_once(tokenizer):
    async def asks(row, model):
        return await status_of(model)

    found, _ = run(tokenizer, asks, "a", rows=[{}] * 400)
    assert {one.scores[f"{__name__}:episode"] for one in found} == {200.0}


def test_one_endpoint_serves_all_rollouts_and_a_key_one_episode(tokenizer):
    seen = []

    async def asks(row, model):
        await model.complete([5])
        seen.append((model.base_url, model.api_key))
        url, earlier = f"{model.base_url}/chat/completions", seen[0][1]
        return (await asyncio.to_thread(posted, url, earlier, {}))[0]

    [one], _ = run(tokenizer, asks, "a", "b", rollouts=2)
    assert one.scores == {f"{__name__}:episode": 401.0}
    urls, keys = zip(*seen)
    assert len({*urls}) == 1 and len({*keys}) == 2


def test_a_program_may_fail_when_it_has_no_more_room(tokenizer):
    """The error is its own, and the episode has ended as others do."""

    async def asks(row, model):
        await model.complete([5])
        assert await status_of(model, content="a" * 3000) == 200

    [one], _ = run(tokenizer, asks, "a")
    assert one.scores == {f"{__name__}:episode": 0.0}


@pytest.mark.parametrize(
    "said", ['{"name": "calculate", "parameters": {"expression": "24 / 2"}}', "24 / 2 = 13"]
)
def test_the_example_gives_a_result_in_each_way(tokenizer, said):
    """By a call, or by checking the sums of a solution."""
    row = {"question": "Half of 24?"}
    [one], _ = run(tokenizer, calculator.episode, said, "12", rows=[row], reward="a:b")
    told = shown(tokenizer, one).split(f"[{said}<|im_end|>]")[1]
    assert "12" in told.split("[12")[0] and told.endswith("[12<|im_end|>]") and not one.scores
