"""An export loads in transformers, equals what was trained, and is written and loaded without holding the model."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.arch import ModelConfig
from models.decoder import init_parameter
from models.folders import read_json
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.kinds import empty_model
from models.writing import write_weights
from tests import rows_of
from tests.e2e.launch import ranks, tiny
from tests.harness import memory_of, run_distributed
from tests.model_folder import demo_model, logps_there
from ulysses.check.input_files import read_shape
from ulysses.config.command_line import check
from ulysses.disk import write_json
from ulysses.export import main
from ulysses.parallel.mesh import ParallelMesh
from ulysses.run.build import frozen_engine
from ulysses.run.export_model import export_model
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.engine import full_parameters


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """SFT on 3 processes, which divide no parameter evenly, in bfloat16."""
    folder = tmp_path_factory.mktemp("export")
    line = tiny("sft", folder / "sft", "--model.dtype bfloat16 --run.steps 2")
    ranks(line, 3)
    return folder / "sft"


def assert_same_folder(found, expected):
    ours, theirs = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (found, expected))
    assert ours.keys() == theirs.keys() >= {"config.json", "tokenizer.json"}
    assert not [name for name in theirs if ours[name] != theirs[name]]


def test_export_of_a_checkpoint_equals_the_runs_own(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # a kill cut the last line short
    assert main([str(run / "checkpoints/step-2"), str(tmp_path / "out")]) == 0
    assert_same_folder(tmp_path / "out", run / "export")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_checkpoint_away_from_its_run_is_not_exported_without_a_tokenizer(
    run, tmp_path, capsys
):
    """Beside a copy of the run's tokenizer it is."""
    copy = shutil.copytree(run / "checkpoints/step-2", tmp_path / "kept/checkpoints/step-2")
    assert main([str(copy), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"there is no {tmp_path}/kept/tokenizer, whose files every export carries" in said
    assert not (tmp_path / "out").exists()
    shutil.copytree(run / "tokenizer", tmp_path / "kept/tokenizer")
    assert main([str(copy), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


CONTINUED = """
 => is continued; its base is {base}
--model.lora.alpha 8 => is merged into its base; exports are whole models
--model.lora.rank 0 --optimizer.lr 0 => is merged into its base
--stage dpo --dpo.reference live => is merged into its base
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A base, and adapters of it, both with bfloat16 weights."""
    base = demo_model(tmp_path_factory.mktemp("adapter") / "model")
    line = f"--model.path {base} {ADAPTED} --run.steps 1"
    ranks(tiny("sft", base.parent / "run", line), 1)
    return base, base.parent / "run/export"


ADAPTED = "--model.init pretrained --model.lora.rank 4 --optimizer.lr 0.01 --optimizer.schedule constant"


@pytest.mark.parametrize("typed, sentence", rows_of(CONTINUED))
def test_a_run_on_an_adapter_says_what_becomes_of_it_and_its_export_loads(
    adapter, tmp_path, typed, sentence
):
    """A continued one starts from its A and B, and its base is the base; a merged one is a part of whole exports."""
    base, start = adapter
    stage = "dpo" if "dpo" in typed else "sft"
    given = f"--model.path {start} {ADAPTED} {typed.replace('--stage dpo', '')} --run.steps 1"
    said = ranks(tiny(stage, tmp_path / "run", given), 1).stdout
    assert f"model.path {start} is an adapter, which {sentence.format(base=base)}" in said
    out, files = tmp_path / "run/export", WeightFiles(tmp_path / "run/export")
    is_continued = not typed
    assert (out / "adapter_config.json").exists() == is_continued
    if is_continued:
        settings = read_json(out / "adapter_config.json")
        assert settings["base_model_name_or_path"] == str(base)
        assert 'base_model: "model"' in (out / "README.md").read_text()
    # all of them begin with the merged weights, and one step moves them little
    before, name = WeightFiles(start), "model.layers.0.self_attn.q_proj.weight"
    moved = (files.read(name).float() - before.read(name).float()).norm()
    trained = (before.read(name).float() - WeightFiles(base).read(name).float()).norm()
    assert moved < 3 * trained
    for name in ("again", "whole"):
        merge = ["--merge"] * (name == "whole" and is_continued)
        assert (
            main([str(tmp_path / "run/checkpoints/step-1"), str(tmp_path / name), *merge]) == 0
        )
    if is_continued:  # a merged one's card knows no metrics
        assert_same_folder(tmp_path / "again", out)
    kind = AutoPeftModelForCausalLM if is_continued else AutoModelForCausalLM
    theirs = kind.from_pretrained(out, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    row = torch.arange(3, 30)
    torch.testing.assert_close(
        logps_there(whole, row), logps_there(theirs, row), rtol=1e-2, atol=2e-2
    )


def test_a_checkpoint_of_a_merged_adapter_is_not_continued_on_its_base(adapter, tmp_path):
    _, start = adapter
    line = f"--model.path {start} {ADAPTED} --run.steps"
    ranks(tiny("sft", tmp_path / "run", f"{line} 1 --model.lora.alpha 8"), 1)
    outcome = ranks(tiny("sft", tmp_path / "run", f"{line} 2 --run.resume auto"), 1, code=2)
    outcome.refused(
        f"had model.path '{start}' but this run has '.*/model'; set the same, or another run.output"
    )


# what is exported and where to, the current folder being TMP/models, and what is said
COMPLAINTS = """
RUN => TMP/out => is not a complete checkpoint
--merge RUN => TMP/out => is not a complete checkpoint
CHECKPOINT => RUN/metrics.jsonl/out => metrics.jsonl
CHECKPOINT => RUN/checkpoints => checkpoints holds step-2, but an export needs a new or empty folder
CHECKPOINT => CHECKPOINT => step-2 holds rank-
CHECKPOINT => CHECKPOINT/out => which is read for it; give a folder apart
CHECKPOINT => RUN/tokenizer => tokenizer holds chat_template.jinja,
CHECKPOINT => RUN => RUN holds
CHECKPOINT => TMP/models/ => models holds other, but an export needs a new or empty folder
CHECKPOINT => . => models holds other, but
CHECKPOINT => TMP/link => link holds other, but
"""


def test_export_complains_in_one_sentence(run, tmp_path, capsys, monkeypatch):
    """Above all of a folder around other models, also as the current one, or through a link; nothing is lost."""
    checkpoint, models = run / "checkpoints/step-2", tmp_path / "models"
    (models / "other").mkdir(parents=True)
    (models / "other/weights").write_text("x")
    (tmp_path / "link").symlink_to(models)
    monkeypatch.chdir(models)
    places = {"CHECKPOINT": checkpoint, "RUN": run, "TMP": tmp_path}
    for row in rows_of(COMPLAINTS):
        for name, place in places.items():
            row = [cell.replace(name, str(place)) for cell in row]
        source, out, complaint = row
        assert main([*source.split(), out]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and complaint in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists() and (models / "other/weights").read_text() == "x"


def test_a_run_exports_the_precision_and_the_shards_of_its_settings(tmp_path):
    """On 2 processes, which gather the master weights; the command writes the same, or what it is asked instead."""
    typed = (
        "--model.dtype bfloat16 --run.steps 2 --export.dtype float32 --export.shard_gib 2e-5"
    )
    ranks(tiny("sft", tmp_path / "run", typed), 2)
    checkpoint, out = str(tmp_path / "run/checkpoints/step-2"), tmp_path / "out"
    own = WeightFiles(tmp_path / "run/export")
    assert {t.dtype for t in own.tensors.values()} == {torch.float32} and len(own.paths) > 3
    assert any(own.read(n).bfloat16().ne(own.read(n)).any() for n in own.tensors)
    assert main([checkpoint, str(out)]) == 0
    assert_same_folder(out, tmp_path / "run/export")
    out = tmp_path / "rounded"
    assert main([checkpoint, str(out), "--dtype", "bfloat16", "--shard-gib", "1"]) == 0
    rounded = WeightFiles(out)
    assert all(torch.equal(own.read(n).bfloat16(), rounded.read(n)) for n in own.tensors)
    assert len(rounded.paths) == 1


LARGE = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 20,
    "num_attention_heads": 12,
}  # fmt: skip


def memory():
    """This process's resident bytes now and at their peak since the last call."""
    found = memory_of("VmRSS"), memory_of("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return found


def load_and_export(folder, out):
    """Bytes of growth at the peak of loading, and at the peak of exporting above what was loaded."""
    initialize_distributed()
    model, run = {"path": str(folder), "dtype": "bfloat16"}, {"steps": 1, "output": str(out)}
    given = {"stage": "sft", "model": model, "run": run, "export": {"shard_gib": 1 / 32}}
    config = check(given)
    shape, place = read_shape(config)
    before, _ = memory()
    engine = frozen_engine(config, InitialWeights(shape, 0, place), ParallelMesh(1), "auto")
    loaded, peak = memory()
    export_model(partial(full_parameters, engine), out, shape, config, step=0)
    return peak - before, memory()[1] - loaded


def test_loading_and_exporting_stream(tmp_path):
    """300 MB of weights in shards, two processes: each keeps its half and never much more."""
    folder, shape = tmp_path / "model", ModelConfig.from_hf(LARGE)
    folder.mkdir()
    sizes = {name: p.shape for name, p in empty_model(shape).named_parameters()}
    drawn = (
        (name, init_parameter(name, size, shape, 0, dtype=torch.bfloat16))
        for name, size in sizes.items()
    )
    write_weights(folder, drawn, max_shard_bytes=48 << 20)
    write_json(folder / "config.json", shape.to_hf())
    source = WeightFiles(folder)
    size = sum(2 * stored.shape.numel() for stored in source.tensors.values())
    assert size > 290e6 and len(list(folder.glob("*.safetensors"))) >= 6
    peaks = run_distributed(load_and_export, 2, folder, tmp_path / "out", cpu=True)
    for peak, exporting in peaks:
        assert peak < 0.7 * size, "its half, and one parameter at a time"
        assert exporting < 0.2 * size
    found = WeightFiles(tmp_path / "out")
    assert found.tensors.keys() == source.tensors.keys() and len(found.paths) >= 9
    assert all(torch.equal(found.read(name), source.read(name)) for name in found.tensors)


def test_merged_adapters_over_a_random_base_are_refused(tmp_path, capsys):
    """The run drew the base, perhaps on a GPU, whose numbers are others than the CPU's."""
    typed = "--run.steps 1 --run.export false --model.lora.rank 2 --model.lora.merge true"
    ranks(tiny("sft", tmp_path / "run", typed), 1)
    assert main([str(tmp_path / "run/checkpoints/step-1"), str(tmp_path / "out")]) == 2
    assert "drawn at random and is in no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
