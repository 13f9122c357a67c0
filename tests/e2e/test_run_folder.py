"""A run folder belongs to one run, is shared by all nodes, continues what it holds, and survives a full disk."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT, Ranks, metrics, ranks, tiny


def arguments(folder: Path, **settings: object) -> list[str]:
    return tiny("sft", folder / "run", **{"run__steps": 2, "run__export": False, **settings})


def test_two_runs_do_not_share_a_folder_and_a_dead_one_is_succeeded(tmp_path):
    first = Ranks(arguments(tmp_path, run__steps=100_000), 1, tmp_path / "first")
    first.until(lambda: (tmp_path / "run/metrics.jsonl").exists())
    outcome = ranks(arguments(tmp_path, run__resume="auto"), 2, tmp_path / "second")
    [sentence] = outcome.errors
    assert outcome.code == 2
    assert re.search(
        rf"run.output: .*/run is in use by run [0-9a-f]{{8}}, process {first.processes[0].pid} on",
        sentence,
    )
    first.send(signal.SIGKILL)
    first.until(lambda: False)
    outcome = ranks(arguments(tmp_path, run__overwrite=True), 1, tmp_path / "third").check()
    assert (
        f"run was left by run {metrics_id(sentence)}, process {first.processes[0].pid}"
        in outcome.stdout
    )
    assert "which has ended, and is taken over" in outcome.stdout
    assert {line["run"] for line in metrics(tmp_path / "run")} != {metrics_id(sentence)}


def metrics_id(sentence: str) -> str:
    return re.search(r"run ([0-9a-f]{8}),", sentence)[1]


def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path):
    """The second node's own disk stands where the first one's folder is."""

    def before(rank: int) -> None:
        import ulysses.run.agreement as agreement

        if rank:
            agreement.HOLDER = "../elsewhere"

    outcome = ranks(arguments(tmp_path), 2, tmp_path / "logs", before=before)
    sentence = r"error: run.output: .* is not the folder that rank 0 writes to; set it to a folder on a file system"
    assert (
        outcome.code == 2 and len(outcome.errors) == 1 and re.match(sentence, outcome.errors[0])
    ), outcome.stderr


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

    outcome = ranks(arguments(tmp_path), 2, tmp_path / "logs", before=before)
    [sentence] = outcome.errors
    wanted = rf"error: {fact} is 'x' on \S+ \(rank 1\) but {FACTS[fact]} on \S+ \(rank 0\); start all"
    assert outcome.code == 2 and re.match(wanted, sentence), outcome.stderr
    assert not (tmp_path / "run").exists()


def test_what_changed_since_a_checkpoint_is_told_and_other_data_are_refused(
    tmp_path,
):
    rows = (ROOT / "configs/demo/data/sft_train.jsonl").read_text().splitlines()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows[:40]))
    ranks(arguments(tmp_path, data__train=str(data)), 1, tmp_path / "logs").check()
    more = {"data__train": str(data), "run__resume": "auto", "run__steps": 3}
    data.write_text("\n".join(rows[1:41]))
    [sentence] = ranks(arguments(tmp_path, **more), 1, tmp_path / "logs").errors
    assert re.match(
        r"error: run.resume: the training data or how they are tokenised have changed since .*step-2 was",
        sentence,
    )
    fewer = arguments(tmp_path, **more, batch__examples=4)
    [sentence] = ranks(fewer, 1, tmp_path / "logs").errors
    assert (
        "had batch.examples 8 but this run has 4; set the same, or another run.output, or run.resume_anyway"
        in sentence
    )
    anyway = arguments(
        tmp_path, **more, batch__examples=4, run__resume_anyway=True, optimizer__lr=1e-4
    )
    told = ranks(anyway, 1, tmp_path / "logs").check().stdout
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

    outcome = ranks(arguments(tmp_path, run__steps=50), 2, tmp_path / "logs", before=before)
    assert outcome.code == 1
    [sentence] = outcome.errors
    assert re.match(
        rf"error: rank 0, .*/{file} cannot be written at step 3: No space left on device \(.* GiB are free",
        sentence,
    ), sentence
    assert "Traceback" not in outcome.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-4"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == (
        [1, 2] if file == "metrics.jsonl" else [1, 2, 3, 4]
    )


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_disk_that_fills_while_saving_is_one_sentence(tmp_path, kind):
    """No file may become longer than a slice of the state, which the metrics never do."""

    def before(rank: int) -> None:
        import resource

        from ulysses.run import export_model
        from ulysses.zero import state

        def limited(function):
            def call(*args, **more):
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
                try:
                    return function(*args, **more)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

            return call

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if kind == "checkpoint":
            state.write_digested = limited(state.write_digested)
        else:
            export_model.write_weights = limited(export_model.write_weights)

    options = {"run__save_last": kind == "checkpoint", "run__export": kind == "export"}
    outcome = ranks(arguments(tmp_path, **options), 2, tmp_path / "logs", before=before)
    [sentence] = outcome.errors
    place = (
        r"/checkpoints/.step-2.tmp cannot be written"
        if kind == "checkpoint"
        else "/export.* after step 2"
    )
    assert outcome.code == 1 and re.search(
        rf"{place}: .*File too large.* GiB are free there", sentence
    )
    assert "Traceback" not in outcome.stderr
    assert (
        not list((tmp_path / "run").glob("checkpoints/step-*"))
        and not (tmp_path / "run/export").exists()
    )
