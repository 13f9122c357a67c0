"""dpo.reference = a folder: another model, frozen under ZeRO-3 beside the policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.decoder import CausalLM
from models.hf_format import read_config
from tests.e2e.launch import without_times
from tests.e2e.test_stage_runs import SHAPE, base, demo, on_ranks, settings  # noqa: F401 (fixtures)
from tests.harness import run_distributed
from tests.zero_case import filled
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import InitialWeights
from ulysses.training.command_line import check
from ulysses.training.run import TrainingRun


def dpo(demo: Path, policy: Path, output: Path, **changes: Any) -> dict[str, Any]:  # noqa: F811
    config = settings(demo, "dpo", output, parallel__sequence_parallel_size=2, optimizer__lr=3e-3, **changes)
    config["model"] = {"path": str(policy), "dtype": "float32"}
    return config


def test_the_initial_policys_own_folder_is_the_live_reference(demo, base, tmp_path) -> None:  # noqa: F811
    found = [
        on_ranks(2, dpo(demo, base, tmp_path / name, dpo__reference=kind, run__steps=3))
        for name, kind in (("live", "live"), ("path", str(base)))
    ]
    live, path = map(without_times, found)
    assert live == path
    assert live[0]["loss"] == pytest.approx(np.log(2), abs=1e-6) and live[2]["loss"] < 0.68


def plain(folder: Path) -> CausalLM:
    """The model in float64 in one process."""
    shape = read_config(folder)
    model = CausalLM(shape, None, attention="reference")
    return filled(model, InitialWeights(shape, 0, folder)).double()


def answer_logps(model: CausalLM, s: Sequence) -> torch.Tensor:
    weights = torch.from_numpy(np.array(s.loss_weights)).double()
    with torch.no_grad():
        out = model(pack_shard([s], ParallelMesh(1))).logps
    return (out[: len(weights) - 1] * weights[1:]).sum()


def with_another(config: dict[str, Any], policy: Path, reference: Path) -> tuple[list[float], list[float], float]:
    """First loss and margin of a run and of the formula, and how far three steps moved the reference."""
    run = TrainingRun(check(config))
    run.__enter__()
    assert run.trainer is not None
    examples = [example for micro_batch in run.trainer.loader.step(0, 0) for example in micro_batch]
    ours, theirs = plain(policy), plain(reference)
    margins = torch.stack([
        answer_logps(ours, c) - answer_logps(theirs, c) - answer_logps(ours, r) + answer_logps(theirs, r)
        for c, r in (e.sequences for e in examples)
    ])  # fmt: skip
    expected = [float(-F.logsigmoid(0.1 * margins).mean()), float(0.1 * margins.mean())]
    frozen = run.trainer.stage.reference
    # "auto" is decided anew for every pack, by each model
    assert {e.module.model.layers[0].self_attn.attention.kernel for e in (run.engine, frozen)} == {"auto"}
    before = [p.ds_tensor.clone() for p in frozen.module.parameters()]
    assert frozen.partition is None and all(p.ds_tensor.numel() < p.ds_numel for p in frozen.module.parameters())
    first, *_ = (run.trainer.train_step() for _ in range(3))
    moved = max(float((p.ds_tensor - b).abs().max()) for p, b in zip(frozen.module.parameters(), before, strict=True))
    return [first["loss"], first["rewards/margins"]], expected, moved


def test_another_reference_gives_its_own_loss(demo, base, tmp_path) -> None:  # noqa: F811
    # heads that the policy's degree does not divide
    shape = SHAPE | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    changes = {"run__steps": 3, "run__seed": 7, "optimizer__lr": 3e-2, "model__config": shape}
    on_ranks(1, settings(demo, "sft", tmp_path / "other", **changes))
    other = tmp_path / "other" / "export"
    config = dpo(demo, base, tmp_path / "run", dpo__reference=str(other), dpo__beta=0.1)
    for found, expected, moved in run_distributed(with_another, 2, config, base, other, with_zero=True, cpu=True):
        assert found == pytest.approx(expected, rel=1e-5)
        assert abs(expected[0] - np.log(2)) > 1e-2, "the other reference shows"
        assert moved == 0
