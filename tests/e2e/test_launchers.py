"""train.py under every launcher: the same losses and gradient norms on any number of processes and any degree."""

import pytest

from tests.e2e.launch import ROOT, metrics, ranks, run, tiny
from tests.harness import full

# (stage, launcher, processes per agent, agents, degree). "ranks" starts the processes without a launcher.
CASES = [
    ("sft", "torchrun", 1, 2, 2),
    ("dpo", "deepspeed", 2, 1, 2),
    ("sft", "ranks", 4, 1, 2),
    *full(
        ("sft", "torchrun", 2, 2, 4),
        ("dpo", "torchrun", 4, 1, 4),
        ("sft", "ranks", 4, 1, 1),
        ("dpo", "ranks", 4, 1, 1),
        ("dpo", "ranks", 4, 1, 4),
        ("dpo", "ranks", 4, 1, 2),
    ),
]


# the reference is computed for all rows
PAIRS = {"path": str(ROOT / "configs/demo/data/dpo_train.jsonl"), "max_examples": 64}
DATA = {"sft": {}, "dpo": {"data__train": [PAIRS]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def one_process(folder):
    """The numbers of one process, of plain python for SFT, by stage."""
    run("python", tiny("sft", folder / "sft"), timeout=120).check()
    ranks(tiny("dpo", folder / "dpo", **DATA["dpo"]), 1, folder / "logs").check()
    return {stage: metrics(folder / stage) for stage in ("sft", "dpo")}


@pytest.mark.parametrize(("stage", "launcher", "processes", "agents", "sp"), CASES)
def test_same_numbers(stage, launcher, processes, agents, sp, one_process, folder):
    output = folder / f"{stage}-{launcher}-{processes}-{agents}-{sp}"
    # another budget than the one process had: other micro-batches too
    changes = DATA[stage] | {
        "parallel__sequence_parallel_size": sp,
        "batch__tokens_per_microbatch": 700,
    }
    arguments = tiny(stage, output, **changes)
    if launcher == "ranks":
        ranks(arguments, processes, output / "logs").check()
    else:
        run(launcher, arguments, processes, agents=agents).check()
    found = metrics(output)
    assert len(found) == len(one_process[stage]) == 5
    for theirs, ours in zip(one_process[stage], found):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_learning_happens(one_process):
    """Equal numbers of a run that stands still would prove nothing."""
    assert one_process["sft"][-1]["loss"] < one_process["sft"][0]["loss"] - 0.01
    assert one_process["dpo"][0]["loss"] == pytest.approx(
        0.6931472, abs=1e-6
    )  # ln 2: the reference is the policy
    assert one_process["dpo"][-1]["loss"] != one_process["dpo"][0]["loss"]
