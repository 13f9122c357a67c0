"""With --debug on one rank, all ranks measure the table of gradients and rank 0 prints it; the run stays the same."""

import math
import os
from pathlib import Path

from tests.e2e.launch import metrics, ranks, tiny
from ulysses.gradients.chain import GradientPolicyChain

STEPS = {
    "run__steps": 5,
    "parallel__sequence_parallel_size": 2,
    "gradients__preset": "steady",
    "gradients__table_every": 2,
}


def break_step_4(rank: int) -> None:
    """Plant a NaN in the last element of each parameter's slice on rank 1."""
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
    logs = tmp_path / "logs"
    ranks(
        tiny("sft", tmp_path / "quiet", tmp_path / "cache", **STEPS), 2, tmp_path / "quiet logs", before=break_step_4
    ).check()
    ranks(tiny("sft", tmp_path / "told", tmp_path / "cache", **STEPS), 2, logs, before=debug_on_rank_1).check()
    printed, other = (logs / "0.out").read_text(), (logs / "1.out").read_text()
    assert "gradient of step" not in other and "[rank 1] attention kernel" in other  # rank 1 says what it always says
    assert "gradient of step" not in (tmp_path / "quiet logs/0.out").read_text()
    reason = "skipped step 4: 1 gradient elements are inf or nan, in model.norm.weight"
    assert (
        reason in printed and reason in (tmp_path / "quiet logs/0.out").read_text()
    )  # a skipped step says why, also without --debug
    tables = {int(t.split(",")[0]): t.splitlines() for t in printed.split("gradient of step ")[1:]}
    assert sorted(tables) == [1, 3, 4, 5]  # the broken step besides the regular ones
    quiet, told = metrics(tmp_path / "quiet"), metrics(tmp_path / "told")
    for step, lines in tables.items():
        rows = [
            line.split()
            for line in lines[2:]
            if len(line.split()) == 4 and line.split()[3].startswith(("model.", "lm_head"))
        ]
        norms = [float(row[0]) for row in rows]
        assert len(rows) == 16 and norms == sorted(norms, reverse=True) and norms[-1] > 0
        broken = [line for line in lines if "not finite" in line]
        if step == 4:
            assert broken == [f"{'not finite':>12} 1 of 32 elements are inf or nan  model.norm.weight"]
        else:
            assert not broken and norms[0] <= told[step - 1]["grad_norm"] * 1.001
            assert norms[0] >= told[step - 1]["grad_norm"] / math.sqrt(21)
    seconds = {"seconds", "tokens_per_second"}
    for ours, theirs in zip(told, quiet, strict=True):
        added = set(ours) - set(theirs)
        assert added == ({"grad/mean_abs", "grad/max_abs"} if ours["step"] in tables else set())
        assert {k: v for k, v in ours.items() if k not in added | seconds} == {
            k: v for k, v in theirs.items() if k not in seconds
        }
    assert [m["grad/skipped"] for m in told] == [0, 0, 0, 1, 0]
