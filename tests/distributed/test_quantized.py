"""A quantised base: adapters' gradients are those of the matrices that the bytes stand for, on every topology."""

import pytest
import torch
from safetensors.torch import load_file

from models.lora import is_adapter
from tests.e2e.launch import metrics, ranks, tiny
from tests.engine_case import Case, trained
from tests.harness import full
from tests.memory_case import assert_same_gradients
from tests.stage_case import STAGE_CASES, Formula, compared
from ulysses.config.schema import OptimizerSection

CASES = [
    ("dpo", "nf4", 3, 3, "none", False), ("kto", "nf4", 2, 1, "keep_attention", True),
    ("rm", "nf4", 2, 2, "none", False), ("dpo", "nf4", 2, 2, "block", True),
    ("sft", "nf4", 4, 2, "pair", False), ("sft", "nf4", 4, 2, "pair", True), ("dpo", "fp8", 4, 2, "block", True),
    *full(
        ("dpo", "nf4", 1, 1, "none", True), ("dpo", "nf4", 3, 3, "none", True), ("dpo", "nf4", 2, 2, "block", False),
        ("dpo", "fp8", 4, 2, "block", False), ("kto", "nf4", 2, 1, "keep_attention", False),
        ("rm", "nf4", 2, 2, "none", True), ("pt", "fp8", 2, 2, "keep_attention", False),
        ("distill", "nf4", 2, 2, "none", False),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "quantize", "world", "sp", "recompute", "resident"), CASES)
def test_gradients_are_those_of_the_dequantised_matrices(
    stage, quantize, world, sp, recompute, resident
):
    """With the base in shards, or with all of it on every rank."""
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


def test_ppo_on_a_quantised_base(tmp_path):
    """The reference is the base with the adapters off; the sampler reads the matrices that the bytes stand for, with
    the adapters added; and the adapters learn."""
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
    assert abs(steps[0]["objective/kl"]) < 1e-4 and abs(steps[2]["objective/kl"]) > 1e-3
    assert steps[0]["reference_gap"] < 1e-4 < steps[2]["reference_gap"]
    for first_of_rollout in (steps[0], steps[2]):
        assert first_of_rollout["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert first_of_rollout["sampler/logp_gap_max"] < 1e-3
    names = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert names and all(".lora_" in name for name in names)


def by_hand(case: Case) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Losses and gradients of a plain loop in float64 over the dequantised matrices, whose adapters AdamW trains."""
    model = Formula(case, 0).model
    adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    settings = OptimizerSection()
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=case.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    found = []
    for step in range(case.steps):
        at_step = Formula(case, step)
        at_step.model = model
        loss, _ = STAGE_CASES[case.stage].formula(at_step)
        optimizer.zero_grad()
        loss.backward()
        found.append((float(loss), {name: p.grad.clone() for name, p in adapters.items()}))
        optimizer.step()
    return found


@pytest.mark.parametrize("quantize", ["nf4", *full(("fp8",))])
def test_three_steps_are_those_of_a_plain_loop(quantize):
    case = Case("dpo", sp=2, examples=4, steps=3, lr=1e-3, lora_rank=3, quantize=quantize)
    metrics, gradients = trained(case, 2)
    expected = by_hand(case)
    assert len(expected) == len(gradients) == 3
    assert abs(expected[2][0] - expected[0][0]) > 1e-3  # it learns
    for step, (loss, exact) in enumerate(expected):
        assert metrics[step]["loss"] == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(gradients[step], exact)
