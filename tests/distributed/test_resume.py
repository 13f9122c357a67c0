"""A checkpoint continues on any number of ranks and any sequence-parallel degree, and only with its own model."""

import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.arch import ModelConfig
from tests.engine_case import SHAPE, Case, build_trainer
from tests.family_case import FAMILIES
from tests.harness import run_distributed
from tests.zero_case import whole
from ulysses.check.run_folder import read_run_state, saved_checkpoints
from ulysses.config.schema import RunSection
from ulysses.disk import DiskError
from ulysses.run.build import parameter_groups
from ulysses.run.checkpoint import check_share, save_checkpoint
from ulysses.zero.state import KINDS

BEFORE, AFTER = 2, 2
# bco_pair's mean reward is a state
LOSSES = {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]}
CASE = Case("dpo", sp=2, steps=BEFORE + AFTER, lr=1e-3, options=LOSSES)


def whole_state(engine):
    """Master weights and moments of every parameter, put together from all ranks."""
    pieces = ((s, kind) for s in engine.slices for kind in KINDS)
    return {f"{kind} {s.name}": whole(s, s.state(kind)) for s, kind in pieces}


def whole_run(folder, case=CASE):
    """All steps without a stop, with a checkpoint between them; the metrics and the state it saved."""
    trainer, _ = build_trainer(case)
    metrics = [trainer.train_step() for _ in range(BEFORE)]
    trainer.run = RunSection(steps=1, output=str(folder))
    trainer.save()
    state = whole_state(trainer.engine)
    metrics += [trainer.train_step() for _ in range(AFTER)]
    trainer.engine.destroy()
    return metrics, state


def resumed_run(folder, case):
    trainer, _ = build_trainer(case)
    trainer.resume(saved_checkpoints(folder / "checkpoints")[-1])
    assert trainer.step == BEFORE
    state = whole_state(trainer.engine)
    metrics = [trainer.train_step() for _ in range(AFTER)]
    trainer.engine.destroy()
    return metrics, state


MADE = {".step-1.tmp/dpo.json", ".step-1.tmp/run.json"}  # by rank 0 alone


def order_of_a_save(folder):
    """What reaches the disk, and the renames, in this rank's order; paths relative to the folder."""
    trainer, _ = build_trainer(CASE)
    events = []
    rename, fsync = os.rename, os.fsync

    def renamed(source, target):
        events.append(f"rename {Path(target).relative_to(folder)}")
        rename(source, target)

    def synced(number):
        fsync(number)
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{number}"), folder))

    with mock.patch.object(os, "rename", renamed), mock.patch.object(os, "fsync", synced):
        save_checkpoint(folder, trainer.engine, {"step": 1}, trainer.stage.save)
    trainer.engine.destroy()
    return events


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path):
    folder = tmp_path.resolve()
    first, second = run_distributed(order_of_a_save, 2, folder)
    assert [p.name for p in saved_checkpoints(folder)] == ["step-1"]
    ends = ["json", *(f"{kind}.safetensors" for kind in KINDS)]
    ours, theirs = ({f".step-1.tmp/rank-0000{rank}.{end}" for end in ends} for rank in (0, 1))
    assert set(second) == theirs
    at = first.index("rename step-1")
    assert set(first[:at]) == ours | {".step-1.tmp", *MADE}
    assert first[at + 1 :] == ["."]


def refusal(folder, case):
    trainer, _ = build_trainer(case)
    try:
        trainer.resume(folder / f"checkpoints/step-{BEFORE}")
    except ValueError as error:
        return str(error)
    return ""


def damage(kind, folder):
    """Damage a checkpoint of four ranks as `kind` says, and return the name of the file at fault."""
    file = folder / "rank-00002.exp_avg.safetensors"
    content = file.read_bytes()
    match kind:
        case "zeroed":
            file.write_bytes(content[:200] + bytes(len(content) - 200))
        case "another rank's":
            shutil.copy(folder / "rank-00001.exp_avg.safetensors", file)
        case "missing":
            file.unlink()
        case "index":
            file = folder / "rank-00001.json"
            file.write_text(file.read_text().replace("[[", "["))
    return file.name


DAMAGES = ("zeroed", "another rank's", "missing", "index")


def refusals(folder):
    """What resuming says on this rank for a checkpoint with each damage."""
    said = []
    for kind in DAMAGES:
        copy = folder / kind / f"step-{BEFORE}"
        try:
            # the ranks that find nothing would wait for the end
            with mock.patch.object(dist, "barrier"):
                check_share(copy, read_run_state(copy)["files"])
            said.append("")
        except DiskError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("world", [1, 3])
def test_every_damage_is_found_by_one_rank_and_named(world, saved, tmp_path):
    names, step = {}, f"step-{BEFORE}"
    for kind in DAMAGES:
        copy = shutil.copytree(saved[0] / "checkpoints" / step, tmp_path / kind / step)
        names[kind] = damage(kind, copy)
    for kind, *said in zip(DAMAGES, *run_distributed(refusals, world, tmp_path), strict=True):
        [sentence] = filter(None, said)
        fault = "is missing" if kind == "missing" else "does not hold what was written there"
        assert f"{kind}/{step}/{names[kind]}" in sentence and fault in sentence, sentence


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    metrics, state = run_distributed(whole_run, 4, folder, deterministic=True)[0]  # sp 2, dp 2
    return folder, metrics, state


AWAY = {"offload_optimizer": True, "offload_parameters": True}


@pytest.mark.parametrize(
    "world, sp, away",
    [
        (1, 1, {}),
        (4, 2, {}),
        (2, 2, AWAY),
    ],
)
def test_continues_on_another_topology_and_in_host_memory(world, sp, away, saved):
    folder, metrics, state = saved
    case = replace(CASE, sp=sp, engine=away)
    found = run_distributed(resumed_run, world, folder, case, deterministic=not away)[0]
    assert_continued(found, metrics, state, exact=(world, sp) == (4, 2))


def test_what_host_memory_saved_continues_without(tmp_path):
    before = run_distributed(whole_run, 2, tmp_path, replace(CASE, engine=AWAY))[0]
    [found] = run_distributed(resumed_run, 1, tmp_path, replace(CASE, sp=1))
    assert_continued(found, *before)


def test_experts_and_linear_attention_continue_at_another_degree(tmp_path):
    case = replace(CASE, shape=ModelConfig.from_hf(FAMILIES["qwen3_next"]))
    before = run_distributed(whole_run, 2, tmp_path, case)[0]
    found, *_ = run_distributed(resumed_run, 2, tmp_path, replace(case, sp=1))
    assert_continued(found, *before)


def assert_continued(found, metrics, state, exact=False):
    steps, restored = found
    assert set(restored) == set(state)
    assert all(torch.equal(restored[name], value) for name, value in state.items())
    # margins are differences of large numbers
    for name in ("loss", "grad_norm", "logps/chosen"):
        theirs, ours = ([step[name] for step in some] for some in (metrics[BEFORE:], steps))
        assert ours == (theirs if exact else pytest.approx(theirs, rel=1e-5)), name


# of embedding and head, each of 16,384 elements: slices of 4 ranks are whole blocks, those of 3 are not
EIGHT_BIT = {"groups": partial(parameter_groups, weight_decay=0.0, eight_bit=True)}


def test_moments_in_8_bits_continue_everywhere(tmp_path):
    """Bit by bit where the slices are the same, and with float32 moments; elsewhere but for their rounding."""
    case = replace(CASE, sp=2, shape=replace(SHAPE, vocab_size=512), engine=EIGHT_BIT)
    metrics, state = run_distributed(whole_run, 4, tmp_path, case, deterministic=True)[0]
    for world, sp, engine in (
        (4, 2, EIGHT_BIT),
        (3, 1, EIGHT_BIT),
        (2, 1, {}),
    ):
        other = replace(case, sp=sp, engine=engine)
        steps, restored = run_distributed(resumed_run, world, tmp_path, other)[0]
        same = world != 3
        for name, value in state.items():
            quantised = ("embed" in name or "lm_head" in name) and "master" not in name
            error = (restored[name] - value).norm() / value.norm()
            assert error <= (0.02 if quantised and not same else 0), (name, world)
        losses = [[step["loss"] for step in some] for some in (metrics[BEFORE:], steps)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5 if world == 4 else 1e-3)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"vocab_size": 64},
            "holds 3104 elements of model.embed_tokens.weight, this model has 2048",
        ),
        ({"num_hidden_layers": 3}, "holds 0 elements of model.layers.2.self_attn"),
        ({"num_hidden_layers": 1}, "of model.layers.1.self_attn[a-z_.]*, this model has 0"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(change, sentence, saved):
    case = replace(CASE, sp=1, shape=replace(SHAPE, **change))
    [text] = run_distributed(refusal, 1, saved[0], case)
    assert "belongs to another model" in text
    assert re.search(sentence, text), text
