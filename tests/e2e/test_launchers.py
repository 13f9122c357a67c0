"""train.py under every launcher: the same losses and gradient norms on any number of processes and any degree."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.e2e.launch import environment, metrics, ranks, rows, run, tiny
from tests.harness import full

# (stage, launcher, processes per agent, agents, degree). "ranks" starts the processes without a launcher.
CASES = [
    ("sft", "torchrun", 1, 2, 2),
    ("dpo", "deepspeed", 2, 1, 2),
    ("sft", "ranks", 4, 1, 2),
    *full(("sft", "torchrun", 2, 2, 4)),
]


# the reference is computed for all rows
DATA = {"sft": "", "dpo": f"--data.train {rows('dpo_train', 64)}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def one_process(folder):
    """The numbers of one process, by stage."""
    for stage, data in DATA.items():
        ranks(tiny(stage, folder / stage, data), 1)
    return {stage: metrics(folder / stage) for stage in DATA}


@pytest.mark.parametrize("stage, launcher, processes, agents, sp", CASES)
def test_same_numbers(stage, launcher, processes, agents, sp, one_process, folder):
    output = folder / f"{stage}-{launcher}-{processes}-{agents}-{sp}"
    # another budget than the one process had: other micro-batches too
    typed = f"--parallel.sequence_parallel_size {sp} --batch.tokens_per_microbatch 700 {DATA[stage]}"
    arguments = tiny(stage, output, typed)
    if launcher == "ranks":
        ranks(arguments, processes)
    else:
        run(launcher, arguments, processes, agents=agents).check()
    found = metrics(output)
    assert len(found) == len(one_process[stage]) == 5
    for name in ("loss", "grad_norm"):
        theirs = [line[name] for line in one_process[stage]]
        assert [line[name] for line in found] == pytest.approx(theirs, rel=1e-5)


def test_learning_happens(one_process):
    """Equal numbers of a run that stands still would prove nothing."""
    sft, dpo = ([line["loss"] for line in one_process[stage]] for stage in ("sft", "dpo"))
    assert sft[-1] < sft[0] - 0.01
    # ln 2: the reference is the policy
    assert dpo[0] == pytest.approx(0.6931472, abs=1e-6) and dpo[-1] != dpo[0]


@pytest.mark.parametrize("start", [[ROOT / "train.py"], ["-m", "ulysses.cli", "train"]])
def test_a_reward_is_found_in_the_folder_of_the_start(start, tmp_path):
    (tmp_path / "my_rewards.py").write_text("score = 3")
    line = [
        sys.executable,
        *start,
        *tiny("grpo", tmp_path / "run", "--ppo.reward my_rewards:score"),
    ]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "(it is not a function)" in done.stderr, done.stderr
