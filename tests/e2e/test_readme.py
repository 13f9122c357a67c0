"""What the documents say is true: settings parse, snippets run, commands, files, tables and tests exist."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from losses import DPO_LOSS_TYPES
from tests import ROOT
from tests.e2e.launch import run_script
from tests.model_folder import demo_model
from ulysses.cli import HELP
from ulysses.config.command_line import check, known_keys, parse_command_line
from ulysses.gradients.chain import GRADIENT_POLICIES
from ulysses.options import STAGES
from ulysses.train import main

READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS, CONFIGS = (
    sorted(str(p.relative_to(ROOT)) for pattern in patterns.split() for p in ROOT.glob(pattern))
    for patterns in ("*.md docs/*.md tests/*.md", "configs/**/*.toml")
)


def read(document):
    return (ROOT / document).read_text()


def blocks(document, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", read(document))


def table(document, first_cell):
    """Rows below the header that begins with `first_cell`."""
    (text,) = re.findall(rf"(?m)^\| {first_cell}.*\n(?:\|.*\n)+", read(document))
    header, _, *rows = text.splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (header, *rows)]


def test_every_stage_has_a_demo_and_configurations_are_short():
    demos = {Path(path).stem for path in CONFIGS if path.startswith("configs/demo/")}
    assert demos == {*STAGES, "grpo"}
    assert all(len(read(path).splitlines()) <= 40 for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS)
def test_every_shipped_configuration_can_be_planned(path, tmp_path, capsys, monkeypatch):
    """Nothing is absent but models, data on the hub, and files of which the line says what to put there."""
    monkeypatch.chdir(ROOT)
    text = read(path)
    # recipes say for how many GPUs they are; the others leave it to the user
    described = re.search(r"(\d) GPUs? of (\d+) GiB", text)
    gpus, gib = described.groups() if described else ("1" if "(1 GPU)" in text else "8", "80")
    line = f"--config {path} --dry-run --gpus {gpus} --gpu-memory {gib} --data.cache {tmp_path}/cache"
    line += f" --run.output {tmp_path}/run"  # there may be one of this configuration, of `make demo`
    if host := re.search(r"host of (\d+) GiB", text):
        line += f" --host-memory {host[1]}"
    code, said = main(line.split()), capsys.readouterr().out
    assert code in (0, 3) and f"predicted for {gpus} GPU" in said, said
    needed = float(*re.findall(r"\(auto: ([\d.]+) GiB predicted", said))
    assert (0 if "/demo/" in path else 10) < needed <= 0.95 * float(gib)
    for name in re.findall(r"data file or folder (\S+) does not exist", said):
        assert re.search(rf'"{name}".*# put ', text), f"nothing says what {name} is"
    if path.startswith("configs/recipes/"):
        promise = r"Predicted by the dry run: ([\d.]+) GiB of each GPU and (\d+) s per step"
        [promised] = re.findall(promise, text)
        seconds = float(*re.findall(r"([\d.]+) s / step", said))
        assert needed == pytest.approx(float(promised[0]), rel=0.1)
        assert seconds == pytest.approx(float(promised[1]), rel=0.15)


def test_the_lengths_that_fit_are_what_the_dry_run_says(capsys):
    """A row of docs/i-want-to.md: a model, a length and GPUs, the settings, and what the plan of a step is."""
    _, *rows = table("docs/i-want-to.md", r"model \| tokens")
    assert len(rows) > 4
    for model, tokens, gpus, settings, *promised in rows:
        count, gib = re.findall(r"\d+", gpus)
        line = f"--dry-run --model.arch {model[1:-1]} --model.init random --run.steps 9 {settings[1:-1]}"
        line += f" --data.max_length {tokens.replace(',', '')} --gpus {count} --gpu-memory {gib} --host-memory 500"
        code, said = main(line.split()), capsys.readouterr().out
        found = re.findall(
            r"longest sequence at \D+ \d: ([\d,]+)|\(auto: ([\d.]+) GiB|([\d.]+) s / step$",
            said,
            re.M,
        )
        predicted = [next(filter(None, column)).replace(",", "") for column in zip(*found)]
        assert code == 3, said
        for value, told, near in zip(predicted, promised[2:] + promised[:2], (0.1, 0.1, 0.15)):
            assert float(value) == pytest.approx(float(told.replace(",", "")), rel=near)


def packages_of(extras):
    """The packages that extras of pyproject.toml bring, those of other extras among them."""
    known = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    found = set()
    for extra in extras:
        for line in known[extra]:
            name, _, inner = re.match(r"([\w-]+)(\[([\w,]+)\])?", line).groups()
            own = name == "ulysses-engine"
            found |= packages_of(inner.split(",")) if own else {name}
    return found


@pytest.mark.parametrize("path", [path for path in CONFIGS if "/recipes/" in path])
def test_a_recipe_says_what_it_needs_installed(path):
    text, model = read(path), parse_command_line(["--config", path]).config.model
    extras = ",".join(re.findall(r"pip install -e \"\.\[([\w,]+)\]", text))
    installed = packages_of(extras.split(",")) if extras else set()
    needed = {"bitsandbytes"} if model.quantize == "nf4" or "8bit" in text else set()
    needed |= {"fla-core", "flash-qla"} if "qwen3.5" in path else set()
    assert installed == needed


@pytest.mark.parametrize("path", ["Dockerfile", "examples/skypilot.yaml", *DOCUMENTS])
def test_extras_that_are_named_exist(path):
    """pip and uv install a package without an extra that it does not have, with no more than a warning."""
    for extras in re.findall(r"\.\[([\w,]+)\]", read(path)):
        packages_of(extras.split(","))


def test_library_snippets_run():
    pieces, _ = blocks("README.md", "python")
    assert len(pieces.splitlines()) == 6
    names = {}
    exec(compile(pieces, "README.md", "exec"), names)
    assert names["losses"].shape == (8,) and names["out"].shape == (1, 64, 32, 128)
    # a type checker reads it of `attention(...)`, which nn.Module would leave open
    hints = get_type_hints(type(names["attention"]))
    assert hints["__call__"] == Callable[..., torch.Tensor]


# what stands for models that are not here, and for eight GPUs
SMALL = {
    "Qwen/Qwen2.5-7B-Instruct": "model",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "model",
    "YOUR_MODEL": "model",
    "sequence_parallel_size = 8": "sequence_parallel_size = 1",
}


def small(text):
    for name, ours in SMALL.items():
        text = text.replace(name, ours)
    return text


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The folder of someone who has written every file that the documents show."""
    folder = tmp_path_factory.mktemp("reader")
    demo_model(folder / "model", max_position_embeddings=32_768)
    for name in ("runs/sft/export", "runs/penelope/merged"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(folder / "model")
    (folder / "configs").symlink_to(ROOT / "configs")
    chat, *_ = blocks("docs/quickstart.md", "json")
    (folder / "chats.jsonl").write_text(chat)
    (folder / "long.toml").write_text(small(*blocks("README.md", "toml")))
    (folder / "laptop.toml").write_text(small(*blocks("docs/quickstart.md", "toml")))
    rows = [text for text in blocks("docs/quickstart.md", "python") if "rows.jsonl" in text]
    run_script(*rows, folder)
    return folder


SNIPPETS = dict.fromkeys(
    small(text) for document in DOCUMENTS for text in blocks(document, "python")
)


@pytest.mark.parametrize("text", SNIPPETS, ids=lambda text: text.split("\n")[-2][:40])
def test_python_snippets_run(text, reader):
    """On the files that the document names; each is a program of its own."""
    said = run_script(text, reader).stdout
    if "TrainingRun" in text:  # which ends with the metrics
        assert "'loss'" in said and (reader / "runs/long/export/config.json").exists()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_and_commands_are_valid(document, reader, monkeypatch):
    """Tables of settings with their values, rows of data, and commands with all their arguments."""
    monkeypatch.chdir(reader)
    for text in blocks(document, "toml"):
        values = tomllib.loads(small(text))
        stage = next((name for name in STAGES if name in values), "sft")
        check({"stage": stage, "model": {"path": "m"}, "run": {"steps": 1}} | values)
    for text in blocks(document, "json"):
        assert json.loads(text)
    for words in commands(document):
        if "--config" in words and Path(words[words.index("--config") + 1]).exists():
            dry = ["--dry-run"] * (words[1] == "dry-run")
            parse_command_line([*dry, *map(small, words[words.index("--config") :])])


def commands(document):
    lines = "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_the_page_of_gradient_policies_lists_all_of_them():
    listed = {row[0].strip("`") for row in table("docs/gradients.md", "policy")[1:]}
    assert listed == GRADIENT_POLICIES.keys()


def test_documented_metrics_are_those_of_the_code():
    source = "".join(p.read_text() for p in (ROOT / "ulysses").rglob("*.py"))
    for row in table("docs/metrics.md", "stage")[1:]:
        for name in re.findall(r"`([^`]+)`", row[1]):
            prefix = name.rpartition("/")[0]
            assert f'"{name}"' in source or (prefix and f'"{prefix}/' in source), name


@pytest.mark.parametrize("document", READMES)
def test_stages_losses_and_keys_of_a_readme_exist(document):
    text = read(document)
    rows = table(document, "stage" if document == "README.md" else "阶段")[1:]
    assert {row[0].strip("`") for row in rows} == set(STAGES)
    (sentence,) = re.findall(r"(?s)`dpo\.loss_type`(.*?)preference\.py", text)
    shown = set(re.findall(r"[a-z]+_[a-z]+", sentence))
    assert len(shown) >= 4 and shown <= set(DPO_LOSS_TYPES)
    sections = "|".join({key.split(".")[0] for key in known_keys() if "." in key})
    for key in re.findall(rf"`(?:--)?((?:{sections})\.[a-z_.]+)", text):
        assert any(f"{known}.".startswith(f"{key}.") for known in known_keys()), key


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_files_and_links_exist(document):
    text, folder = read(document), (ROOT / document).parent
    targets = re.findall(r"(?m)^([a-z]+):", read("Makefile"))
    assert {*re.findall(r"(?m)(?:^|`)make ([a-z]+)\b", text)} <= {*targets}
    links = [
        name for name in re.findall(r"\]\(([^)#]+)\)", text) if not name.startswith("http")
    ]
    ours = "losses|models|ulysses|configs|tests|examples|benchmarks|docs"
    paths = [folder / link for link in links]
    paths += [ROOT / path for path in re.findall(rf"`((?:{ours})/[\w./-]*)`", text)]
    known = {*known_keys(), *"gpus gpu-memory host-memory config dry-run inspect".split()}
    for words in commands(document):
        command = " ".join(words)
        if words[:1] == ["ulysses"]:
            assert words[1] == "--version" or f"\n  {words[1]} " in HELP, command
        if "--config" in words:
            _, file, *rest = words[words.index("--config") :]
            assert {word[2:] for word in rest if word.startswith("--")} <= known, command
            paths += [ROOT / file] * file.startswith("configs/")
    assert not [path for path in paths if not path.exists()]


def test_make_says_that_pip_is_at_work(tmp_path):
    line = ["make", "-n", "demo", f"VENV={tmp_path}/env"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < said.index("pip downloads and installs the packages") < said.index("pip install")


def test_tests_named_in_the_fault_table_exist():
    named = r"`((?:unit|distributed|parity|golden|e2e)/\w+\.py)::(\w+)`"
    found = re.findall(named, read("tests/README.md"))
    assert len(found) > 30
    for file, name in found:
        assert f"\ndef {name}(" in read(f"tests/{file}"), f"{file}::{name}"
