"""Servers that sample for PPO: what is asked of them, and what their failures cost."""

import math
import ssl
import time
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
import torch

import ulysses.rl.outside_sampler as outside
import ulysses.rl.servers as servers
from tests import rows_of
from tests.harness import PATIENCE, free_port, until
from tests.sampling_server import SamplingServer
from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.sampler import SamplingOptions
from ulysses.rl.servers import LostError

STOP = 3
OPTIONS = SamplingOptions(6, temperature=0.7, top_p=0.9, stop_tokens=(STOP,), seed=5, batch=4)
PROMPTS = {n: torch.arange(4, 5 + n) for n in (0, 1, 5)}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    monkeypatch.setattr(servers, "MOST_BYTES", 1 << 20)


@pytest.fixture
def server():
    found = SamplingServer()
    yield found
    found.released.set()
    found.close()


def sampler(folder, *addresses, main=True, options=OPTIONS, **settings):
    def export(to):
        to.mkdir(exist_ok=True)
        (to / "config.json").write_text("{}")

    ppo = {"sampler": [*addresses], "sampler_timeout": PATIENCE, **settings}
    ppo = PpoSection(**{"sampler_folder": str(folder / "policy"), **ppo})
    parts = SimpleNamespace(
        mesh=SimpleNamespace(is_main=main),
        weights=SimpleNamespace(shape=SimpleNamespace(vocab_size=100)),
        export=export,
        served_weights=lambda device: [],
        renew=lambda: None,
        say=lambda text: None,
    )
    config = Config(stage="ppo", ppo=ppo, model={"dtype": "float32"})
    return OutsideSampler(config, parts, options, longest=20)


def serving(found):
    return [server.address for server in found.serving]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_prompts_go_out_and_tokens_come_back(tmp_path, server, dialect):
    found = sampler(tmp_path, f"{dialect}+{server.address}").sample(PROMPTS, 2)
    ends = [(len(c.tokens), c.ended) for c in found.values()]
    assert ends == [(2, True), (3, True), (6, False)]
    assert server.encodings == {"identity"}
    assert found[1].tokens[-1] == STOP and found[1].logps == pytest.approx([-1.0, -1.1, -1.2])
    bodies = [body for path, body in server.asked if path in ("/v1/completions", "/generate")]
    settings = [body if dialect == "vllm" else body["sampling_params"] for body in bodies]
    assert all(
        (s["temperature"], s["top_p"], s["top_k"], s["stop_token_ids"])
        == (0.7, 0.9, -1, [STOP])
        for s in settings
    )
    assert len({s.get("seed", s.get("sampling_seed")) for s in settings}) == 3
    # what a request omits, the generation_config.json of the served folder decides
    neutral = {"min_p", "presence_penalty", "frequency_penalty"}
    assert all({s[name] for name in neutral} == {0} for s in settings)
    assert all(s["repetition_penalty"] == 1 for s in settings)
    if dialect == "vllm":
        assert all(b["return_token_ids"] is True and b["ignore_eos"] is True for b in bodies)
    else:  # it would ignore stop_token_ids too
        assert not any("ignore_eos" in s for s in settings)


def test_a_stop_token_that_is_the_last_one_asked_for_ends_an_answer(tmp_path, server):
    server.fault = "late stop"
    found = sampler(tmp_path, f"sglang+{server.address}").sample(PROMPTS)
    assert [(len(c.tokens), c.ended) for c in found.values()] == [
        (2, True),
        (3, True),
        (6, True),
    ]


def test_weights_go_by_disk_to_every_server(tmp_path, server):
    addresses = [f"{dialect}+{server.address}" for dialect in ("sglang", "vllm")]
    sampler(tmp_path, *addresses).synchronise()
    folder = str((tmp_path / "policy").absolute())
    assert server.asked == [
        ("/update_weights_from_disk", {"model_path": folder}),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": folder}},
        ),
        ("/reset_prefix_cache", {}),
    ]
    server.asked.clear()
    sampler(tmp_path, addresses[0], main=False).synchronise()
    own = {"/update_weights_from_disk": {"model_path": "FOLDER", "flush_cache": True}}
    sampler(tmp_path, addresses[1], sampler_reload=own).synchronise()
    assert server.asked == [
        ("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
    ]
    server.fault = "reload"
    with pytest.raises(
        ValueError,
        match="/update_weights_from_disk did not take the new weights: .*no such file",
    ):
        sampler(tmp_path, addresses[0]).synchronise()


def test_a_reload_that_fails_is_not_repeated_and_says_why(tmp_path, server, monkeypatch):
    monkeypatch.setenv("ULYSSES_API_KEY", "planted-key")
    server.fault = "broken"
    why = r"/collective_rpc failed .HTTP 500 Internal Server Error \*{3} is right, but.nno weights"
    with pytest.raises(ValueError, match=why) as caught:
        sampler(tmp_path, f"vllm+{server.address}").synchronise()
    assert len(server.asked) == 1
    assert str(caught.value).count("x") == 300 - len("*** is right, but\nno weights fit: ")


# what a server tells of itself, and what is said before any work
FITTING = """
20 processed_logprobs =>
None processed_logprobs =>
much processed_logprobs =>
19 processed_logprobs => has room for 19 tokens of a prompt .*ppo.max_new_tokens is 20; start it with more
4096 raw_logprobs => returns 'raw_logprobs', .*; start it with --logprobs-mode processed_logprobs
"""


@pytest.mark.parametrize("told, sentence", rows_of(FITTING))
def test_servers_are_asked_what_they_are_before_the_first_rollout(
    tmp_path, server, told, sentence
):
    length, mode = told.split()
    server.length = int(length) if length.isdecimal() else {"None": None}.get(length, length)
    server.model = {"dtype": "torch.float32", "logprobs_mode": mode}
    found = sampler(tmp_path, f"vllm+{server.address}")
    if not sentence:
        found.synchronise()
        assert server.folder == str(tmp_path / "policy")
        return
    with pytest.raises(ValueError, match=sentence):
        found.synchronise()
    assert not server.asked and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("dtype, allowed", [("torch.float32", 0.01), ("torch.bfloat16", 0.2)])
def test_a_server_with_other_weights_is_refused(tmp_path, server, dtype, allowed):
    """By the first rollout; top_p moves log-probabilities by at most its own logarithm."""
    server.model = {"dtype": dtype}
    allowed -= math.log(OPTIONS.top_p)

    def synchronised():
        found = sampler(tmp_path, f"vllm+{server.address}")
        found.synchronise()
        return found

    for gap in (allowed * 1.01, math.nan):
        sentence = f"differ by {gap:.3g} per token .at most {allowed:.3g} is rounding.; look"
        with pytest.raises(ValueError, match=sentence):
            synchronised().check_gap(gap)
    found = synchronised()
    found.check_gap(allowed * 0.99)
    found.check_gap(2.0)  # of later rollouts, when the metric tells


# What goes wrong, how often the first prompt is asked for, and what is said.
FAULTS = """
hang => 1 => failed .timed out after 0.5 s.; look at its log
drip => 1 => failed .timed out after 0.5 s.; look at its log
slow head => 1 => failed .timed out after 0.5 s.; look at its log
endless => 3 => answered more than 1 MiB
redirect => 3 => HTTP 307
cut => 3 => peer closed connection
no HTTP => 3 => RemoteProtocolError
refuse => 3 => HTTP 503
garbage => 3 => Expecting value
deep => 1 => failed .it answered JSON that is nested too deeply.; look at its log
gzip => 3 => failed .it packed its answer .Content-Encoding., which was not asked for
gzip, gzip => 3 => failed .it packed its answer
deflate => 3 => failed .it packed its answer
gone => 0 => refused
broken => 3 => HTTP 500 Internal Server Error None is right
no fields => 1 => answered prompt . with JSON of another form .KeyError..meta_info
"""


@pytest.mark.parametrize("fault, attempts, complaint", rows_of(FAULTS))
def test_a_servers_fault_is_one_sentence(tmp_path, server, fault, attempts, complaint):
    server.fault = fault
    if fault == "gone":
        server.close()
    timeout = 0.5 if fault in ("hang", "drip", "slow head") else PATIENCE
    with pytest.raises(ValueError, match=complaint):
        sampler(tmp_path, f"sglang+{server.address}", sampler_timeout=timeout).sample(PROMPTS)

    def asked():
        return [body["input_ids"] for _, body in server.asked].count(PROMPTS[0].tolist())

    until(
        lambda: asked() >= int(attempts)
    )  # a busy server reads what a client asked that has left
    assert asked() == int(attempts)


# an answer that cannot be trained on, and what is said
ANSWERS = """
nan => log-probabilities that are no numbers, not finite or above 0
numbers as text => log-probabilities that are no numbers
no stop token => an end but without the token that ends it
abort => an answer that it broke off .its finish reason is 'abort'.
short => 1 of 6 tokens and no end, as if it had no room for more; start it with more
unknown tokens => tokens that are none of the 100 of the vocabulary
tokens as text => tokens that are none of the 100 of the vocabulary
goes on => an answer that goes on behind a token that ends it
"""


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("fault, complaint", rows_of(ANSWERS))
def test_an_answer_that_cannot_be_trained_on_is_refused(
    tmp_path, server, dialect, fault, complaint
):
    server.fault = fault
    with pytest.raises(
        ValueError, match=f"{server.address} answered prompt 0 with {complaint}"
    ):
        sampler(tmp_path, f"{dialect}+{server.address}").sample({0: PROMPTS[0]})
    assert len(server.asked) == 1


@pytest.mark.parametrize("fault, said", [("ended", "ConnectError"), ("ending", "HTTP 503")])
def test_a_server_that_was_told_to_end_is_told_while_it_keeps_a_request(
    tmp_path, server, monkeypatch, fault, said
):
    monkeypatch.setattr(outside, "LOOK_SECONDS", 0.5)
    server.fault = fault
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"{server.address}/health failed .{said}"):
        sampler(tmp_path, f"vllm+{server.address}").sample({0: PROMPTS[0]})
    assert len(server.asked) == 1 and time.monotonic() - began < PATIENCE / 2


def test_a_busy_server_that_knows_no_health_is_waited_for(tmp_path, server, monkeypatch):
    monkeypatch.setattr(outside, "LOOK_SECONDS", 0.5)
    server.fault = "busy"
    assert len(sampler(tmp_path, f"vllm+{server.address}").sample(PROMPTS)) == 3


def test_what_a_server_was_asked_that_has_ended_another_one_is_asked(tmp_path, server):
    gone, said = f"vllm+http://127.0.0.1:{free_port()}", []
    found = sampler(tmp_path, f"vllm+{server.address}", gone)
    found.parts.say = said.append
    assert [len(c.tokens) for c in found.sample(PROMPTS).values()] == [2, 3, 6]
    assert len(found.sample(PROMPTS)) == 3 and serving(found) == [f"vllm+{server.address}"]
    [warning] = said
    assert "/v1/completions failed (ConnectError" in warning
    assert warning.endswith("; the other servers are asked in its place")
    server.close()
    with pytest.raises(ValueError, match=f"{server.address}/v1/completions failed .*continue"):
        found.sample(PROMPTS)


@pytest.mark.parametrize("end", ["when it has the weights", "after the last answer"])
def test_without_a_server_that_ends_between_two_requests_the_others_serve(
    tmp_path, server, end
):
    with closing(SamplingServer()) as other:
        addresses, said = [f"vllm+{one.address}" for one in (server, other)], []
        found, left, reply = sampler(tmp_path, *addresses), [*PROMPTS], other.reply
        found.parts.say = said.append

        def renew():
            left.pop()
            if not left:
                other.close()

        def ends(path, body):
            if path == "/reset_prefix_cache":  # the last call of those that bring weights
                other.close()
            return reply(path, body)

        if end == "after the last answer":
            found.parts.renew = renew
        else:
            other.reply = ends
        found.synchronise()
        assert len(found.sample(PROMPTS)) == 3 and serving(found) == addresses[:1]
    [warning] = said
    assert "failed (ConnectError" in warning and other.address in warning


def test_servers_that_were_lost_by_different_ranks_leave_none(tmp_path, server, monkeypatch):
    addresses = [f"{dialect}+{server.address}" for dialect in ("vllm", "sglang")]
    found = sampler(tmp_path, *addresses)
    lost = [({one: LostError(f"{one} is away")}, True) for one in found.servers]
    monkeypatch.setattr(outside, "gather", lambda value: lost)
    with pytest.raises(LostError, match="is away"):
        found.synchronise()


def test_a_server_that_ended_between_two_exports_is_asked_after_the_next_and_judged_again(
    tmp_path, server
):
    with closing(SamplingServer()) as other:
        addresses = [f"vllm+{one.address}" for one in (server, other)]
        found = sampler(tmp_path, *addresses, sampler_sync_every=3)
        found.synchronise(0)
        found.check_gap(0.0)
        server.fault = "ending"
        found.synchronise(1)
        server.fault = ""
        found.synchronise(2)
        assert serving(found) == addresses[1:] and not found.wants_gap
        server.fault = "starting"
        found.synchronise(3)
        assert serving(found) == addresses[1:] and not found.wants_gap
        server.fault, server.model["dtype"] = "", "torch.bfloat16"
        found.synchronise(6)
    assert serving(found) == addresses and found.wants_gap and not found.float32
    reloads = [path for path, _ in server.asked]
    assert reloads.count("/collective_rpc") == 2


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_that_was_started_again_between_two_exports_is_asked_no_more(
    tmp_path, server, dialect
):
    with closing(SamplingServer()) as other:
        addresses = [f"{dialect}+{one.address}" for one in (server, other)]
        found = sampler(tmp_path, *addresses, sampler_sync_every=3)
        found.synchronise(0)
        server.start_again()
        with pytest.raises(ValueError, match=f"{server.address} holds other weights than it"):
            found.sample(PROMPTS)
        found.synchronise(1)
        assert serving(found) == addresses[1:] and len(found.sample(PROMPTS, 1)) == 3
        other.start_again()
        with pytest.raises(ValueError, match=f"{other.address} holds other weights than it"):
            found.sample(PROMPTS, 1)
        with pytest.raises(LostError, match="started again, or serves another run, too"):
            found.synchronise(2)


@pytest.mark.parametrize("sync, said", [("disk", "read .*policy"), ("gloo", "taken what was")])
def test_the_sentence_about_other_weights_says_how_they_came(tmp_path, sync, said):
    found = sampler(tmp_path, "vllm+http://host:1", sampler_sync=sync)
    found.is_current = True
    with pytest.raises(ValueError, match=f"whether they have {said}"):
        found.check_gap(5.0)


def test_a_server_that_comes_back_is_asked_again(tmp_path, server, monkeypatch):
    server.fault = "refuse"
    monkeypatch.setattr(servers.time, "sleep", lambda _: setattr(server, "fault", ""))
    found = sampler(tmp_path, f"sglang+{server.address}").sample({0: PROMPTS[0]})
    assert len(found[0].tokens) == 2


def test_requests_share_the_certificates(server, monkeypatch):
    """Reading them takes the processor longer than a request, and every answer is one."""
    read, create = [], ssl.create_default_context
    monkeypatch.setattr(
        ssl, "create_default_context", lambda **given: read.append(given) or create(**given)
    )
    for _ in range(3):
        servers.call(f"{server.address}/health", timeout=PATIENCE)
    assert len(read) <= 1


def test_a_server_that_cannot_be_reached_in_time_is_asked_once(tmp_path, monkeypatch):
    asked = []

    def unreachable(*_, timeout, **__):
        asked.append(timeout)
        raise httpx.ConnectTimeout("timed out")

    monkeypatch.setattr(servers.httpx, "stream", unreachable)
    with pytest.raises(ValueError, match="timed out"):
        sampler(tmp_path, "sglang+http://far:1", sampler_timeout=7.0).sample({0: PROMPTS[0]})
    assert asked.count(7.0) == 1  # other requests are an earlier test's
