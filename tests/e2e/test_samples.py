"""run.samples: answers at every evaluation, in samples.jsonl, TensorBoard and the report."""

import os
import shutil
import signal
from collections import Counter
from functools import partial

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.launch import metrics, ranks, rows, tiny
from tests.e2e.test_stage_runs import on_ranks, settings
from tests.harness import full
from ulysses.report import main
from ulysses.run.samples import Samples

SHORT = "--run.steps 2 --run.eval_every 1 --run.save_every 1 --run.export false"


lines = partial(metrics, file="samples.jsonl")


@pytest.mark.parametrize("stage", ["dpo", *full(("kto",))])
def test_held_out_rows_are_answered_at_every_evaluation(stage, tmp_path):
    typed = f"{SHORT} --run.samples 2 --{stage}.reference live"
    line = settings(stage, tmp_path / "run", typed)
    on_ranks(2, line)
    found = lines(tmp_path / "run")
    wanted = ["data", "reference", "step 0", "step 1", "step 2"]
    assert [line["by"] for line in found] == [by for by in wanted for _ in range(2)]
    by = {name: [x["answer"] for x in found if x["by"] == name] for name in wanted}
    prompts = [x["prompt"] for x in found]
    assert prompts == prompts[:2] * len(wanted) and prompts[0] != prompts[1]
    assert all(by["data"]) and by["reference"] == by["step 0"]
    # a run that continues answers again where it does
    shutil.rmtree(tmp_path / "run/checkpoints/step-2")
    on_ranks(2, [*line, "--run.resume", str(tmp_path / "run/checkpoints/step-1")])
    again = lines(tmp_path / "run")
    first, *_, last = (line.pop("run") for line in again)
    assert first != last and [line.pop("run") for line in found] == [first] * len(found)
    assert again == found + found[-2:]
    assert main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    # a table for each of the two prompts
    assert page.count("<td>step 2</td>") == page.count("<td>data</td>") == 2
    board = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert "samples/step 1/text_summary" in board.Tags()["tensors"]


def test_groups_of_a_rollout_stand_with_their_scores(tmp_path):
    data = f"--data.train {rows('ppo_train', 4)} --data.eval {rows('ppo_eval', 3)}"
    typed = f"{data} {SHORT} --run.samples 3 --ppo.max_new_tokens 5 --batch.examples 4"
    on_ranks(1, tiny("grpo", tmp_path / "run", f"{typed} --parallel.sequence_parallel_size 1"))
    count = Counter(line["by"] for line in lines(tmp_path / "run"))
    assert count["rollout 0"] == 3 * 4 and count["step 1"] == 3 and not count["data"]
    answers = [x["answer"] for x in lines(tmp_path / "run") if x["by"] == "rollout 0"]
    assert all(-1.5 <= float(answer.partition(": ")[0]) <= 2.5 for answer in answers)


@pytest.mark.parametrize("processes, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_samples_before_the_first_step_end_when_the_run_is_asked_to_stop(
    processes, number, tmp_path
):
    """One rank alone may hear it: the others sample to their end, and all meet in the step that is saved."""

    def before(rank):
        renew, asked = Samples._renew, []

        def signalled(self):
            if rank == processes - 1 and not asked:
                asked.append(os.kill(os.getpid(), number))
            renew(self)

        Samples._renew = signalled

    typed = f"{SHORT} --run.samples 3 --parallel.sequence_parallel_size 1 --run.steps 3 --run.eval_every 3"
    outcome = ranks(
        settings("dpo", tmp_path / "run", f"{typed} --dpo.reference live"),
        processes,
        before=before,
    )
    assert "checkpoint step-1 continues" in outcome.stdout
    by = {line["by"] for line in lines(tmp_path / "run")}
    assert by == ({"data"} if processes == 1 else {"data", "reference", "step 0"})


def test_answers_end_at_the_window(tmp_path, monkeypatch):
    window, sizes, write = 40, tmp_path / "sizes", Samples._write

    def measured(self, by, answered):
        answered = [*answered]
        with sizes.open("a") as file:
            print(*(len(prompt) + len(answer) for prompt, answer in answered), file=file)
        write(self, by, answered)

    monkeypatch.setattr(Samples, "_write", measured)
    typed = (
        f"{SHORT} --data.max_length {window} --model.config.max_position_embeddings {window}"
    )
    line = settings("sft", tmp_path / "run", f"{typed} --data.eval_fraction 0")
    on_ranks(1, [*line, "--run.samples", '["Hi", "How?"]'])
    found = [*map(int, sizes.read_text().split())]
    assert max(found) == window and len(found) >= 6


def test_prompts_of_ones_own(tmp_path):
    prompts = '["Who are you?", "<b>7 + 5</b>"]'
    typed = [*settings("sft", tmp_path / "run", SHORT), "--run.samples", prompts]
    on_ranks(1, typed)
    first, second, *_ = lines(tmp_path / "run")
    assert "Who are you?" in first["prompt"] and first["by"] == "step 0" and second["step"] == 0
    main([str(tmp_path / "run")])
    page = (tmp_path / "run/report.html").read_text()
    assert "&lt;b&gt;7 + 5" in page
    # lines end where they do
    assert "\n" in first["prompt"].strip() and first["prompt"].strip() in page
