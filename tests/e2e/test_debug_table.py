"""With --debug on one rank, all ranks measure the table of gradients and rank 0 prints it; the run stays the same."""

import math
import os
import re
from pathlib import Path

from tests.e2e.launch import metrics, ranks, tiny, without_times
from ulysses.gradients.chain import GradientPolicyChain

STEPS = {"parallel__sequence_parallel_size": 2, "gradients__preset": "steady", "gradients__table_every": 2}


def break_step_4(rank: int) -> None:
    """Plant a NaN in the last element of one parameter's slice on rank 1."""
    apply = GradientPolicyChain.apply

    def broken(self, gradients, context):
        if rank == 1 and context.step == 3:
            for entry in gradients:
                if entry.name == "model.norm.weight":
                    entry.grad[-1] = math.nan
        return apply(self, gradients, context)

    GradientPolicyChain.apply = broken


def debug_on_rank_1(rank: int) -> None:
    break_step_4(rank)
    os.environ["ULYSSES_DEBUG"] = str(rank)


def test_table_is_printed_once_and_changes_nothing(tmp_path: Path) -> None:
    for name, before in (("quiet", break_step_4), ("told", debug_on_rank_1)):
        line = tiny("sft", tmp_path / name, **STEPS)
        ranks(line, 2, tmp_path / f"{name} logs", before=before).check()
    silent, printed, other = ((tmp_path / file).read_text() for file in (
        "quiet logs/0.out", "told logs/0.out", "told logs/1.out"))  # fmt: skip
    assert "gradient of step" not in other and "[rank 1] attention kernel" in other  # rank 1 says what it always says
    assert "gradient of step" not in silent
    reason = "skipped step 4: 1 gradient elements are inf or nan, in model.norm.weight"
    assert reason in printed and reason in silent  # a skipped step says why, also without --debug
    tables = {int(t.split(",")[0]): t for t in printed.split("gradient of step ")[1:]}
    assert sorted(tables) == [1, 3, 4, 5]  # the broken step besides the regular ones
    quiet, told = (without_times(metrics(tmp_path / name)) for name in ("quiet", "told"))
    for step, table in tables.items():
        broken = re.findall(r"not finite (.*)", table)
        assert broken == (["1 of 32 elements are inf or nan  model.norm.weight"] if step == 4 else [])
    for ours, theirs in zip(told, quiet, strict=True):
        added = {"grad/mean_abs", "grad/max_abs"} if ours["step"] in tables else set()
        assert set(ours) - set(theirs) == added and {**ours, **theirs} == ours
    assert [m["grad/skipped"] for m in told] == [0, 0, 0, 1, 0]
