"""TrainingRun from Python: settings in, metrics and exports out, nothing left behind by an error."""

import gc
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.e2e.test_stage_runs import demo, settings  # noqa: F401 (a fixture)
from tests.harness import free_port, run_distributed
from ulysses.run import training_run as run_module
from ulysses.run.failure import POLL_SECONDS
from ulysses.run.training_run import TrainingRun
from ulysses.zero.construct import initialize_distributed


@pytest.fixture(scope="module")
def place(demo):  # noqa: F811
    return demo


def changed(place: Path, **changes: Any) -> TrainingRun:
    """A run of DPO with these changes, a__b for [a] b."""
    values = {"run__overwrite": True, "run__steps": 2, "batch__examples": 4, "data__eval": []}
    return TrainingRun(settings(place, "dpo", place / "run", **values | changes))


def face(place: Path, port: int) -> dict[str, Any]:
    changes = {
        "data__train": str(place / "dpo_eval.jsonl"),
        "parallel__sequence_parallel_size": 2,
    }
    with suppress(ArithmeticError), changed(place):
        raise ArithmeticError  # on every rank, and all go on
    with changed(place, **changes) as run:
        run.train()
        found = {"step": run.trainer.step, "metrics": run.trainer.metrics}
        run.export(place / "elsewhere")
    time.sleep(3 * POLL_SECONDS)
    found["watching"] = [t.name for t in threading.enumerate()].count("failure watch")
    os.environ["MASTER_PORT"] = str(port)
    initialize_distributed()  # for the harness
    return found


def test_settings_metrics_and_export(place):
    found = run_distributed(face, 2, place, free_port())[0]
    line = json.loads((place / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["lr"] == 1e-3
    assert (
        found["watching"] == 0
    )  # who still watched for failures would take a later run's end for one
    assert found["step"] == 2
    assert all(
        found["metrics"][name] == line[name] for name in ("loss", "tokens", "tokens_per_second")
    )
    elsewhere, exported = (
        place / folder / "model.safetensors" for folder in ("elsewhere", "run/export")
    )
    assert elsewhere.read_bytes() == exported.read_bytes()


def live_tensors() -> list[torch.Tensor]:
    """All tensors that this process holds."""
    gc.collect()
    return [
        thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    ]


def live_bytes() -> int:
    storages = [
        tensor.untyped_storage() for tensor in live_tensors() if tensor.device.type != "meta"
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def one(place: Path, fault: str = "", **overrides: Any) -> tuple[int, int, float | None]:
    """Train (or fail) and return the tensors' bytes inside and after, and the last loss."""
    run = changed(place, **overrides)
    inside, loss = 0, None
    try:
        with run:
            run.train()
            inside, loss = live_bytes(), run.trainer.metrics["loss"]
            if fault:
                raise ArithmeticError(fault)
    except ArithmeticError as error:
        assert str(error) == fault
    assert not dist.is_initialized() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return inside, live_bytes(), loss


def several_runs(place: Path) -> list[tuple[int, int, float | None]]:
    dist.destroy_process_group()
    gc.unfreeze()  # what the rank began with counts, too
    inherited = (
        live_tensors()
    )  # of earlier tests, whose process this one was forked from: none may go meanwhile
    held = live_bytes()
    found = [one(place), one(place, "while training"), one(place, dpo__reference="live")]
    with mock.patch.object(
        run_module, "Trainer", side_effect=ArithmeticError("the start")
    ):  # engines exist by then
        found.append((held + (1 << 20), *one(place, "the start", dpo__reference="live")[1:]))
    found += [
        one(place, memory__offload_optimizer=True, memory__offload_parameters=True),
        one(place),
    ]
    initialize_distributed()  # for the harness
    del inherited
    return [(inside - held, after - held, loss) for inside, after, loss in found]


def test_everything_is_released_and_a_process_may_run_again(place):
    """After success, after an error while training, and after one in the middle of the start."""
    found = run_distributed(several_runs, 1, place)[0]
    model = 4 * (2 * 1024 * 32 + 2 * (3 * 32 * 48 + 3 * 32 * 32))
    for inside, after, _ in found:
        assert inside > 3 * model and after < 1000, found
    losses = [loss for _, _, loss in found if loss is not None]
    assert len(losses) == 5 and all(
        loss == pytest.approx(losses[0], abs=1e-6) for loss in losses
    )


def wrong_kernel(place: Path) -> None:
    """Start a run on a kernel whose gradients are wrong."""
    dist.destroy_process_group()
    wrong = mock.patch.object(run_module, "prove_kernel", side_effect=FloatingPointError)
    with wrong, suppress(FloatingPointError):
        changed(place, run__output=str(place / "earlier")).__enter__()
        raise AssertionError("the run has begun")
    initialize_distributed()  # for the harness


def test_a_kernel_with_wrong_gradients_does_not_train(place):
    (place / "earlier").mkdir()
    (place / "earlier/metrics.jsonl").write_text("an earlier run's")
    run_distributed(wrong_kernel, 1, place)
    assert (
        place / "earlier/metrics.jsonl"
    ).read_text() == "an earlier run's"  # run.overwrite has not begun
