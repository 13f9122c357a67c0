"""A run folder belongs to one run, is shared by all nodes, continues what it holds, and survives a full disk."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.launch import (
    ROOT,
    Ranks,
    metrics,
    plant_in_losses,
    ranks,
    rows,
    tiny,
    without_times,
)
from tests.tiny_tokenizer import write_rows
from ulysses.check.run_folder import read_run_state


def arguments(folder, typed=""):
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
    said = ranks(arguments(tmp_path), 1).stdout
    assert f"run was left by run {run}, {process}" in said
    assert "which has ended, and is taken over" in said
    assert {line["run"] for line in metrics(tmp_path / "run")} != {run}


def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path):
    """The second node's own disk stands where the first one's folder is."""

    def before(rank):
        import ulysses.check.run_folder as run_folder

        if rank:
            run_folder.HOLDER = "../elsewhere"

    outcome = ranks(arguments(tmp_path), 2, code=2, before=before)
    outcome.refused(
        "run.output: .* is not the folder that rank 0 writes to; set it to a folder on a file system"
    )


def test_a_folder_that_a_file_system_hides_from_a_node_is_found(tmp_path):
    """A network file system remembers that there was no such folder until the node tries to make it."""

    def before(rank):
        import ulysses.check.run_folder as run_folder

        makedirs, holder = os.makedirs, run_folder.HOLDER

        def show(folder, *more, **options):
            if str(folder) == str(tmp_path / "run"):
                run_folder.HOLDER = holder
            return makedirs(folder, *more, **options)

        if rank:
            run_folder.HOLDER, os.makedirs = "../elsewhere", show

    ranks(arguments(tmp_path), 2, before=before)


# What rank 1 says otherwise, and what rank 0 says of it.
FACTS = {
    "ulysses/run/trainer.py": r"'\w{32}'",
    "the tokenizer": r"'\w{64}'",
    "optimizer.lr": r"[\d.e-]+",
    "torch": r"'[\d.]+\S*'",
    "tokenizers": r"'[\d.]+\S*'",
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_differs_on_a_node_is_named(tmp_path, fact):
    def before(rank):
        import ulysses.run.training_run as training_run

        facts_of = training_run.facts_of
        other = {fact: "x"} if rank else {}
        training_run.facts_of = lambda *read: facts_of(*read) | other

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
        "changed since then: the training data or how they are tokenised was",
    ):  # fmt: skip
        assert re.search(line, told), (line, told)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


def test_another_mixture_of_the_same_rows_is_refused_as_other_data(tmp_path):
    """Its order is another one: the continued run would take some rows again, and others never."""
    one = rows("sft_train", 12).removesuffix("}")

    def mixed(first, second):
        return f'--data.train [{one},{first}}},{one},"system":"s",{second}}}] --run.resume auto'

    ranks(arguments(tmp_path, mixed('"weight":1', '"weight":1')), 1)
    ranks(arguments(tmp_path, mixed('"weight":1', '"weight":0.5')), 1, code=2).refused(
        "run.resume: the training data or how they are tokenised have changed since .*step-2 was"
    )
    # these shares give the same order
    even = mixed('"probability":0.5', '"probability":0.5')
    assert "step-2 at step 2" in ranks(arguments(tmp_path, f"{even} --run.steps 3"), 1).stdout


@pytest.mark.parametrize("held_out", ["same", "other"])
def test_the_best_loss_is_not_one_of_other_held_out_rows(tmp_path, held_out):
    """What the model has learnt is easier than what it has never seen, which a run may hold out later."""
    for name, text in (("same", "a" * 40), ("other", "\x07\x1b" * 20)):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": "q", "completion": text}] * 4)
    easy = tmp_path / "same.jsonl"
    typed = f"--data.train {easy} --run.eval_every 1 --run.save_every 1 --run.resume auto --optimizer.warmup 0"
    typed += " --optimizer.schedule constant --optimizer.lr 3e-3 --run.steps"
    ranks(arguments(tmp_path, f"--data.eval {easy} {typed} 3"), 1)
    ranks(arguments(tmp_path, f"--data.eval {tmp_path / held_out}.jsonl {typed} 4"), 1)
    third, last = (line["eval/loss"] for line in metrics(tmp_path / "run")[-2:])
    assert (third < last) == (held_out == "other")
    state = read_run_state(tmp_path / "run/checkpoints/step-4")
    assert state["best"] == [4, last]


@pytest.mark.parametrize("left", [None, "", "{}"])
def test_a_run_whose_config_json_was_emptied_goes_on(tmp_path, left):
    """What else stands in its place is somebody's, and is not replaced."""
    ranks(arguments(tmp_path), 1)
    config = tmp_path / "run/config.json"
    whole = config.read_text()
    config.unlink()
    if left is not None:
        config.write_text(left)
    again = arguments(tmp_path, "--run.resume auto --run.steps 3")
    if left:
        ranks(again, 1, code=2).refused("holds .*config.json.*, but run.output needs a new")
        assert config.read_text() == left
    else:
        assert "step-2 at step 2" in ranks(again, 1).stdout
        assert config.read_text() == whole.replace('"steps": 2', '"steps": 3').replace(
            '"resume": "never"', '"resume": "auto"'
        )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_deletes_nothing_that_it_finds(tmp_path):
    """It refuses a folder with later checkpoints, and rotation deletes its own old ones; of a link the link alone."""
    saves = "--run.steps 3 --run.save_every 1 --run.keep 0"
    ranks(arguments(tmp_path, saves), 1)
    checkpoints, moved = tmp_path / "run/checkpoints", tmp_path / "moved"
    line = f"touch notes ../tensorboard/notes; mv step-2 {moved}; ln -s {moved} step-2"
    subprocess.run(["bash", "-ec", line], cwd=checkpoints, check=True)
    weights, before = moved / "rank-00000.master.safetensors", names(checkpoints)
    back = f"{saves} --run.resume {checkpoints}/step-2"
    ranks(arguments(tmp_path, back), 1, code=2).refused(
        "delete step-3, or set another run.output"
    )
    ranks(arguments(tmp_path), 1, code=2).refused(
        "delete step-1, step-2, step-3, or set another"
    )
    assert names(checkpoints) == before
    shutil.rmtree(checkpoints / "step-3")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    ranks(arguments(tmp_path, back), 1, code=1).refused(
        "master.safetensors is missing or does not"
    )
    weights.write_bytes(whole)
    said = ranks(arguments(tmp_path, back), 1).stdout
    assert f"resumed {checkpoints}/step-2 at step 2" in said
    assert names(checkpoints) == before and (checkpoints / "step-2").is_symlink()
    kept = "--run.steps 4 --run.resume auto --run.keep 1 --run.export true"
    (tmp_path / "run/export").mkdir()
    said = ranks(arguments(tmp_path, kept), 1).stdout
    assert f"resumed {checkpoints}/step-3 at step 3" in said
    out = tmp_path / "run/export-step-4"
    assert f"exported {out}" in said
    other = arguments(tmp_path, f"{kept} --export.dtype float32")
    said = ranks(other, 1).stdout
    assert f"{out} is there already and stays as it is; remove it to export anew" in said
    shutil.rmtree(out)
    assert f"exported {out}" in ranks(other, 1).stdout
    assert names(checkpoints) == ["notes", "step-4"] and "run.json" in names(moved)
    assert "notes" in names(tmp_path / "run/tensorboard")


def test_code_that_changes_the_current_folder_moves_nothing(tmp_path):
    def before(rank):
        def fault(step, compute):
            os.chdir(tmp_path / "elsewhere")
            return compute()

        plant_in_losses(fault)

    (tmp_path / "elsewhere").mkdir()
    own = Path(os.path.relpath(tmp_path, ROOT))
    line = arguments(own, f"--run.export true --data.cache {own}/cache")
    ranks(line, 1, before=before)
    assert names(tmp_path / "run/checkpoints") == ["step-2"] and not names(
        tmp_path / "elsewhere"
    )
    assert (tmp_path / "run/export/config.json").exists()


def test_two_runs_may_fill_one_cache_at_once(tmp_path):
    """Both write the reference log-probabilities at the same moment."""

    def before(rank):
        from ulysses.stages import cached_reference

        write = cached_reference.write_digested

        def together(path, *more):
            (tmp_path / f"writes-{os.getpid()}").touch()
            while len([*tmp_path.glob("writes-*")]) < 2:
                time.sleep(0.01)
            return write(path, *more)

        cached_reference.write_digested = together

    usual = f"--run.steps 2 --run.export false --run.save_last false --data.train {rows('dpo_train', 64)}"
    lines = (tiny("dpo", tmp_path / name, usual, tmp_path / "cache") for name in "ab")
    for run in [Ranks(line, 1, before=before) for line in lines]:
        run.wait().check()
    assert without_times(metrics(tmp_path / "a")) == without_times(metrics(tmp_path / "b"))
    assert len(list(tmp_path.glob("cache/reference-*.bin"))) == 1
    assert not list(tmp_path.glob("cache/*.tmp"))


@pytest.mark.parametrize("file", ["metrics.jsonl", "tensorboard", "samples.jsonl"])
def test_metrics_that_cannot_be_written_end_the_run_after_a_checkpoint(tmp_path, file):
    def before(rank):
        from torch.utils.tensorboard import SummaryWriter

        from ulysses.run.metrics import MetricsLog

        report = MetricsLog.report

        def added(self, name, value, step):
            if step >= 3:
                raise OSError(28, "No space left on device")

        def reported(self, step, values, due):
            if step == 2 and file == "samples.jsonl":
                (self.path.parent / file).unlink()
                (self.path.parent / file).symlink_to("/dev/full")
            if step == 3 and file == "metrics.jsonl":
                self.file.close()
                self.file = open("/dev/full", "a")
            report(self, step, values, due)

        if file == "tensorboard":
            SummaryWriter.add_scalar = SummaryWriter.add_text = added
        else:
            MetricsLog.report = reported

    samples = f"--run.samples 1 --run.eval_every 1 --data.eval {rows('sft_eval', 4)}"
    line = arguments(tmp_path, f"--run.steps 50 {samples * (file != 'metrics.jsonl')}")
    ranks(line, 2, code=1, before=before).refused(
        rf"rank 0, .*/{file} cannot be written at step 3: No space left on device \(.* GiB are free"
    )
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-4"]
    logged = [1, 2] if file == "metrics.jsonl" else [1, 2, 3, 4]
    assert [line["step"] for line in metrics(tmp_path / "run")] == logged


def test_a_disk_that_is_full_at_the_start_is_one_sentence_and_nothing_is_in_the_way(tmp_path):
    def before(rank):
        import resource

        from ulysses.run import training_run

        write, unlimited = training_run.replace_file, resource.RLIM_INFINITY

        def limited(*args):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited))
            try:
                write(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        training_run.replace_file = limited

    ranks(arguments(tmp_path), 1, code=1, before=before).refused(
        "/run cannot be written: File too large .* GiB are free there"
    )
    ranks(arguments(tmp_path), 1)


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_disk_that_fills_while_saving_is_one_sentence(tmp_path, kind):
    """No file may become longer than a slice of the state, which the metrics never do."""

    def before(rank):
        import resource

        from ulysses.run import export_model
        from ulysses.zero import state

        module, name = {
            "checkpoint": (state, "write_digested"),
            "export": (export_model, "write_weights"),
        }[kind]
        write, unlimited = getattr(module, name), resource.RLIM_INFINITY

        def limited(*args, **more):
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
