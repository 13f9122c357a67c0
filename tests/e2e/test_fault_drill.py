"""Faults planted in real runs: nobody hangs, bad steps touch no weight, and a boosted phase resumes exactly."""

import math
import os

import pytest
from safetensors.torch import load_file

from tests.e2e.launch import metrics, plant_in_losses, ranks, tiny, without_times

CHAIN = (
    '[{"policy":"skip_non_finite"},{"policy":"skip_spike","warmup":2,"window":2,"sigma":1e9},{"policy":"ulysses_pro"},'
    '{"policy":"clip_global_norm","max_norm":1.0}]'
)


def nan(value):
    return value * math.nan


def vanish(value):
    """Return the same value with a gradient that all but vanishes."""
    return value.detach() + 1e-5 * (value - value.detach())


def start(folder, faults, typed="", code=0):
    """Train on two processes; `faults` maps steps, counted from 1, to ranks and what becomes of their loss terms."""
    usual = f"--run.save_every 1 --run.keep 0 --run.export false {typed}"

    def before(rank):
        os.environ["ULYSSES_DEBUG"] = str(rank) if folder.name == "whole" else "0"

        def faulty(taken, compute):
            where, spoil = faults.get(taken + 1, ((), None))
            spoiled = spoil if rank in where else lambda value: value
            return [term._replace(value=spoiled(term.value)) for term in compute()]

        plant_in_losses(faulty)

    logs = folder.parent / f"{folder.name} logs"
    return ranks(tiny("sft", folder, usual), 2, code=code, logs=logs, before=before)


def saved(folder, step):
    """Each rank's master weights in a checkpoint."""
    files = sorted(folder.glob(f"checkpoints/step-{step}/*.master.safetensors"))
    return [load_file(f)["data"].tolist() for f in files]


def test_a_nan_on_one_rank_stops_all_with_one_sentence_before_the_update(tmp_path):
    bad = r"the loss is nan and \d+ gradient elements are inf or nan, in model\.embed_tokens"
    outcome = start(tmp_path / "stop", {3: ((1,), nan)}, code=1)
    outcome.refused(rf"rank \d, step 3: {bad}.*; examples \[\d+, ")
    assert [m["step"] for m in metrics(tmp_path / "stop")] == [1, 2]


def test_skipped_and_boosted_steps_and_a_resume_between_boosted_ones(tmp_path):
    faults = {2: ((1,), nan)} | dict.fromkeys((4, 5, 6), ((0, 1), vanish))
    settings = f"--run.steps 7 --optimizer.schedule constant --optimizer.warmup 0 --gradients.policies {CHAIN}"
    start(tmp_path / "whole", faults, settings)
    whole = metrics(tmp_path / "whole")
    said, other = ((tmp_path / f"whole logs/{rank}.out").read_text() for rank in range(2))
    # rank 1 has --debug
    assert (
        "skipped step 2: the loss is nan and" in said and "[rank 1] attention kernel" in other
    )
    assert [m["grad/skipped"] for m in whole] == [0, 1, 0, 0, 0, 0, 0]
    assert whole[1]["loss"] is None
    boosted = [m["lr"] / whole[0]["lr"] for m in whole]
    assert boosted == pytest.approx([1, 1, 1, 1.2, 1.2, 1.2, 1])
    weights = [saved(tmp_path / "whole", step) for step in range(1, 8)]
    for rank in range(2):  # the skipped step changed no weight, every other one did
        assert [k for k in range(1, 7) if weights[k][rank] == weights[k - 1][rank]] == [1]
    # step 5 is boosted, so is step 6, with which the resumed run begins
    settings += f" --run.resume {tmp_path}/whole/checkpoints/step-5"
    start(tmp_path / "resumed", faults, settings)
    assert without_times(metrics(tmp_path / "resumed")) == without_times(whole[5:])
    assert saved(tmp_path / "resumed", 7) == weights[-1]
