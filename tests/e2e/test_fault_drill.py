"""Faults planted in real runs by benchmarks/fault_drill.py: nobody hangs, bad steps touch no weight, a boosted phase resumes exactly."""

import hashlib
import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.e2e.launch import ROOT, Ranks, metrics, tiny

CHAIN = [
    {"policy": "skip_non_finite"},
    {"policy": "zclip", "warmup": 2},
    {"policy": "gradient_noise", "ratio": 0.1, "when": {"mean_abs_below": 1e-5}},
    {"policy": "boost_learning_rate", "factor": 1.5, "when": {"mean_abs_below": 1e-5}},
    {"policy": "clip_global_norm", "max_norm": 1.0},
]


def drill() -> Any:
    spec = importlib.util.spec_from_file_location("fault_drill", ROOT / "benchmarks/fault_drill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(tmp_path: Path, name: str, faults: list[dict[str, Any]], late: float = 0.0, **settings: Any) -> Ranks:
    """Train on two processes with faults; rank 1 is the bad one. The process that tells of an error begins to `late` seconds later."""
    arguments = tiny("sft", tmp_path / name, tmp_path / "cache", run__save_every=1, run__keep=0, run__export=False, **settings)
    script = drill()

    def before(rank: int) -> None:
        import ulysses.training.failure as failure

        claim = failure._claim

        def claimed() -> bool:
            first = claim()
            time.sleep(late if first else 0.0)
            return first

        failure._claim = claimed
        sys.exit(script.run_with_faults([script.Fault(**fault) for fault in faults], arguments))

    return Ranks(arguments, 2, tmp_path / f"{name} logs", before=before)


def ends(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(2)]


def saved_digests(folder: Path, step: int) -> list[str]:
    """Each rank's master weights in a checkpoint."""
    files = [folder / f"checkpoints/step-{step}/policy/rank-{rank:05d}.master.safetensors" for rank in range(2)]
    return [hashlib.sha256(load_file(f)["data"].numpy().tobytes()).hexdigest() for f in files]


def test_nan_on_one_rank_stops_all_with_one_sentence_and_untouched_weights(tmp_path: Path) -> None:
    """And nobody leaves before that is told, however late: a launcher ends all processes once one has left."""
    run = start(tmp_path, "stop", [{"kind": "nan", "first": 3, "last": 3, "rank": 1}], late=1.5)
    while run.poll() and not run.codes:
        time.sleep(0.01)
    assert any("error: " in (tmp_path / f"stop logs/{rank}.err").read_text() for rank in range(2))
    outcome = run.wait(60)
    assert outcome.code == 1
    [told] = re.findall(r"error: rank .*$", outcome.stderr, re.M)  # perhaps behind an unfinished progress bar
    assert re.match(r"error: rank \d, step 3: the loss is nan and \d+ gradient elements are inf or nan, in model\.embed_tokens", told), told
    assert "Traceback" not in outcome.stderr
    assert [m["step"] for m in metrics(tmp_path / "stop")] == [1, 2]
    for rank, end in enumerate(ends(tmp_path / "stop")):
        assert end == {"step": 2, "finite": True, "digest": saved_digests(tmp_path / "stop", 2)[rank]}


def test_skipped_and_boosted_steps_and_a_resume_between_boosted_ones(tmp_path: Path) -> None:
    faults = [{"kind": "nan", "first": 2, "last": 2, "rank": 1}, {"kind": "vanish", "first": 4, "last": 6, "factor": 1e-5}]
    settings = {"run__steps": 7, "gradients__policies": CHAIN, "optimizer__schedule": "constant", "optimizer__warmup": 0}
    start(tmp_path, "whole", faults, **settings).wait(60).check()
    whole = metrics(tmp_path / "whole")
    assert [m["grad/skipped"] for m in whole] == [0, 1, 0, 0, 0, 0, 0] and whole[1]["loss"] is None
    boosted = [m["lr"] / whole[0]["lr"] for m in whole]
    assert boosted == [1, 1, 1, 1.5, 1.5, 1.5, 1]
    digests = [saved_digests(tmp_path / "whole", step) for step in range(1, 8)]
    for rank in range(2):  # the skipped step changed no weight, every other one did
        assert [digests[k][rank] == digests[k - 1][rank] for k in range(1, 7)] == [True, False, False, False, False, False]
    # step 5 is boosted, so is step 6, with which the resumed run begins
    start(tmp_path, "resumed", faults, run__resume=tmp_path / "whole/checkpoints/step-5", **settings).wait(60).check()
    speed = ("seconds", "tokens_per_second")
    told = [{k: v for k, v in m.items() if k not in speed} for m in metrics(tmp_path / "resumed")]
    assert told == [{k: v for k, v in m.items() if k not in speed} for m in whole[5:]]
    assert ends(tmp_path / "resumed") == ends(tmp_path / "whole")
    assert all(end["finite"] for end in ends(tmp_path / "whole"))
