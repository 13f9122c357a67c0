"""Whole runs of DPO, RM, KTO and adapters: training, evaluation, checkpoints, references, exports read by others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from examples.demo_data import write_demo
from models.hf_format import read_config
from models.lora import is_adapter
from tests.harness import AS_LARGE, run_distributed
from tests.model_folder import tiny_config
from tests.zero_case import filled
from ulysses.config.command_line import check
from ulysses.export import main
from ulysses.run.build import InitialWeights
from ulysses.run.memory_choice import planner_model
from ulysses.run.preflight import prepare
from ulysses.run.training_run import TrainingRun
from ulysses.zero.engine import full_parameters

SHAPE = tiny_config(vocab_size=1024, initializer_range=0.1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A few rows of the demo data of every stage, and its tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    for path in folder.glob("*.jsonl"):
        rows = path.read_text().splitlines()
        path.write_text("\n".join(rows[: 12 if "_eval" in path.name else 29]) + "\n")
    return folder


def settings(demo: Path, stage: str, output: Path, **changes: Any) -> dict[str, Any]:
    """A run's configuration; keyword arguments a__b = value set [a] b."""
    config: dict[str, Any] = {
        "stage": stage,
        "model": {"init": "random", "config": SHAPE, "tokenizer": str(demo / "tokenizer"), "dtype": "float32"},
        "data": {"train": str(demo / f"{stage}_train.jsonl"), "eval": str(demo / f"{stage}_eval.jsonl"),
                 "max_length": 128, "cache": str(demo / "cache")},
        "batch": {"examples": 7, "tokens_per_microbatch": 256},
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
        "run": {"output": str(output), "steps": 3},
        "deepspeed": {"zero_optimization": AS_LARGE},
    }  # fmt: skip
    for key, value in changes.items():
        section = config
        *path, last = key.split("__")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return config


def from_model(
    demo: Path, model: Path, stage: str, output: Path, **changes: Any
) -> dict[str, Any]:
    """The same, but the run starts from a model's folder."""
    config = settings(demo, stage, output, **changes)
    drawn = ("init", "config", "tokenizer")
    config["model"] = {k: v for k, v in config["model"].items() if k not in drawn} | {
        "path": str(model)
    }
    return config


def train(config: dict[str, Any], stop_after: int | None = None) -> list[dict[str, float]]:
    """Run on this rank; returns the logged lines on rank 0."""
    run = TrainingRun(check(config))
    run.__enter__()
    original = run.trainer.train_step

    def step() -> dict[str, float]:
        if run.trainer.step + 1 == stop_after:
            run.watch.ask_to_stop()
        return original()

    run.trainer.train_step = step
    run.train()
    run.resources.close()
    lines = (Path(config["run"]["output"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines] if dist.get_rank() == 0 else []


def on_ranks(world: int, config: dict[str, Any], **more: Any) -> list[dict[str, float]]:
    return run_distributed(train, world, config, timeout=200, cpu=True, **more)[0]


def strictly(config: dict[str, Any]) -> tuple[list[dict[str, float]], bool]:
    lines = train(config)
    return lines, torch.get_deterministic_debug_mode() == 2


def test_deterministic_runs_have_the_same_numbers(demo, tmp_path):
    """Memory that torch leaves uninitialised is filled with nan there, so nobody reads any."""
    config = settings(
        demo, "dpo", tmp_path / "plain", parallel__sequence_parallel_size=2, run__steps=2
    )
    usual = on_ranks(2, config)
    config["run"] |= {"output": str(tmp_path / "strict"), "deterministic": True}
    lines, strict = run_distributed(strictly, 2, config, cpu=True)[0]
    assert strict and [[x["loss"], x["grad_norm"]] for x in lines] == [
        [x["loss"], x["grad_norm"]] for x in usual
    ]


def test_kto_begins_at_the_reference(demo, tmp_path):
    for options in ({}, {"kto__reference": "live"}, {"model__lora__rank": 2}):
        changes = {"run__steps": 1, "run__overwrite": True, **options}
        [first] = on_ranks(1, settings(demo, "kto", tmp_path / "run", **changes))
        assert first["loss"] == pytest.approx(0.5, abs=1e-6)
        assert abs(first["rewards/margins"]) < 1e-5
        assert first["kl"] == pytest.approx(0.0, abs=1e-4) and first["reference_gap"] < 1e-5


def test_cached_reference_is_the_live_one_in_every_epoch(demo, tmp_path):
    """29 examples in steps of 7: five steps an epoch, the last one of a single example without a partner."""
    more = {"run__steps": 12, "optimizer__lr": 3e-3}
    runs = [
        on_ranks(world, settings(demo, "kto", tmp_path / kind, kto__reference=kind, **more))
        for kind, world in (("cached", 1), ("live", 2))
    ]
    assert max(line["kl"] for line in runs[0]) > 0.01
    for a, b in zip(*runs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5), a["step"]
        assert a["kl"] == pytest.approx(b["kl"], abs=5e-3)
    assert runs[0][4]["kl"] == 0.0  # one example: no mismatch, no baseline, and finite


def test_kto_resumes_only_with_its_reference(demo, tmp_path):
    config = settings(demo, "kto", tmp_path / "run", run__steps=6, run__resume="auto")
    on_ranks(1, config, stop_after=3)
    config["data"]["cache"] = str(tmp_path / "cache")
    with pytest.raises(
        AssertionError,
        match=r"no longer has the initial policy; restore data\.cache, or set kto\.ref",
    ):
        on_ranks(1, config)


def test_reward_model_scores_the_same_in_transformers(demo, tmp_path):
    """Score at the last token by length: with EOS inside the prompt, with padding, and where pad equals EOS."""
    from transformers import AutoModelForSequenceClassification

    config = settings(demo, "rm", tmp_path / "run")
    last, export = on_ranks(2, config)[-1], tmp_path / "run" / "export"
    rows = [[3, 5, 9, 650, 7], [4, 650, 4], [11, 12, 13, 14, 15, 16, 650]]
    ours = run_distributed(scores, 2, export, rows, cpu=True)[0]
    theirs = AutoModelForSequenceClassification.from_pretrained(
        export, dtype=torch.float32
    ).eval()
    pad = theirs.config.pad_token_id
    assert theirs.config.num_labels == 1 and pad is not None
    width = max(map(len, rows))
    padded = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    with torch.no_grad():
        found = theirs(padded, attention_mask=(padded != pad).long()).logits.flatten()
        alone = torch.stack([theirs(torch.tensor([row])).logits.flatten()[0] for row in rows])
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, ours, rtol=1e-4, atol=1e-5)
    # The head travels: a run that starts from the export, with learning rate 0, evaluates exactly alike.
    line = on_ranks(
        1, from_model(demo, export, "rm", tmp_path / "again", run__steps=1, optimizer__lr=0.0)
    )[-1]
    for name in ("eval/loss", "eval/accuracy", "eval/mean_reward"):
        assert line[name] == pytest.approx(last[name], rel=1e-4)


def scores(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    from models.decoder import RewardModel
    from ulysses.parallel.batch import Sequence, pack_shard
    from ulysses.parallel.mesh import ParallelMesh
    from ulysses.parallel.sums import sequence_last

    mesh, shape = ParallelMesh(2), read_config(folder)
    model = filled(RewardModel(shape, mesh), InitialWeights(shape, 0, folder))
    with torch.no_grad():
        batch = pack_shard([Sequence(torch.tensor(r), torch.zeros(len(r))) for r in rows], mesh)
        return sequence_last(model(batch), batch)


@pytest.fixture(scope="module")
def base(demo, tmp_path_factory):
    """A pretrained model folder."""
    folder = tmp_path_factory.mktemp("base") / "run"
    on_ranks(1, settings(demo, "sft", folder, run__steps=2))
    return folder / "export"


def with_adapters(
    demo: Path, base: Path, stage: str, output: Path, **changes: Any
) -> dict[str, Any]:
    return from_model(
        demo, base, stage, output, optimizer__lr=2e-2, model__lora__rank=4, **changes
    )


@torch.no_grad()
def logps(model: Any, sequence: Any) -> torch.Tensor:
    """Sum of the trained tokens' log-probabilities, by transformers."""
    tokens = torch.tensor(sequence.tokens[:].astype("int64"))
    weights = torch.tensor(sequence.loss_weights[:].astype("float64"))[1:]
    scores = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
    return (scores.gather(-1, tokens[1:, None])[:, 0] * weights).sum()


def held_out(config: dict[str, Any]) -> Any:
    return prepare(check(config), 2).open_data()[1]


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_adapters_load_with_peft(demo, base, tmp_path, stage):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def model(folder: Path) -> Any:
        if stage == "sft":
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )

    line = on_ranks(2, with_adapters(demo, base, stage, tmp_path / "run"))[-1]
    plain, merged = tmp_path / "run/export", tmp_path / "merged"
    assert main(["--merge", str(plain), str(merged)]) == 0
    assert not list(plain.glob("model*.safetensors"))
    assert json.loads((plain / "adapter_config.json").read_text())["r"] == 4
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        start = model(base).eval()
        before = start(tokens).logits
        adapted = PeftModel.from_pretrained(start, plain).eval()
        after = adapted(tokens).logits
        torch.testing.assert_close(after, model(merged)(tokens).logits, rtol=1e-3, atol=1e-3)
    if stage == "sft":  # transformers draws the score head of the base anew each time
        assert (after - before).abs().max() > 0.05
        rows = [
            example.sequences[0]
            for example in held_out(settings(demo, "sft", tmp_path / "nowhere"))
        ]
        nll = -sum(logps(adapted, s) for s in rows) / sum(
            s.loss_weights[1:].sum() for s in rows
        )
        assert line["eval/nll"] == pytest.approx(float(nll), rel=1e-4)


def test_only_adapters_have_memory_and_reach_the_checkpoint(demo, base, tmp_path):
    config = with_adapters(demo, base, "dpo", tmp_path / "run", run__save_every=2, run__steps=2)
    sizes, changed = run_distributed(measured, 2, config, cpu=True)[0]
    rank, width, ff, kv = 4, 32, 48, 16
    pairs = [
        (width, width),
        (width, kv),
        (width, kv),
        (width, width),
        (width, ff),
        (width, ff),
        (ff, width),
    ]
    adapters = 2 * sum(rank * (a + b) for a, b in pairs)
    padding = 2 * 7 * 2 * 2  # every partition is padded to a multiple of the ranks
    for size in sizes:
        assert adapters / 2 <= size <= adapters / 2 + padding, (sizes, adapters)
    assert changed and all(map(is_adapter, changed))
    files = (tmp_path / "run").glob("checkpoints/step-2/*.master.safetensors")
    saved = sum(len(load_file(p)["data"]) for p in files)
    assert saved == adapters == planner_model(check(config), read_config(base)).trained


def measured(config: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Elements of gradients, master weights and moments on this rank, and the parameters that a run changed."""
    run = TrainingRun(check(config))
    run.__enter__()
    engine, sizes = run.engine, []
    partition, before, original = engine.partition, dict(full_parameters(engine)), engine.step

    def step(rates: list[float]) -> None:
        sizes[:] = [sum(f.grad.numel() for f in partition.masters)]
        assert all(p.grad is None for p in engine.module.parameters() if not p.requires_grad)
        original(rates)

    engine.step = step
    run.train()
    sizes += [sum(f.numel() for f in partition.masters)]
    sizes += [sum(engine.optimizer.state[f]["exp_avg"].numel() for f in partition.masters)]
    after = full_parameters(engine)
    return sizes, [
        n for n, value in after if value is not None and not torch.equal(value, before[n])
    ]


def test_base_with_adapters_off_is_the_reference_at_any_time(demo, base, tmp_path):
    """Cached and live agree, no second engine is built, and a resumed run may fill a lost cache."""
    how = (demo, base, "dpo")
    live = on_ranks(
        1, with_adapters(*how, tmp_path / "live", run__steps=4, dpo__reference="live")
    )
    config = with_adapters(*how, tmp_path / "cached", run__steps=4, run__resume="auto")
    on_ranks(1, config, stop_after=2)
    config["data"]["cache"] = str(tmp_path / "lost")
    cached = on_ranks(1, config)
    assert live[-1]["rewards/margins"] != 0
    for a, b in zip(live, cached, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["rewards/margins"] == pytest.approx(b["rewards/margins"], abs=1e-5)


def test_another_reference_gives_its_own_loss_and_stays_as_it_was(demo, base, tmp_path):
    """After three steps the held-out loss is that of the exported policy against the reference's untouched folder."""
    from transformers import AutoModelForCausalLM

    # heads that the policy's degree does not divide
    shape = SHAPE | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    changes = {"run__seed": 7, "optimizer__lr": 3e-2, "model__config": shape}
    on_ranks(1, settings(demo, "sft", tmp_path / "other", **changes))
    reference = tmp_path / "other/export"
    config = from_model(demo, base, "dpo", tmp_path / "run", parallel__sequence_parallel_size=2, optimizer__lr=3e-3,
                        dpo__reference=str(reference))  # fmt: skip
    last = on_ranks(2, config)[-1]
    folders = (tmp_path / "run/export", reference)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders
    )
    config |= {
        "batch": config["batch"] | {"share_prompts": False},
        "run": {"output": str(tmp_path / "no"), "steps": 1},
    }
    gains = torch.tensor(
        [[logps(ours, s) - logps(theirs, s) for s in e.sequences] for e in held_out(config)]
    )
    margins = 0.1 * (gains[:, 0] - gains[:, 1])
    assert last["eval/loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-4)
    assert last["eval/rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-3)
    assert abs(last["eval/loss"] - np.log(2)) > 1e-2, "the other reference shows"
    assert last["tokens_shared"] > 0, (
        "the run computes each prompt once; the loss above is of whole sequences"
    )
