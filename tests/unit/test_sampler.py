"""The sampler: the model's own distribution, drawn by a key that no batch and no process changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.arch import ModelConfig
from models.families import RopeScaling
from tests.engine_case import MOE, QWEN3, SHAPE
from tests.family_case import FAMILIES as HYBRIDS
from tests.memory_case import build
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.sampler import Requests, Sampler, SamplingOptions, fitting_slots

QWEN = replace(
    SHAPE, model_type="qwen2", num_attention_heads=6, head_dim=4, attention_bias=True, tie_word_embeddings=True
)  # fmt: skip
HYBRID, SINKS = (
    ModelConfig.from_hf(HYBRIDS[name] | {"vocab_size": 97}) for name in ("qwen3_5", "gpt-oss")
)
YARN = replace(SHAPE, rope_scaling=RopeScaling("yarn", 4.0, 10))


def weights_of(model):
    return {n: p.detach() for n, p in model.named_parameters()}


def prompts(count):
    draw = np.random.default_rng(0)
    return [draw.integers(0, 97, int(n)).tolist() for n in draw.integers(1, 30, count)]


def sampled(
    model, asked, new_tokens, *, graphs=True, look=0, prefill=8192, progress=lambda tokens: None, **options
):  # fmt: skip
    """One completion per prompt, whose key is its place."""
    requests = Requests(dict(enumerate(asked)), new_tokens)
    work = SamplingOptions(new_tokens, **options), 0, progress, graphs, look, prefill
    Sampler(model.config, weights_of(model), requests, *work).sample()
    return [*requests.completions.values()]


def exact(model, asked, answers, temperature):
    """The training model's log-probabilities of all answers' tokens, packed."""
    pairs = zip(asked, answers, strict=True)
    rows = [Sequence([*p, *a], [0.0] * len(p) + [1.0] * len(a)) for p, a in pairs]
    batch = pack_shard(rows, ParallelMesh())
    return model(batch, temperature=temperature).logps[batch.loss_weights != 0].detach()


def next_token_logps(model, prompt, temperature=1.0):
    """The training model's log-probabilities of every token after a prompt."""
    return exact(model, [prompt] * 97, [[token] for token in range(97)], temperature)


FAMILIES = {"llama": SHAPE, "qwen2 tied": QWEN, "yarn": YARN, "qwen3": QWEN3, "qwen3_moe": MOE}


@pytest.mark.parametrize(
    "shape, temperature", zip(FAMILIES.values(), (1.0, 0.7, 1.0, 0.9, 0.8)), ids=FAMILIES
)
def test_logps_are_the_models_own(shape, temperature):
    """What the sampler reports is what the training model computes for the same packed tokens.

    A stop token ends an answer and belongs to it.
    """
    model = build(config=shape)
    asked = prompts(9)
    options = {"top_k": 20, "stop_tokens": (5, 6), "batch": 4}
    found = sampled(model, asked, 12, temperature=temperature, **options)
    assert {c.ended for c in found} == {True, False}
    for c in found:
        stops = [token in (5, 6) for token in c.tokens]
        assert not any(stops[:-1]) and stops[-1] == c.ended
        assert c.ended or len(c.tokens) == 12
    logps = exact(model, asked, [c.tokens for c in found], temperature)
    reported = torch.tensor([x for c in found for x in c.logps])
    torch.testing.assert_close(logps, reported, rtol=2e-5, atol=2e-5)


def test_samples_depend_on_no_batch_and_no_process():
    """Any batch size, any order and any subset of the prompts gives every prompt the same tokens."""
    model, asked = build(config=SHAPE), prompts(13)

    def tokens(keys=range(13), seed=3, rollout=2, batch=4):
        drawing = {"top_p": 0.9, "stop_tokens": (5,), "seed": seed}
        options = SamplingOptions(10, batch=batch, **drawing)
        requests = Requests({i: asked[i] for i in keys}, 10)
        Sampler(SHAPE, weights_of(model), requests, options, rollout).sample()
        return {i: each.tokens for i, each in requests.completions.items()}

    whole = tokens()
    assert all(tokens(batch=batch) == whole for batch in (1, 3, 64))
    for rank in range(3):
        mine = range(13)[rank::3][::-1]
        assert tokens(mine) == {i: whole[i] for i in mine}
    assert whole not in (tokens(seed=4), tokens(rollout=3))


class Late(Requests):
    """Ask for two completions, and for another one whenever one has come; equal prompts lie far from each other."""

    is_open = True

    def take(self, wait):
        assert not wait or self._new or all(c.tokens for c in self.completions.values())
        ready = 2 + sum(bool(c.tokens) for c in self.completions.values())
        begun = len(self.completions) - len(self._new)
        new, self._new = self._new[: ready - begun], self._new[ready - begun :]
        self.is_open = bool(self._new)
        return new


@pytest.mark.parametrize("shape", [SHAPE, HYBRID, SINKS], ids=["llama", "hybrid", "sinks"])
def test_requests_that_come_later_are_answered_alike(shape):
    """They take slots that others have left or that were closed up; limits are those of each."""
    model, asked = build(config=shape), prompts(6) * 2
    options = SamplingOptions(9, stop_tokens=(5, 6, 7), seed=3, batch=4)
    found = []
    for kind in (Requests, Late):
        requests = kind(dict(enumerate(asked)), 9)
        requests._new = [r._replace(limit=3 + r.number % 7) for r in requests._new]
        Sampler(shape, weights_of(model), requests, options).sample()
        found.append([c.tokens for c in requests.completions.values()])
    assert found[0] == found[1]
    assert all(len(tokens) <= 3 + n % 7 for n, tokens in enumerate(found[1]))


def test_draws_follow_the_distribution():
    """4,000 draws of one prompt: every token's share lies within five standard errors of its probability."""
    model = build(config=SHAPE)
    count, prompt = 4000, [3, 14, 15, 92]
    found = sampled(model, [prompt] * count, 1, temperature=1.3, batch=1000)
    share = np.bincount([c.tokens[0] for c in found], minlength=97) / count
    p = next_token_logps(model, prompt, 1.3).exp().numpy()
    assert abs(p.sum() - 1) < 1e-5
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / count) + 1e-3).all()


DEVICES = [("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device, graphs", DEVICES, ids=["plain", "graphs"])
@pytest.mark.parametrize(
    "shape", [SHAPE, MOE, HYBRID, SINKS], ids="model_type={0.model_type}".format
)
def test_slots_shared_prompts_and_chunks_change_nothing(device, graphs, shape):
    """Slots that are refilled, prompts that answers share, chunks of prompts, CUDA graphs: the same as each alone."""
    model = build(config=shape).to(device)
    asked = [p for p in prompts(9) for _ in range(3)]
    # On GPUs, another number of slots moves log-probabilities by 2e-6. No draw of this seed is so near top_p's edge.
    options = {"stop_tokens": (5, 6, 7), "temperature": 0.8, "top_p": 0.95, "seed": 1}
    alone = sampled(model, asked, 20, batch=1, graphs=False, **options)
    assert len({len(c.tokens) for c in alone}) > 5
    counted = []
    for batch, prefill, look in ((5, 8192, 16), (8, 7, 1), (64, 50, 64)):
        counted.clear()
        work = {"batch": batch, "prefill": prefill, "look": look, "graphs": graphs}
        found = sampled(model, asked, 20, progress=counted.append, **work, **options)
        for one, many in zip(alone, found, strict=True):
            assert (one.tokens, one.ended) == (many.tokens, many.ended)
            np.testing.assert_allclose(one.logps, many.logps, rtol=1e-5, atol=1e-5)
        assert sum(counted) == sum(len(c.tokens) for c in alone)
    (fewest,) = sampled(model, [[3]], 1, graphs=graphs)  # two columns of the cache
    assert len(fewest.tokens) == 1


def test_slots_that_fit():
    """As many as their keys, values and drawing leave room for, besides a part of the prompts."""
    memory = 1 << 30, 10 << 30, 1
    one, ten, none = (fitting_slots(SHAPE, 100, torch.float32, free) for free in memory)
    assert 0 <= one < ten and none < 1
    cached = 2 * 100 * 4 * SHAPE.num_hidden_layers * SHAPE.num_key_value_heads
    assert (ten - one) * cached * SHAPE.head_dim < 9 << 30


def test_truncation_of_the_distribution():
    model = build(config=SHAPE)
    asked = prompts(20)
    likeliest = [int(next_token_logps(model, prompt).argmax()) for prompt in asked]
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {}):
        found = sampled(model, asked, 1, **options)
        drawn = [c.tokens[0] for c in found]
        assert (drawn == likeliest) == bool(options)
        # as the trainer computes them: no weight of importance has to know what was kept
        whole = [next_token_logps(model, prompt)[t] for prompt, t in zip(asked, drawn)]
        np.testing.assert_allclose([c.logps[0] for c in found], whole, atol=1e-5)
    few = sampled(model, [asked[0]] * 300, 1, temperature=3.0, top_k=3)
    assert len({c.tokens[0] for c in few}) == 3
