"""THE invariance test for PT, RM, KTO and adapters: loss, metrics and gradients are the formula's on every topology."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.arch import ModelConfig
from models.families import RopeScaling
from tests.distributed.test_invariance import SAMPLED
from tests.engine_case import SHAPE, Case, evaluated, run_case, trained
from tests.family_case import FAMILIES
from tests.harness import full, need_gpus, run_distributed
from tests.memory_case import assert_same_gradients
from tests.stage_case import COMPARED, STAGE_CASES, compared, formula

FULL = [
    (w, sp, b, seed)
    for w in (1, 2, 4)
    for sp in (1, 2, 4)
    if sp <= w
    for b in (128, 512)
    for seed in (None, 1)
]
KTO = STAGE_CASES["kto"].options
WHOLE, TIED = ("embeddings",), replace(SHAPE, tie_word_embeddings=True)
# test_invariance.py has SFT and DPO
STAGES: list[tuple[str, dict[str, Any]]] = [
    (name, STAGE_CASES[name].options) for name in COMPARED if name not in ("sft", "dpo")
]


def check(case: Case, world: int) -> dict[str, float]:
    """Compare one step on `world` ranks with the formula."""
    return compared(replace(case, seed=2, examples=5), world)


@pytest.mark.parametrize(
    "world, sp, budget, seed", [*SAMPLED[1:4], *full(SAMPLED[0], SAMPLED[4])]
)
@pytest.mark.parametrize("stage, options", STAGES, ids=[s for s, _ in STAGES])
def test_loss_metrics_and_gradients(stage, options, world, sp, budget, seed) -> None:
    metrics = check(
        Case(stage, sp=sp, budget=budget, packing_seed=seed, options=options), world
    )
    if stage == "kto":
        assert metrics["kl"] > 0.05  # the baseline takes part


@pytest.mark.parametrize(
    "world, sp, recompute",
    [(2, 2, "keep_attention"), (4, 4, "block"), *full((1, 1, "none"), (4, 2, "none"))],
)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_yarn(stage, world, sp, recompute) -> None:
    """Sequences of up to four times the original window."""
    shape = replace(SHAPE, rope_scaling=RopeScaling("yarn", 4.0, 15))
    check(Case(stage, sp=sp, shape=shape, recompute=recompute, packing_seed=1), world)


# every family, and every stage under windows: with rows that are split (3 heads) and without, and their memory levels
FAMILY_CASES = [
    *((name, "sft" if place % 2 else "dpo", 2, 2, 3) for place, name in enumerate(FAMILIES)),
    *(("gemma3", stage, 4, 4, 3) for stage in COMPARED),
    ("gemma3", "dpo", 4, 2, 4),
    ("smollm3", "kto", 4, 4, 4),
    # its logits are divided by a number
    ("granite", "distill", 2, 2, 4),
    # 6 value and 3 key heads of linear attention: two sets of ranks repeat the rule, or none
    ("qwen3_5", "sft", 4, 4, 3),
    ("qwen3_5", "dpo", 3, 3, 4),
    ("qwen3_next", "rm", 4, 4, 4),
    ("qwen3_5", "kto", 4, 2, 4),
    ("qwen3_5", "pt", 1, 1, 4),
    ("qwen3_5", "rm", 2, 2, 4),
    ("qwen3_5", "distill", 2, 2, 4),
    *full(("qwen3_5", "sft", 6, 6, 6)),
    # and under sinks: a row of every degree
    *(("gpt-oss", stage, 4, 4, 3) for stage in COMPARED),
    ("gpt-oss", "sft", 1, 1, 3),
    ("gpt-oss", "dpo", 3, 3, 4),
    ("gpt-oss", "rm", 4, 2, 3),
]


@pytest.mark.parametrize("family, stage, world, sp, heads", FAMILY_CASES)
def test_families(family, stage, world, sp, heads) -> None:
    changes = {
        "num_attention_heads": heads,
        "head_dim": 8,
        "initializer_range": 0.1,
        "vocab_size": 97,
    }
    raw = FAMILIES[family] | changes | {"num_key_value_heads": 1 if heads % 2 else 2}
    case = Case(stage, sp=sp, shape=ModelConfig.from_hf(raw), recompute="keep_attention")
    check(replace(case, options=STAGE_CASES[stage].options, packing_seed=1), world)


@pytest.mark.full
@pytest.mark.parametrize("world, sp, budget, seed", FULL)
@pytest.mark.parametrize("stage, options", STAGES, ids=[s for s, _ in STAGES])
def test_full_product(stage, options, world, sp, budget, seed) -> None:
    check(Case(stage, sp=sp, budget=budget, packing_seed=seed, options=options), world)


@pytest.mark.parametrize(
    "stage, options",
    [
        ("sft", {"loss_type": "dft"}),
        ("kto", {"loss_type": "apo_zero_unpaired", "beta": 0.3}),
        ("dpo", {"loss_type": "discopop", "f_divergence": "js"}),
        ("dpo", {"ld_alpha": 0.3}),
        ("dpo", {"loss_type": "orpo", "sft_weight": 0.3}),
        ("dpo", {"loss_type": ["ipo", "aot"], "loss_weights": [0.8, 0.2], "sft_weight": 1.0}),
        ("distill", {"teacher": "some/teacher", "jsd_beta": 1.0, "temperature": 0.7}),
        *full(
            ("dpo", {"loss_type": "aot", "label_smoothing": 0.1}),
            ("distill", {"teacher": "some/teacher"}),
        ),
    ],
)
def test_options(stage, options) -> None:
    check(Case(stage, sp=2, packing_seed=1, options=options), 4)


@pytest.mark.parametrize(
    "stage, world, sp, recompute, changes",
    [
        ("dpo", 4, 2, "none", {}),
        ("kto", 2, 2, "block", {}),
        ("rm", 2, 1, "keep_attention", {}),
        # with embeddings that are trained whole, tied or not, over a quantised base or not
        ("sft", 4, 2, "block", {"lora_train": WHOLE, "shape": TIED}),
        ("dpo", 2, 2, "none", {"lora_train": WHOLE, "quantize": "nf4"}),
        *full(
            ("sft", 1, 1, "keep_attention", {}),
            ("pt", 2, 2, "block", {}),
            ("distill", 2, 2, "block", {}),
            ("rm", 2, 1, "none", {"lora_train": WHOLE}),
            ("sft", 1, 1, "block", {"lora_train": WHOLE, "shape": TIED}),
        ),
    ],
)
def test_adapters(stage, world, sp, recompute, changes) -> None:
    options = STAGE_CASES[stage].options if stage in ("rm", "kto", "distill") else {}
    case = Case(stage, sp=sp, options=options, lora_rank=3, recompute=recompute)
    check(replace(case, **changes), world)


@pytest.mark.parametrize("stage", ["sft", "kto"])
def test_an_epochs_last_smaller_step_has_its_own_count(stage) -> None:
    """11 examples in steps of 4; the learning rate is 0, so that all steps see the same weights."""
    compared(Case(stage, sp=2, examples=4, steps=3), 4, step=2)


@pytest.mark.parametrize("world, sp, budget", [(4, 2, 512), *full((1, 1, 128))])
def test_bco_pair_subtracts_the_mean_reward_of_the_steps_before(world, sp, budget) -> None:
    """Of whole steps, and equally often on every topology; the learning rate is 0."""
    options = {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2], "beta": 0.3}
    case = Case(
        "dpo", sp=sp, budget=budget, examples=4, steps=3, packing_seed=1, options=options
    )
    metrics, gradients = trained(case, world)
    rewards = [(m["rewards/chosen"] + m["rewards/rejected"]) / 2 for m in metrics]
    for step, (found, gradient) in enumerate(zip(metrics, gradients, strict=True)):
        delta = sum(rewards[:step]) / max(step, 1)
        loss, exact, _ = formula(replace(case, options=options | {"bco_delta": delta}), step)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(gradient, exact)
    assert abs(delta) > 0.05  # it takes part


def test_aot_evaluates_alike_on_every_topology() -> None:
    """It sorts the pairs of every evaluated step, which take different numbers of micro-batches."""
    options = {"loss_type": "aot", "beta": 0.3}
    [alone] = evaluated(Case("dpo", budget=1000, options=options), 1)
    for found in evaluated(Case("dpo", sp=2, options=options), 4):
        assert found == pytest.approx(alone, rel=1e-4, abs=2e-4)


@pytest.mark.parametrize("labels", [(1,) * 11, (0,) * 11], ids=["all good", "all bad"])
def test_kto_with_one_side_only(labels) -> None:
    check(Case("kto", sp=2, labels=labels, options={"beta": 0.3}), 4)


def test_kto_evaluates_alike_on_every_topology() -> None:
    """Its baseline too, whose steps take different numbers of micro-batches."""
    [alone] = evaluated(Case("kto", budget=1000, options=KTO), 1)
    for found in evaluated(Case("kto", sp=2, budget=50, options=KTO), 4):
        assert found == pytest.approx(alone, rel=1e-4, abs=2e-5)
    assert alone["eval/kl"] > 0.05


ROUNDED = {"dtype": torch.bfloat16, "recompute": "keep_attention"}
TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "kto": ("kto", {"options": KTO}),
    "rm": ("rm", {}),
    "sft adapters": (
        "sft",
        {"options": {"label_smoothing": 0.1, "z_loss": 1e-3}, "lora_rank": 3},
    ),
    "sft bfloat16": ("sft", ROUNDED),
    "dpo bfloat16": ("dpo", ROUNDED),
}


@pytest.mark.gpu
@pytest.mark.parametrize("stage, more", TWICE.values(), ids=TWICE)
def test_deterministic_runs_repeat_bit_for_bit(stage, more) -> None:
    """Also: none of their operations lacks a deterministic kernel, or torch would have raised."""
    need_gpus(4)
    case = Case(stage, sp=2, steps=2, lr=1e-3, **more)
    first, second = (
        run_distributed(run_case, 4, case, deterministic=True)[0] for _ in range(2)
    )
    assert [m["loss"] for m in first[0]] == [m["loss"] for m in second[0]]
    for ours, theirs in zip(first[1], second[1], strict=True):
        assert all(torch.equal(gradient, theirs[name]) for name, gradient in ours.items())
