"""Whole runs of DPO, RM, KTO and adapters: training, evaluation, checkpoints, references, exports read by others."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from models.folders import read_config, read_json
from models.initial_weights import InitialWeights
from models.lora import is_adapter
from models.scored import RewardModel
from tests.e2e.launch import metrics, python, rows, tiny, without_times
from tests.harness import run_distributed
from tests.zero_case import filled
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.disk import write_json
from ulysses.export import main
from ulysses.options import stage_of
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import sequence_last
from ulysses.plan.planner import planner_model
from ulysses.run.build import open_data
from ulysses.run.training_run import TrainingRun
from ulysses.zero.engine import full_parameters
from ulysses.zero.state import KINDS

SHAPE = """
--model.config.intermediate_size 48 --model.config.num_hidden_layers 2 --model.config.head_dim 8
--model.config.initializer_range 0.1
"""
USUAL = """
--data.max_length 128 --batch.examples 7 --batch.tokens_per_microbatch 256
--optimizer.lr 1e-3 --optimizer.schedule constant --optimizer.warmup 0 --run.steps 3 --run.seed 0
"""


def settings(stage, output, typed=""):
    """A run on a few rows of the demo data; without a model in what is typed it starts from random weights."""
    shape = "" if "--model.path" in typed else SHAPE
    data = f"--data.train {rows(f'{stage}_train', 29)} --data.eval {rows(f'{stage}_eval', 12)}"
    return tiny(stage, output, f"{data} {USUAL} {shape} {typed}")


def pretrained(model):
    return f"--model.path {model} --model.init pretrained"


def configured(line):
    return parse_command_line(line).config


def train(line):
    """Run on this rank; returns the logged lines on rank 0."""
    run = TrainingRun(configured(line))
    run.__enter__()
    run.train()
    run.resources.close()
    return metrics(Path(run.config.run.output)) if dist.get_rank() == 0 else []


def on_ranks(world, line):
    return run_distributed(train, world, line, cpu=True)[0]


def test_deterministic_runs_have_the_same_numbers(tmp_path):
    """Memory that torch leaves uninitialised is filled with nan there, so nobody reads any."""
    settled = "--parallel.sequence_parallel_size 2 --run.steps 2"
    line = settings("dpo", tmp_path / "plain", settled)
    usual = on_ranks(2, line)
    strict = [*line, "--run.output", str(tmp_path / "strict"), "--run.deterministic"]
    same = on_ranks(2, strict)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in same] == [line[name] for line in usual]


def test_cached_reference_is_the_live_one_in_every_epoch(tmp_path):
    typed = "--run.steps 12 --optimizer.lr 3e-3 --dpo.reference"
    cached, live = (
        on_ranks(world, settings("dpo", tmp_path / kind, f"{typed} {kind}"))
        for kind, world in (("cached", 1), ("live", 2))
    )
    assert max(abs(line["rewards/margins"]) for line in cached) > 0.01
    for a, b in zip(cached, live, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5), a["step"]
        assert a["rewards/margins"] == pytest.approx(b["rewards/margins"], abs=1e-4)


def test_kto_trains_against_its_reference_in_every_epoch(tmp_path):
    """29 examples in steps of 7: five steps an epoch, the last one of a single example without a partner."""
    typed = "--run.steps 12 --optimizer.lr 3e-3"
    alone, two = (on_ranks(n, settings("kto", tmp_path / f"{n}", typed)) for n in (1, 2))
    assert max(line["kl"] for line in alone) > 0.01
    for a, b in zip(alone, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5), a["step"]
        assert a["kl"] == pytest.approx(b["kl"], abs=5e-3)
    assert alone[4]["kl"] == 0.0  # one example: no mismatch, no baseline, and finite


def test_a_run_resumes_without_its_cached_reference(base, tmp_path):
    """The initial policy computes it again, before the checkpoint's weights are loaded."""
    typed = f"{pretrained(base)} --optimizer.lr 0.01 --run.steps 4 --run.save_every 2 --run.resume auto"
    lines = [
        settings("dpo", tmp_path / "run", f"{typed} --data.cache {tmp_path}/{cache}")
        for cache in ("first", "second")
    ]
    whole = on_ranks(1, lines[0])
    assert whole[-1]["reference_gap"] > 0.1
    shutil.rmtree(tmp_path / "run/checkpoints/step-4")
    shutil.rmtree(tmp_path / "run/export")
    shutil.rmtree(tmp_path / "first")
    again = on_ranks(1, lines[1])
    assert len(again) == 4 and without_times(again) == without_times(whole)


def test_a_policy_goes_on_from_another_stages_checkpoint(tmp_path):
    """Which holds no rollout: the first one is drawn by the weights of the checkpoint."""
    on_ranks(1, tiny("sft", tmp_path, "--run.steps 2 --run.export false"))
    anyway = "--run.steps 4 --run.resume auto --run.resume_anyway true --run.export false"
    short = "--data.max_length 64 --ppo.max_new_tokens 8 --ppo.epochs 1 --ppo.minibatches 1"
    lines = on_ranks(1, tiny("grpo", tmp_path, f"{anyway} {short}"))
    assert [line.get("rollout") for line in lines] == [None, None, 2, 3]


def test_reward_model_scores_the_same_in_transformers(tmp_path):
    """Score at the last token by length: with EOS inside the prompt, and with padding."""
    last = on_ranks(2, settings("rm", tmp_path / "run"))[-1]
    export = tmp_path / "run/export"
    rows = [[3, 5, 9, 657, 7], [4, 657, 4], [11, 12, 13, 14, 15, 16, 657]]
    ours = run_distributed(scores, 2, export, rows, cpu=True)[0]
    load = AutoModelForSequenceClassification.from_pretrained
    theirs = load(export, dtype=torch.float32).eval()
    pad = theirs.config.pad_token_id
    assert theirs.config.num_labels == 1 and pad is not None
    padded = pad_sequence([*map(torch.tensor, rows)], batch_first=True, padding_value=pad)
    with torch.no_grad():
        found = theirs(padded, attention_mask=(padded != pad).long()).logits.flatten()
        alone = torch.cat([theirs(torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, ours, rtol=1e-4, atol=1e-5)
    # The head travels: a run that starts from the export, with learning rate 0, evaluates exactly alike.
    still = f"{pretrained(export)} --run.steps 1 --optimizer.lr 0"
    line = on_ranks(1, settings("rm", tmp_path / "again", still))[-1]
    for name in ("eval/loss", "eval/accuracy", "eval/mean_reward"):
        assert line[name] == pytest.approx(last[name], rel=1e-4)


def scores(folder, rows):
    mesh, shape = ParallelMesh(2), read_config(folder)
    model = filled(RewardModel(shape, mesh), InitialWeights(shape, 0, folder))
    with torch.no_grad():
        batch = pack_shard([Sequence(torch.tensor(r), torch.zeros(len(r))) for r in rows], mesh)
        return sequence_last(model(batch), batch)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained model folder."""
    folder = tmp_path_factory.mktemp("base") / "run"
    on_ranks(1, settings("sft", folder, "--run.steps 2"))
    return folder / "export"


def with_adapters(base, stage, output, typed=""):
    adapters = f"{pretrained(base)} --optimizer.lr 2e-2 --model.lora.rank 4 {typed}"
    return settings(stage, output, adapters)


@torch.no_grad()
def logps(model, sequence):
    """Sum of the trained tokens' log-probabilities, by transformers."""
    tokens = torch.tensor(sequence.tokens[:].astype("int64"))
    weights = torch.tensor(sequence.loss_weights[:].astype("float64"))[1:]
    logits = model(tokens[None]).logits[0, :-1].double()
    return -(F.cross_entropy(logits, tokens[1:], reduction="none") * weights).sum()


def held_out(line):
    return open_data(prepare(configured(line), 2))[1]


def test_adapters_load_with_peft(base, tmp_path):
    from peft import PeftModel

    line = on_ranks(2, with_adapters(base, "sft", tmp_path / "run"))[-1]
    plain, merged = tmp_path / "run/export", tmp_path / "merged"
    assert main(["--merge", str(plain), str(merged)]) == 0
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    said = python("-m", "ulysses.cli", "export", checkpoint, tmp_path / "again")
    assert (said.stdout, said.stderr) == (
        f"exported {tmp_path / 'again'}\n",
        "loading the libraries ...\n",
    )
    assert not list(plain.glob("model*.safetensors"))
    assert read_json(plain / "adapter_config.json")["r"] == 4
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        start, whole = (
            AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
            for f in (base, merged)
        )
        before = start(tokens).logits
        adapted = PeftModel.from_pretrained(start, plain).eval()
        after = adapted(tokens).logits
        torch.testing.assert_close(after, whole(tokens).logits, rtol=1e-3, atol=1e-3)
    assert (after - before).abs().max() > 0.05
    examples = held_out(settings("sft", tmp_path / "nowhere"))
    rows = [example.sequences[0] for example in examples]
    count = sum(s.loss_weights[1:].sum() for s in rows)
    nll = -sum(logps(adapted, s) for s in rows) / count
    assert line["eval/nll"] == pytest.approx(float(nll), rel=1e-4)


def test_adapters_of_a_reward_model_score_as_here_in_peft(base, tmp_path, monkeypatch):
    """The model card's lines load them, also where the base pads with the token that ends every sequence."""
    from peft import AutoPeftModelForSequenceClassification

    folder, end = shutil.copytree(base, tmp_path / "base"), 657
    write_json(
        folder / "config.json", read_json(folder / "config.json") | {"pad_token_id": end}
    )
    on_ranks(1, with_adapters(folder, "rm", tmp_path / "run"))
    export, merged = tmp_path / "run/export", tmp_path / "merged"
    assert main(["--merge", str(export), str(merged)]) == 0
    whole = AutoModelForSequenceClassification.from_pretrained(merged).eval()
    [lines] = re.findall("```python\n(.*?)```", (export / "README.md").read_text(), re.S)
    monkeypatch.chdir(export)
    names = {"AutoPeftModelForSequenceClassification": AutoPeftModelForSequenceClassification}
    exec(lines, names)
    with torch.no_grad():
        for row in ([3, 5, 9, 7, end], [11, 12, end, 13, end]):
            expected, found = (m(torch.tensor([row])).logits for m in (whole, names["model"]))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_only_adapters_have_memory_and_reach_the_checkpoint(base, tmp_path):
    line = with_adapters(base, "dpo", tmp_path / "run", "--run.save_every 2 --run.steps 2")
    held, changed = run_distributed(trained_state, 2, line, cpu=True)[0]
    # rank 4 on query and output (32 to 32), key and value (32 to 16), and the MLP's three (32 and 48), in 2 layers
    adapters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    padding = 2 * 7 * 2 * 2  # every partition is padded to a multiple of the ranks
    assert adapters / 2 <= held <= adapters / 2 + padding
    assert changed and all(map(is_adapter, changed))
    for kind in KINDS:
        files = (tmp_path / "run").glob(f"checkpoints/step-2/*.{kind}.safetensors")
        assert sum(len(load_file(p)["data"]) for p in files) == adapters
    assert adapters == planner_model(stage_of(configured(line)), read_config(base)).trained


def trained_state(line):
    """Elements of master weights on this rank, and the parameters that a run changed."""
    run = TrainingRun(configured(line))
    run.__enter__()
    before = dict(full_parameters(run.engine))
    run.train()
    module = run.engine.module
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
    after = ((n, value) for n, value in full_parameters(run.engine) if value is not None)
    changed = [name for name, value in after if not torch.equal(value, before[name])]
    return sum(few.master.numel() for few in run.engine.sub_groups), changed


def test_base_with_adapters_off_is_the_reference_at_any_time(base, tmp_path):
    """Cached and live agree, no second engine is built, and a resumed run may fill a lost cache."""
    how, cached = (base, "dpo"), tmp_path / "cached"
    live = on_ranks(1, with_adapters(*how, tmp_path / "live", "--dpo.reference live"))
    on_ranks(1, with_adapters(*how, cached, "--run.steps 2"))
    lost = f"--run.resume auto --data.cache {tmp_path}/lost"
    again = on_ranks(1, with_adapters(*how, cached, lost))
    assert live[-1]["rewards/margins"] != 0
    for a, b in zip(live, again, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["rewards/margins"] == pytest.approx(b["rewards/margins"], abs=1e-5)


def test_another_reference_gives_its_own_loss_and_stays_as_it_was(base, tmp_path):
    """After three steps the held-out loss is that of the exported policy against the reference's untouched folder."""
    # heads that the policy's degree does not divide
    other = """
    --model.config.hidden_size 48 --model.config.head_dim 16 --model.config.num_attention_heads 3
    --model.config.num_key_value_heads 1 --run.seed 7 --optimizer.lr 3e-2
    """
    on_ranks(1, settings("sft", tmp_path / "other", other))
    reference = tmp_path / "other/export"
    typed = (
        f"--parallel.sequence_parallel_size 2 --optimizer.lr 3e-3 --dpo.reference {reference}"
    )
    line = settings("dpo", tmp_path / "run", f"{pretrained(base)} {typed}")
    last = on_ranks(2, line)[-1]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
        for f in (tmp_path / "run/export", reference)
    )
    plain = f"--batch.share_prompts false --run.output {tmp_path}/no"
    pairs = held_out([*line, *plain.split()])
    gains = torch.tensor(
        [[logps(ours, s) - logps(theirs, s) for s in e.sequences] for e in pairs]
    )
    margins = 0.1 * (gains[:, 0] - gains[:, 1])
    assert last["eval/loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-4)
    assert last["eval/rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-3)
    assert abs(last["eval/loss"] - np.log(2)) > 1e-2, "the other reference shows"
    assert last["tokens_shared"] > 0, (
        "the run computes each prompt once; the loss above is of whole sequences"
    )
