"""A quantised base: adapters' gradients are those of the matrices that the bytes stand for, on every topology."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from tests.e2e.launch import metrics, ranks, tiny
from tests.engine_case import HYBRID, Case
from tests.stage_case import STAGE_CASES, compared

# Adapters of rank 16 are a third as large beside the weights as those of rank 3, with which states of linear attention
# magnify float32's rounding to 1e-5 on one process and on four, and in transformers to 1e-4.
LINEAR = {
    "shape": HYBRID,
    "lora_rank": 16,
    "lora_targets": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "down_proj"),
}
CASES = [
    ("dpo", 3, 3, "none", False, {}),
    ("kto", 2, 1, "keep_attention", True, {}),
    ("sft", 4, 2, "block", False, {}),
    # and of the projections of linear attention
    ("sft", 2, 2, "keep_attention", False, LINEAR),
    ("dpo", 4, 4, "none", True, LINEAR),
]


@pytest.mark.parametrize("stage, world, sp, recompute, resident, more", CASES)
def test_gradients_are_those_of_the_dequantised_matrices(
    stage, world, sp, recompute, resident, more
):
    """With the base in shards, or with all of it on every rank."""
    case = Case(stage, sp=sp, examples=5, seed=2, lora_rank=3, quantize="nf4")
    more = {"options": STAGE_CASES[stage].options, "engine": {"resident": resident}, **more}
    compared(replace(case, recompute=recompute, **more), world)


def test_ppo_on_a_quantised_base(tmp_path):
    """The reference is the base with the adapters off; the sampler reads the matrices that the bytes stand for, with
    the adapters added; and the adapters learn."""
    settings = """
    --model.quantize nf4 --model.lora.rank 4 --optimizer.lr 3e-3 --ppo.epochs 2 --ppo.minibatches 1
    --ppo.max_new_tokens 16 --parallel.sequence_parallel_size 2 --run.steps 3
    """
    line = tiny("ppo", tmp_path / "run", settings)
    ranks(line, 2)
    steps = metrics(tmp_path / "run")
    assert [step["rollout"] for step in steps] == [0, 0, 1]
    assert abs(steps[0]["objective/kl"]) < 1e-4 and abs(steps[2]["objective/kl"]) > 1e-3
    assert steps[0]["reference_gap"] < 1e-4 < steps[2]["reference_gap"]
    for first_of_rollout in (steps[0], steps[2]):
        assert first_of_rollout["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert first_of_rollout["sampler/logp_gap_max"] < 1e-3
    names = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert names and all(".lora_" in name for name in names)
