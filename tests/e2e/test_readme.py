"""What the documents say is true: settings parse, snippets run, commands, files, tables and tests exist."""

import math
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from losses import DPO_LOSS_TYPES
from models.arch import ARCHITECTURES
from ulysses.cli import HELP
from ulysses.config.command_line import known_keys, parse_command_line
from ulysses.gradients.chain import build_chain
from ulysses.gradients.policies import GRADIENT_POLICIES
from ulysses.run.registry import STAGES
from ulysses.train import main

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "tests/*.md")
    for p in ROOT.glob(pattern)
)
CONFIGS = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("configs/**/*.toml"))


def blocks(document: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL
    )


def table(document: str, first_cell: str) -> list[list[str]]:
    """Rows below the header that begins with `first_cell`."""
    (text,) = re.findall(
        rf"^\| {first_cell}.*\n(?:\|.*\n)+", (ROOT / document).read_text(), re.MULTILINE
    )
    header, _, *rows = text.splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (header, *rows)]


@pytest.mark.parametrize("document", READMES)
def test_ten_line_configuration_is_valid(document, tmp_path):
    (text,) = blocks(document, "toml")
    assert len(text.splitlines()) <= 10
    path = tmp_path / "long.toml"
    path.write_text(text)
    config = parse_command_line(["--config", str(path)]).config
    assert (
        config.stage == "sft"
        and config.data.max_length == 65536
        and config.parallel.sequence_parallel_size == 8
    )


def test_every_stage_has_a_demo_and_configurations_are_short():
    assert {Path(path).stem for path in CONFIGS if path.startswith("configs/demo/")} == {
        *STAGES,
        "grpo",
    }
    assert all(len((ROOT / path).read_text().splitlines()) <= 40 for path in CONFIGS)


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if not path.startswith("configs/demo/")]
)
def test_every_shipped_configuration_can_be_planned(path, capsys, monkeypatch):
    """Nothing is absent but the model, data on the hub, and files of which the line says what to put there."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / path).read_text()
    # recipes say for how many GPUs they are; the others leave it to the user
    described = re.search(r"(\d) GPUs? of (\d+) GiB", text)
    gpus, gib = described.groups() if described else ("1" if "(1 GPU)" in text else "8", "80")
    code = main(["--config", path, "--dry-run", "--gpus", gpus, "--gpu-memory", gib])
    said = capsys.readouterr().out
    assert code in (0, 3), said
    assert f"predicted for {gpus} GPU" in said
    assert 10 < float(*re.findall(r"\(auto: ([\d.]+) GiB predicted", said)) <= 0.95 * float(gib)
    for name in re.findall(r"data file or folder (\S+) does not exist", said):
        assert re.search(rf'"{name}".*# put ', text), (
            f"{name} is not there, and nothing says what to put there"
        )
    if path.startswith("configs/recipes/"):
        [(gib, seconds)] = re.findall(
            r"Predicted by the dry run: ([\d.]+) GiB of each GPU and (\d+) s per step", text
        )
        assert float(*re.findall(r"([\d.]+) GiB predicted", said)) == pytest.approx(
            float(gib), rel=0.1
        )
        assert float(*re.findall(r"([\d.]+) s / step", said)) == pytest.approx(
            float(seconds), rel=0.15
        )


@pytest.mark.parametrize("document", READMES)
def test_library_snippets_run(document):
    pieces, whole_run = blocks(document, "python")
    assert len(pieces.splitlines()) == 6
    names: dict[str, object] = {}
    exec(compile(pieces, document, "exec"), names)
    assert names["losses"].shape == (8,) and names["out"].shape == (1, 64, 32, 128)  # type: ignore[attr-defined]
    # a type checker reads it of `attention(...)`, which nn.Module would leave open
    hints = get_type_hints(type(names["attention"]))
    assert hints["__call__"] == Callable[..., torch.Tensor]
    compile(whole_run, document, "exec")


def test_gradient_policy_page():
    for text in blocks("docs/gradients.md", "toml"):
        section = tomllib.loads(text)["gradients"]
        if "policies" in section:
            assert len(build_chain(section["policies"]).policies) >= 3
        else:
            assert {f"gradients.{key}" for key in section} <= set(known_keys())
    (snippet,) = blocks("docs/gradients.md", "python")
    names: dict[str, object] = {}
    exec(compile(snippet, "gradients.md", "exec"), names)
    assert "grad_norm" in names["report"]  # type: ignore[operator]
    listed = {row[0].strip("`") for row in table("docs/gradients.md", "policy")[1:]}
    assert listed == {policy.name for policy in GRADIENT_POLICIES}


def test_heads_and_degrees():
    """The table is U x R with U = gcd(degree, query heads), and covers every published shape."""
    header, *rows = table("docs/how-it-works.md", "query / kv")
    degrees = [int(cell) for cell in header[2:]]
    for row in rows:
        heads = int(row[0].split("/")[0])
        assert row[2:] == [
            f"{math.gcd(d, heads)}x{d // math.gcd(d, heads)}" for d in degrees
        ], row
    published = {
        f"{a.num_attention_heads} / {a.num_key_value_heads}" for a in ARCHITECTURES.values()
    }
    assert {row[0] for row in rows} == published


@pytest.mark.parametrize("document", READMES)
def test_stages_are_those_of_the_code(document):
    rows = table(document, "stage" if document == "README.md" else "阶段")[1:]
    assert {row[0].strip("`") for row in rows} == set(STAGES)


def test_documented_metrics_are_those_of_the_code():
    source = "".join(p.read_text() for p in (ROOT / "ulysses").rglob("*.py"))
    for row in table("docs/metrics.md", "stage")[1:]:
        for name in re.findall(r"`([^`]+)`", row[1]):
            prefix = name.rpartition("/")[0]
            assert f'"{name}"' in source or (prefix and f'"{prefix}/' in source), name


@pytest.mark.parametrize("document", READMES)
def test_named_loss_types_exist(document):
    text = (ROOT / document).read_text()
    (sentence,) = re.findall(r"`dpo\.loss_type`(.*?)preference\.py", text, re.DOTALL)
    shown = set(re.findall(r"[a-z]+_[a-z]+", sentence))
    assert len(shown) >= 4 and shown <= set(DPO_LOSS_TYPES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_files_and_links_exist(document):
    text = (ROOT / document).read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.MULTILINE):
        assert target in targets, target
    folder = (ROOT / document).parent
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (folder / link).exists(), link
    for path in re.findall(
        r"`((?:losses|models|ulysses|configs|tests|examples|benchmarks|docs)/[\w./-]*)`", text
    ):
        assert (ROOT / path).exists(), path
    planned = {"gpus", "gpu-memory", "host-memory"}
    for command in "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words[:1] == ["ulysses"]:
            assert words[1] == "--version" or f"\n  {words[1]} " in HELP, command
        if "--config" in words:
            options = {
                w.removeprefix("--")
                for w in words[words.index("--config") :]
                if w.startswith("--")
            }
            assert options <= set(known_keys()) | planned | {"config", "dry-run", "inspect"}, (
                command
            )
            assert (
                not (path := words[words.index("--config") + 1]).startswith("configs/")
                or (ROOT / path).exists()
            )


@pytest.mark.parametrize("document", READMES)
def test_keys_named_in_prose_exist(document):
    text = (ROOT / document).read_text()
    sections = "|".join({key.split(".")[0] for key in known_keys() if "." in key})
    for key in re.findall(rf"`(?:--)?((?:{sections})\.[a-z_.]+)", text):
        assert any(f"{known}.".startswith(f"{key}.") for known in known_keys()), key


def test_tests_named_in_the_fault_table_exist():
    text = (ROOT / "tests/README.md").read_text()
    found = re.findall(r"`((?:unit|distributed|parity|golden|e2e)/\w+\.py)::(\w+)`", text)
    assert len(found) > 30
    for file, name in found:
        assert re.search(
            rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE
        ), f"{file}::{name}"
