"""THE invariance test: loss and gradients do not depend on ranks, sequence parallelism, micro-batches or packing order.

Every case is compared with the formula evaluated in float64 on one process, one unpacked sequence at a time.
"""

import pytest
import torch

from tests.engine_case import Case, evaluated, trained
from tests.harness import full
from tests.memory_case import assert_same_gradients
from tests.stage_case import compared, formula

# (processes, sp, token budget, packing order): sampled so that every pair of values meets.
SAMPLED = [
    (1, 1, 128, None),
    (4, 1, 128, 1),
    (4, 2, 256, None),
    (4, 4, 128, 2),
    (2, 2, 512, 1),
]
FULL = [
    (w, sp, budget, seed)
    for w in (1, 2, 4)
    for sp in (1, 2, 4)
    if sp <= w
    for budget in (128, 256, 512)
    for seed in (None, 1, 2)
]
STAGES = [
    ("sft", {}),
    ("sft", {"z_loss": 1e-3, "label_smoothing": 0.1}),
    ("dpo", {}),
    ("dpo", {"loss_type": "ipo", "sft_weight": 0.0}),
]


def check(
    stage: str, options: dict[str, object], world: int, sp: int, budget: int, seed: int | None
) -> None:
    compared(Case(stage, sp=sp, budget=budget, packing_seed=seed, options=options), world)


@pytest.mark.parametrize("world, sp, budget, seed", SAMPLED)
@pytest.mark.parametrize("stage, options", [STAGES[0], STAGES[2]], ids=["sft", "dpo"])
def test_loss_and_gradients_do_not_depend_on_topology(
    stage, options, world, sp, budget, seed
) -> None:
    check(stage, options, world, sp, budget, seed)


@pytest.mark.parametrize(
    "stage, options", [STAGES[1], STAGES[3]], ids=["sft z-loss smoothing", "dpo ipo"]
)
def test_options_do_not_depend_on_topology(stage, options) -> None:
    check(stage, options, 4, 2, 128, 1)


@pytest.mark.full
@pytest.mark.parametrize("world, sp, budget, seed", FULL)
@pytest.mark.parametrize("stage, options", STAGES)
def test_full_product(stage, options, world, sp, budget, seed) -> None:
    check(stage, options, world, sp, budget, seed)


@pytest.mark.parametrize("recompute", ["block", "keep_attention"])
def test_recompute_level_changes_nothing(recompute: str) -> None:
    compared(Case("sft", sp=2, recompute=recompute), 2)


def test_bfloat16_error_is_that_of_one_rank() -> None:
    """Against the float32 gradient, at most 1.5 times the error of one bfloat16 process."""
    exact = formula(Case("sft"))[1]

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return float(
            torch.stack([(gradients[n].double() - g).norm() for n, g in exact.items()]).norm()
        )

    one = error(trained(Case("sft", budget=1000, dtype=torch.bfloat16), 1)[1][0])
    for world, sp in ((2, 2), (4, 2)):
        many = error(trained(Case("sft", sp=sp, dtype=torch.bfloat16), world)[1][0])
        assert many <= 1.5 * one, (world, sp, many, one)


@pytest.mark.parametrize("world, sp", [(1, 1), (4, 2)])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_evaluation_weighs_tokens_and_pairs_like_training(
    stage: str, world: int, sp: int
) -> None:
    loss, *_ = formula(Case(stage, examples=11))
    for found in evaluated(Case(stage, sp=sp), world):
        assert found["eval/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("node_size", [2, *full((1,))])
def test_sums_travel_between_nodes_in_float32_or_rounded(node_size: int) -> None:
    exact = formula(Case("sft"))[1]
    _, gradients = trained(Case("sft", sp=2, engine={"node_size": node_size}), 4)
    assert_same_gradients(gradients[0], exact)
    rounded = Case(
        "sft", sp=2, engine={"node_size": node_size, "reduce_between": torch.bfloat16}
    )
    _, gradients = trained(rounded, 4)
    assert_same_gradients(gradients[0], exact, 2e-2)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_gradients(gradients[0], exact, 1e-4)


@pytest.fixture(scope="module")
def kept() -> tuple[list[dict[str, float]], list[dict[str, torch.Tensor]]]:
    """Three steps with everything on the device."""
    return trained(Case("sft", sp=2, steps=3, lr=1e-3), 2)


@pytest.mark.parametrize(
    "away",
    [
        ("offload_parameters",),
        ("offload_optimizer", "offload_parameters"),
        *full((("offload_optimizer",),)),
    ],
)
def test_host_memory_changes_nothing(away: tuple[str, ...], kept) -> None:
    case = Case("sft", sp=2, steps=3, lr=1e-3, engine=dict.fromkeys(away, True))
    metrics, gradients = trained(case, 2)
    assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in kept[0]], rel=1e-6)
    assert_same_gradients(gradients[0], kept[1][0])
    assert_same_gradients(gradients[2], kept[1][2], 1e-4)  # after two updates
