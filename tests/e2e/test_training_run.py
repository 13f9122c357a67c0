"""TrainingRun from Python: settings in, metrics and exports out, nothing left behind by an error."""

import gc
import math
import os
import signal
import threading
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.e2e.launch import metrics
from tests.e2e.test_stage_runs import configured, settings
from tests.harness import free_port, run_distributed, unfreeze, until
from ulysses.run.training_run import TrainingRun
from ulysses.zero.construct import initialize_distributed


def changed(place, typed=""):
    """A run of DPO with these changes, without held-out data."""
    usual = f"--run.save_last false --run.steps 2 --batch.examples 4 {typed}"
    values = configured(settings("dpo", place / "run", usual)).model_dump()
    values["data"]["eval"] = []
    return TrainingRun(values)


def face(place, port):
    with suppress(ArithmeticError), changed(place):
        raise ArithmeticError  # on every rank, and all go on
    with changed(place, "--parallel.sequence_parallel_size 2") as run:
        run.train()
        found = {"step": run.trainer.step, "metrics": run.trainer.metrics}
        run.export(place / "elsewhere")
    found["silent"] = until(lambda: "heartbeat" not in [t.name for t in threading.enumerate()])
    os.environ["MASTER_PORT"] = str(port)
    initialize_distributed()  # for the harness
    return found


def test_settings_metrics_and_export(tmp_path):
    found = run_distributed(face, 2, tmp_path, free_port())[0]
    line = metrics(tmp_path / "run")[-1]
    # who still watched for failures would take a later run's end for one
    assert found["silent"] and line["lr"] == 1e-3 and found["step"] == 2
    for name in ("loss", "tokens", "tokens_per_second"):
        assert found["metrics"][name] == line[name]
    elsewhere, exported = (
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("elsewhere", "run/export")
    )
    assert elsewhere == exported


def live_tensors():
    """All tensors that this process holds."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]


def live_bytes():
    storages = [x.untyped_storage() for x in live_tensors() if x.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def one(place, fault="", typed=""):
    """Train (or fail) and return the tensors' bytes inside and after, and the last loss."""
    run = changed(place, f"--run.export false {typed}")
    inside, loss = 0, None
    try:
        with run:
            run.train()
            assert run.watch.moved == math.inf, "what else the program does takes any time"
            inside, loss = live_bytes(), run.trainer.metrics["loss"]
            if fault:
                raise ArithmeticError(fault)
    except ArithmeticError as error:
        assert str(error) == fault
    assert not dist.is_initialized() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return inside, live_bytes(), loss


def open_files():
    """Return how many files this process has open, once no earlier run watches it."""
    assert until(lambda: "heartbeat" not in [t.name for t in threading.enumerate()])
    return len(os.listdir("/proc/self/fd"))


def several_runs(place):
    dist.destroy_process_group()
    unfreeze()  # what the rank began with counts, too
    # of earlier tests, whose process this one was forked from: none may go meanwhile
    inherited = live_tensors()
    held, live = live_bytes(), "--dpo.reference live"
    found, opened = [one(place)], open_files()
    found += [one(place, "while training"), one(place, "", live)]
    assert open_files() <= opened
    # before run.overwrite has begun, and when engines exist
    for place_of in (
        "ulysses.check.kernel_proof.prove_once",
        "ulysses.run.training_run.Trainer",
    ):
        with mock.patch(place_of, side_effect=ArithmeticError("the start")):
            found.append((held + (1 << 20), *one(place, "the start", live)[1:]))
        assert place_of.endswith("Trainer") or metrics(place / "run")[-1]["loss"] == found[2][2]
    away = "--memory.offload_optimizer true --memory.offload_parameters true"
    found += [one(place, "", away), one(place)]
    initialize_distributed()  # for the harness
    del inherited
    return [(inside - held, after - held, loss) for inside, after, loss in found]


def test_everything_is_released_and_a_process_may_run_again(tmp_path):
    """After success, an error while training, a kernel with wrong gradients, an error amid the start."""
    found = run_distributed(several_runs, 1, tmp_path)[0]
    model = 4 * (2 * 704 * 32 + 2 * (3 * 32 * 48 + 3 * 32 * 32))
    for inside, after, _ in found:
        assert inside > 3 * model and after < 1000, found
    losses = [loss for _, _, loss in found if loss is not None]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-6)
