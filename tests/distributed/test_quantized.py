"""A quantised base: adapters' gradients are those of the matrices that the bytes stand for, on every topology."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.launch import metrics, ranks, tiny
from tests.engine_case import Case
from tests.stage_case import STAGE_CASES, compared


@pytest.mark.parametrize(("stage", "quantize", "world", "sp", "recompute"), [
    ("dpo", "nf4", 1, 1, "none"), ("dpo", "nf4", 2, 2, "block"), ("dpo", "nf4", 3, 3, "none"),
    ("sft", "nf4", 4, 2, "pair"), ("kto", "nf4", 2, 1, "keep_attention"), ("rm", "nf4", 2, 2, "none"),
    ("pt", "fp8", 2, 2, "keep_attention"), ("dpo", "fp8", 4, 2, "block"), ("distill", "nf4", 2, 2, "none"),
])  # fmt: skip
@pytest.mark.parametrize("resident", [False, True], ids=["sharded", "resident"])
def test_gradients_are_those_of_the_dequantised_matrices(
    stage, quantize, world, sp, recompute, resident
) -> None:
    options = STAGE_CASES[stage].options if stage in ("rm", "kto", "distill") else {}
    case = Case(
        stage,
        sp=sp,
        examples=5,
        seed=2,
        options=options,
        lora_rank=3,
        quantize=quantize,
        recompute=recompute,
        engine={"resident": resident},
    )
    compared(case, world)


def test_ppo_on_a_quantised_base(tmp_path: Path) -> None:
    """The sampler reads the matrices that the bytes stand for, with the adapters added, and the adapters learn."""
    settings = {
        "model__quantize": "nf4",
        "model__lora__rank": 4,
        "optimizer__lr": 3e-3,
        "ppo__epochs": 2,
        "ppo__minibatches": 1,
        "ppo__max_new_tokens": 16,
        "parallel__sequence_parallel_size": 2,
        "run__steps": 3,
    }
    line = tiny("ppo", tmp_path / "run", **settings)
    ranks(line, 2, tmp_path / "logs", timeout=400).check()
    steps = metrics(tmp_path / "run")
    assert [step["rollout"] for step in steps] == [0, 0, 1]
    assert steps[0]["reference_gap"] < 1e-4 < steps[2]["reference_gap"]
    for first_of_rollout in (steps[0], steps[2]):
        assert first_of_rollout["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert first_of_rollout["sampler/logp_gap_max"] < 1e-3
    names = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert names and all(".lora_" in name for name in names)
