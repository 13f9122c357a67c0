"""A run folder belongs to one run, is shared by all nodes, continues what it holds, and survives a full disk."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT, Ranks, metrics, ranks, tiny


def arguments(folder: Path, typed: str = "") -> list[str]:
    return tiny("sft", folder / "run", f"--run.steps 2 --run.export false {typed}")


def test_two_runs_do_not_share_a_folder_and_a_dead_one_is_succeeded(tmp_path):
    first = Ranks(arguments(tmp_path, "--run.steps 100000"), 1)
    first.until(lambda: (tmp_path / "run/metrics.jsonl").exists())
    outcome = ranks(arguments(tmp_path, "--run.resume auto"), 2, code=2)
    process = f"process {first.processes[0].pid}"
    sentence = outcome.refused(rf"run.output: .*/run is in use by run \w{{8}}, {process} on")
    run = re.search(r"run (\w{8}),", sentence)[1]
    first.send(signal.SIGKILL)
    first.until(lambda: False)
    said = ranks(arguments(tmp_path, "--run.overwrite"), 1).stdout
    assert f"run was left by run {run}, {process}" in said
    assert "which has ended, and is taken over" in said
    assert {line["run"] for line in metrics(tmp_path / "run")} != {run}


def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path):
    """The second node's own disk stands where the first one's folder is."""

    def before(rank: int) -> None:
        import ulysses.run.agreement as agreement

        if rank:
            agreement.HOLDER = "../elsewhere"

    outcome = ranks(arguments(tmp_path), 2, code=2, before=before)
    outcome.refused(
        "run.output: .* is not the folder that rank 0 writes to; set it to a folder on a file system"
    )


# What rank 1 says otherwise, and what rank 0 says of it.
FACTS = {
    "ulysses/run/trainer.py": r"'\w{32}'",
    "the tokenizer": r"'\w{64}'",
    "optimizer.lr": r"[\d.e-]+",
    "torch": r"'[\d.]+\S*'",
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_differs_on_a_node_is_named(tmp_path, fact):
    def before(rank: int) -> None:
        import ulysses.run.training_run as run

        facts_of = run.facts_of
        other = {fact: "x"} if rank else {}
        run.facts_of = lambda *data, **more: facts_of(*data, **more) | other

    outcome = ranks(arguments(tmp_path), 2, code=2, before=before)
    outcome.refused(
        rf"error: {fact} is 'x' on \S+ \(rank 1\) but {FACTS[fact]} on \S+ \(rank 0\); start all"
    )
    assert not (tmp_path / "run").exists()


def test_what_changed_since_a_checkpoint_is_told_and_other_data_are_refused(tmp_path):
    rows = (ROOT / "configs/demo/data/sft_train.jsonl").read_text().splitlines()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows[:40]))
    ranks(arguments(tmp_path, f"--data.train {data}"), 1)
    again = f"--data.train {data} --run.resume auto --run.steps 3"
    data.write_text("\n".join(rows[1:41]))
    ranks(arguments(tmp_path, again), 1, code=2).refused(
        "run.resume: the training data or how they are tokenised have changed since .*step-2 was"
    )
    again += " --batch.examples 4"
    ranks(arguments(tmp_path, again), 1, code=2).refused(
        "had batch.examples 8 but this run has 4; set the same, or another run.output, or run.resume_anyway"
    )
    again += " --run.resume_anyway true --optimizer.lr 1e-4"
    told = ranks(arguments(tmp_path, again), 1).stdout
    for line in (
        r"resumed .*step-2 at step 2", r"changed since then: optimizer.lr was \S+ and is 0.0001",
        "changed since then: batch.examples was 8 and is 4", "changed since then: run.steps was 2 and is 3",
        "changed since then: the data was",
    ):  # fmt: skip
        assert re.search(line, told), (line, told)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("file", ["metrics.jsonl", "tensorboard"])
def test_metrics_that_cannot_be_written_end_the_run_after_a_checkpoint(tmp_path, file):
    def before(rank: int) -> None:
        from ulysses.run.metrics import MetricsLog

        report = MetricsLog.report

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        def reported(self: MetricsLog, step: int, *more: Any) -> None:
            if step == 3 and file == "tensorboard":
                self.board.add_scalar = full
            elif step == 3:
                self.file.close()
                self.file = open("/dev/full", "a")
            report(self, step, *more)

        MetricsLog.report = reported

    line = arguments(tmp_path, "--run.steps 50")
    ranks(line, 2, code=1, before=before).refused(
        rf"rank 0, .*/{file} cannot be written at step 3: No space left on device \(.* GiB are free"
    )
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-4"]
    logged = [1, 2, 3, 4] if file == "tensorboard" else [1, 2]
    assert [line["step"] for line in metrics(tmp_path / "run")] == logged


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_disk_that_fills_while_saving_is_one_sentence(tmp_path, kind):
    """No file may become longer than a slice of the state, which the metrics never do."""

    def before(rank: int) -> None:
        import resource

        from ulysses.run import export_model
        from ulysses.zero import state

        module, name = {
            "checkpoint": (state, "write_digested"),
            "export": (export_model, "write_weights"),
        }[kind]
        write, unlimited = getattr(module, name), resource.RLIM_INFINITY

        def limited(*args: Any, **more: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited))
            try:
                return write(*args, **more)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        setattr(module, name, limited)

    typed, place = {
        "checkpoint": ("", "/checkpoints/.step-2.tmp cannot be written"),
        "export": ("--run.save_last false --run.export true", "/export.* after step 2"),
    }[kind]
    outcome = ranks(arguments(tmp_path, typed), 2, code=1, before=before)
    outcome.refused(f"{place}: .*File too large.* GiB are free there")
    left = [*tmp_path.glob("run/checkpoints/step-*"), *tmp_path.glob("run/export")]
    assert not left
