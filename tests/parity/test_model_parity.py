"""Log-probabilities, gradients and scores equal transformers' classes of every family on tiny random models."""

from typing import Any

import pytest
import torch

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.expert_files import as_stored
from models.scored import RewardModel
from tests.family_case import FAMILIES, NO_CLASSIFIER, raw
from tests.memory_case import BIASES
from tests.model_folder import init_weights
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import sequence_last

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LENGTHS = (5, 33, 1, 18)
# an original window of 8 tokens, so that the sequences are four times as long
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}


LLAMA = raw("llama", rope_theta=5e5, rope_scaling=SCALING, rms_norm_eps=1e-5)
QWEN2 = raw("qwen2", rope_theta=1e6, tie_word_embeddings=True)
QWEN3 = raw("qwen3", rope_theta=1e6, head_dim=12)
MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip
LINEAR = {"type": "linear", "factor": 4.0}
RAW = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "llama with biases": raw("llama", attention_bias=True),
    "qwen3": QWEN3,
    "qwen3 tied": QWEN3 | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe, some layers dense": MOE | {"mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_moe, every second layer": MOE
    | {"decoder_sparse_step": 2, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "mistral": raw("mistral", rope_theta=1e6, sliding_window=None, head_dim=12),
    "yarn": LLAMA | {"rope_scaling": YARN},
    "yarn with attention_factor": QWEN2 | {"rope_scaling": YARN | {"attention_factor": 1.4}},
    "qwen3 with yarn": QWEN3 | {"rope_scaling": YARN},
    # transformers' float32 sums of decays are off by up to 3e-5 on A_log, where ours are by 2e-6: test_families.py
    # judges linear attention by float64
    **{name: shape for name, shape in FAMILIES.items() if "linear_key_head_dim" not in shape},
    "linear": QWEN2 | {"max_position_embeddings": 8, "rope_scaling": LINEAR},
}


def batch_of(rows: list[torch.Tensor]) -> ShardedBatch:
    return pack_shard([Sequence(row, torch.ones(len(row))) for row in rows], ParallelMesh())


def random_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (length,), generator=generator) for length in LENGTHS]


def filled(model: Any) -> Any:
    """Random start, with biases that are not zero and norms of heads that are not one."""
    init_weights(model, seed=3)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            scale = 0.01 if "o_proj" in name else BIASES.get(name.rpartition(".")[2], 0.1)
            parameter.data.normal_(0, scale, generator=generator)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
            parameter.data -= float(model.config.family.centred_norms)
    return model


def hf_twin(model: Any, raw: dict[str, Any], *, reward: bool = False) -> Any:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    config = AutoConfig.for_model(**model.config.to_hf(dtype="float32", reward=reward))
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    twin = auto.from_config(config, attn_implementation="eager")
    weights = model.state_dict()
    # transformers 4 has a module for every expert
    fused = weights.keys() <= twin.state_dict().keys()
    twin.load_state_dict(weights if fused else dict(as_stored(weights.items())))
    return twin.eval()


def assert_equal_gradients(model: Any, twin: Any) -> None:
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    ours = {name: p.grad for name, p in model.named_parameters()}
    if ours.keys() != theirs.keys():  # an expert that no token meets has no gradient there
        ours = dict(as_stored(ours.items()))
        theirs = {name: ours[name] * 0 if g is None else g for name, g in theirs.items()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        error = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-9)
        assert error < 1e-5, (name, float(error))


@pytest.mark.parametrize("kind", RAW)
def test_logprobs_and_gradients(kind: str) -> None:
    model = filled(CausalLM(ModelConfig.from_hf(RAW[kind])))
    twin = hf_twin(model, RAW[kind])
    rows = random_rows()
    out = model(batch_of(rows), entropy=True, lse=True)
    weights = torch.randn(out.logps.shape, generator=torch.Generator().manual_seed(1))
    (out.logps * weights).sum().backward()
    start = 0
    for row in rows:
        logits = twin(row[None]).logits[0, :-1].float()
        expected = logits.log_softmax(-1)
        logps = expected.gather(1, row[1:, None])[:, 0]
        at = slice(start, start + len(row) - 1)
        torch.testing.assert_close(out.logps[at], logps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            out.entropy[at], -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(out.lse[at], logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert out.logps[start + len(row) - 1] == 0
        if len(row) > 1:
            (logps * weights[at]).sum().backward()
        start += len(row)
    assert_equal_gradients(model, twin)


@pytest.mark.parametrize("kind", [kind for kind in RAW if kind not in NO_CLASSIFIER])
def test_reward_scores(kind: str) -> None:
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

    classes = AutoModelForSequenceClassification._model_mapping
    known = CONFIG_MAPPING[RAW[kind]["model_type"]] in classes.keys()
    # the oldest transformers lacks some of the newest one's classes
    assert known or transformers.__version__ < "5"
    if not known:
        return
    model = filled(RewardModel(ModelConfig.from_hf(RAW[kind])))
    model.score.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    twin = hf_twin(model, RAW[kind], reward=True)
    rows = random_rows()
    batch = batch_of(rows)
    scores = sequence_last(model(batch), batch)
    expected = torch.stack([twin(row[None]).logits[0, 0] for row in rows])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    scores.square().sum().backward()
    expected.square().sum().backward()
    assert_equal_gradients(model, twin)


@pytest.mark.parametrize("kind", RAW)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(kind: str) -> None:
    model = filled(CausalLM(ModelConfig.from_hf(RAW[kind])))
    twin = hf_twin(model, RAW[kind])
    row = random_rows()[1]
    exact = twin(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    theirs = (
        twin.bfloat16()(row[None])
        .logits[0, :-1]
        .float()
        .log_softmax(-1)
        .gather(1, row[1:, None])[:, 0]
    )
    ours = model.bfloat16()(batch_of([row])).logps[:-1]
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() + 1e-3


def test_positions_without_weight_cost_nothing_and_an_empty_head_still_runs() -> None:
    model = filled(CausalLM(ModelConfig.from_hf(RAW["llama"])))
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    row = random_rows()[1]
    weights = torch.zeros(len(row))
    weights[10:13] = 1
    out = model(pack_shard([Sequence(row, weights)], ParallelMesh()))
    full = model(batch_of([row]))
    torch.testing.assert_close(out.logps[9:12], full.logps[9:12])
    assert out.logps.count_nonzero() == 3
    empty = model(pack_shard([], ParallelMesh()))
    empty.logps.sum().backward()
    assert seen == [3, len(row) - 1, 0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
