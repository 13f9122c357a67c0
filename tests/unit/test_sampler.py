"""The sampler: the model's own distribution, drawn by a key that no batch and no process changes."""

import numpy as np
import pytest
import torch

from models.arch import ModelConfig
from models.decoder import CausalLM, init_weights
from models.sampler import Sampler, SamplingOptions, cache_bytes, uniforms
from tests.engine_case import SHAPE
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh

QWEN = ModelConfig.from_hf(
    {"model_type": "qwen2", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
     "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
     "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": True, "initializer_range": 0.2}
)  # fmt: skip


def made(shape: ModelConfig) -> tuple[CausalLM, Sampler]:
    model = CausalLM(shape, None, attention="reference")
    init_weights(model, seed=1)
    if shape.attention_bias:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(".bias"):
                    p.normal_(generator=torch.Generator().manual_seed(2))
    return model, Sampler(shape, {n: p.detach() for n, p in model.named_parameters()})


def prompts(count: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 97, int(n)).tolist() for n in draw.integers(1, 30, count)]


@pytest.mark.parametrize("shape", [SHAPE, QWEN], ids=["llama", "qwen2 tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_are_the_models_own(shape, temperature):
    """What the sampler reports is what the training model computes for the same packed tokens."""
    model, sampler = made(shape)
    asked = prompts(9)
    found = sampler.sample(asked, SamplingOptions(12, temperature, top_k=20, stop_tokens=(5, 6)), batch=4)
    assert {c.ended for c in found} == {True, False}
    sequences = [
        Sequence(torch.tensor(p + c.tokens), torch.tensor([0.0] * len(p) + [1.0] * len(c.tokens)))
        for p, c in zip(asked, found)
    ]
    batch = pack_shard(sequences, ParallelMesh(1))
    logps = model(batch, temperature=temperature).logps[batch.loss_weights != 0]
    torch.testing.assert_close(logps.detach(), torch.tensor([x for c in found for x in c.logps]), rtol=2e-5, atol=2e-5)


def test_samples_depend_on_no_batch_and_no_process():
    """Any batch size, any order and any subset of the prompts gives every prompt the same tokens."""
    _, sampler = made(SHAPE)
    asked, options = prompts(13), SamplingOptions(10, top_p=0.9, stop_tokens=(5,))
    whole = [c.tokens for c in sampler.sample(asked, options, seed=3, rollout=2, batch=64)]
    for batch in (1, 3, 13):
        assert [c.tokens for c in sampler.sample(asked, options, seed=3, rollout=2, batch=batch)] == whole
    for ranks in (2, 3):
        for rank in range(ranks):
            mine = list(range(13))[rank::ranks][::-1]
            found = sampler.sample([asked[i] for i in mine], options, seed=3, rollout=2, keys=mine, batch=4)
            assert [c.tokens for c in found] == [whole[i] for i in mine]
    for other in ({"seed": 4, "rollout": 2}, {"seed": 3, "rollout": 3}):
        assert [c.tokens for c in sampler.sample(asked, options, **other)] != whole


def test_draws_follow_the_distribution():
    """4,000 draws of one prompt: every token's share lies within five standard errors of its probability."""
    model, sampler = made(SHAPE)
    count, prompt = 4000, [3, 14, 15, 92]
    found = sampler.sample([prompt] * count, SamplingOptions(1, temperature=1.3), batch=1000)
    share = np.bincount([c.tokens[0] for c in found], minlength=97) / count
    rows = [Sequence(torch.tensor([*prompt, v]), torch.tensor([0.0] * 4 + [1.0])) for v in range(97)]
    batch = pack_shard(rows, ParallelMesh(1))
    p = model(batch, temperature=1.3).logps[batch.loss_weights != 0].exp().detach().numpy()
    assert abs(p.sum() - 1) < 1e-5
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / count) + 1e-3).all()


@pytest.mark.parametrize("limit", [1, 7, 16, 40])
def test_looking_rarely_changes_nothing(limit):
    """What a finished sequence draws until the next look is forgotten, also beyond the last token asked for."""
    _, sampler = made(SHAPE)
    asked, options = prompts(13), SamplingOptions(limit, stop_tokens=(5, 6, 7, 8))
    often, *rarely = (sampler.sample(asked, options, seed=3, batch=8, look=look) for look in (1, 4, 16, 64))
    assert len({len(c.tokens) for c in often}) > min(limit - 1, 2)
    for found in rarely:
        assert [(c.tokens, c.ended) for c in found] == [(c.tokens, c.ended) for c in often]
        for a, b in zip(found, often):
            np.testing.assert_allclose(a.logps, b.logps, rtol=1e-5, atol=1e-6)


def test_uniforms_are_uniform_and_differ_in_every_key():
    u = np.concatenate([uniforms(0, r, range(100), t) for r in range(10) for t in range(10)])
    assert len(np.unique(u)) == len(u) and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.02 and abs(u.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.05
    assert not (uniforms(1, 2, [3], 4) == uniforms(2, 1, [3], 4)).any()


def test_truncation_of_the_distribution():
    _, sampler = made(SHAPE)
    asked = prompts(40)
    greedy = [c.tokens for c in sampler.sample(asked, SamplingOptions(4, temperature=0.0))]
    assert [c.tokens for c in sampler.sample(asked, SamplingOptions(4, top_k=1))] == greedy
    assert [c.tokens for c in sampler.sample(asked, SamplingOptions(4, top_p=1e-9))] == greedy
    assert [c.tokens for c in sampler.sample(asked, SamplingOptions(4))] != greedy
    few = sampler.sample([asked[0]] * 300, SamplingOptions(1, temperature=3.0, top_k=3))
    assert len({c.tokens[0] for c in few}) == 3


def test_stop_token_ends_a_completion_and_belongs_to_it():
    _, sampler = made(SHAPE)
    free = sampler.sample([[1, 2, 3]], SamplingOptions(8))[0]
    assert len(free.tokens) == 8 and not free.ended
    stop = free.tokens[3]
    at = free.tokens.index(stop)
    found = sampler.sample([[1, 2, 3]], SamplingOptions(8, stop_tokens=(stop,)))[0]
    assert found.ended and found.tokens == free.tokens[: at + 1] and len(found.logps) == at + 1
    assert sampler.sample([[1, stop]], SamplingOptions(1))[0].tokens  # a stop token inside the prompt ends nothing


def test_refusals_and_sizes():
    with pytest.raises(ValueError, match="has no tokens"):
        made(SHAPE)[1].sample([[]], SamplingOptions(1))
    assert cache_bytes(SHAPE, 3, 10, torch.bfloat16) == 2 * 2 * 3 * 10 * 2 * 8 * 2
