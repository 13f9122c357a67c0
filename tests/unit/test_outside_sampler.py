"""Servers that sample for PPO: what is asked of them, and what their failures cost."""

import httpx
import pytest
import torch

import ulysses.rl.servers as servers
from tests import rows_of
from tests.harness import PATIENCE, until
from tests.sampling_server import SamplingServer
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.sampler import SamplingOptions

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
    found.close()


def sampler(folder, *addresses, main=True, **options):
    def export(to):
        to.mkdir(exist_ok=True)
        (to / "config.json").write_text("{}")

    config = PpoSection(sampler=[*addresses], **{"sampler_timeout": PATIENCE, **options})
    return OutsideSampler(config, export, folder / "policy", main, OPTIONS)


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
    if dialect == "vllm":
        assert all(b["return_token_ids"] is True for b in bodies)


def test_weights_go_by_disk_to_every_server(tmp_path, server):
    addresses = [f"{dialect}+{server.address}" for dialect in ("sglang", "vllm")]
    sampler(tmp_path, *addresses).synchronise()
    folder = str((tmp_path / "policy").absolute())
    assert server.asked == [
        ("/update_weights_from_disk", {"model_path": folder}),
        ("/collective_rpc", {"method": "reload_weights"}),
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
nan => 1 => answered prompt 0 with log-probabilities that are not finite or above 0
no stop token => 1 => an end but without the token that ends it
gone => 0 => refused
no fields => 1 => answered prompt 0 with JSON of another form .KeyError..meta_info
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


def test_a_server_that_comes_back_is_asked_again(tmp_path, server, monkeypatch):
    server.fault = "refuse"
    monkeypatch.setattr(servers.time, "sleep", lambda _: setattr(server, "fault", ""))
    found = sampler(tmp_path, f"sglang+{server.address}").sample({0: PROMPTS[0]})
    assert len(found[0].tokens) == 2


def test_a_server_that_cannot_be_reached_in_time_is_asked_once(tmp_path, monkeypatch):
    asked = []

    def unreachable(*_, timeout, **__):
        asked.append(timeout)
        raise httpx.ConnectTimeout("timed out")

    monkeypatch.setattr(servers.httpx, "stream", unreachable)
    with pytest.raises(ValueError, match="timed out"):
        sampler(tmp_path, "sglang+http://far:1", sampler_timeout=7.0).sample({0: PROMPTS[0]})
    assert asked.count(7.0) == 1  # other requests are an earlier test's
