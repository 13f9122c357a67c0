"""A quantised base: adapters' gradients are those of the matrices that the bytes stand for, on every topology."""

import pytest

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
