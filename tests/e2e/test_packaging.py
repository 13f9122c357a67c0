"""The wheel holds all three packages and nothing else; foreign packages of the same names are refused by their file."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from models.arch import ModelConfig
from tests.e2e.launch import ROOT, environment
from tests.model_folder import write_model

PACKAGES = ("losses", "models", "ulysses")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, built from a copy of the checkout, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "source" / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # fetches nothing
    assert python(["-c", build, str(folder)], folder / "source", ROOT).returncode == 0
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def python(arguments: list[str], cwd: Path, site: Path) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_wheel_holds_every_module_and_no_more(installed, tmp_path):
    files = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file()]
    found = {str(path) for path in files if ".dist-info" not in path.parts[0]}
    assert {name.split("/")[0] for name in found} == set(PACKAGES)
    assert {f"{p}/py.typed" for p in PACKAGES} <= found
    kinds = (".py", ".jinja", ".toml")
    ours = {
        str(p.relative_to(ROOT))
        for name in PACKAGES
        for p in (ROOT / name).rglob("*")
        if p.suffix in kinds
    }
    assert ours <= found
    script = "import losses, models, ulysses.run.training_run; print(*(m.__file__ for m in (losses, models, ulysses)))"
    done = python(["-c", script], tmp_path, installed)  # from an empty folder
    assert [Path(p).parent.parent for p in done.stdout.split()[-3:]] == [installed] * 3, (
        done.stderr
    )


@pytest.mark.parametrize("name", ["models", "losses"])
def test_a_foreign_package_is_named_by_its_file(name, installed, tmp_path):
    foreign = tmp_path / f"{name}.py"
    foreign.touch()
    sentence = f"{foreign} shadows the engine's own package {name} ({installed / name}); rename it, or start"
    library = python(["-c", "import ulysses.run.training_run"], tmp_path, installed)
    assert library.returncode == 1 and f"ImportError: {sentence}" in library.stderr
    cli = "-m ulysses.cli "
    every = [
        "-m ulysses.train --dry-run", "-m ulysses.export a b", cli + "train", cli + "dry-run",
        cli + "inspect", cli + "export a b", cli + "migrate a.yaml", cli + "report a",
    ]  # fmt: skip
    # each command asks for both packages in the same words
    for command in every if name == "models" else every[:1] + every[-1:]:
        done = python(command.split(), tmp_path, installed)  # the working directory comes first
        assert done.returncode == 1 and done.stderr.startswith(f"error: {sentence}")
        assert done.stderr.count("\n") == 1
    # the packages of an editable installation are looked for last, after the folder of the user
    editable = f"""
import sys
from importlib.machinery import PathFinder

class Editable:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path or [{str(installed)!r}])

sys.path = [place for place in sys.path if place not in ("", {str(installed)!r})]
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
sys.argv[1:] = ["dry-run"]
from ulysses.cli import main
main()"""
    done = python(["-c", editable], tmp_path, installed)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {sentence}"), done.stderr
    done = python(["-c", "from ulysses import UlyssesAttention"], tmp_path, installed)
    assert done.returncode == 0, "as a library it needs no models: " + done.stderr


def test_help_needs_pydantic_alone_and_a_missing_package_is_named(installed, tmp_path):
    without = (
        "import sys; sys.argv[1:] = ['train', '--help']; sys.modules |= dict.fromkeys({0!r}); "
        "from ulysses.cli import main; main()"
    )
    done = python(
        ["-c", without.format(("torch", "deepspeed", "transformers", "datasets"))],
        tmp_path,
        installed,
    )
    assert done.returncode == 0 and "--optimizer.lr float" in done.stdout and not done.stderr
    done = python(["-c", without.format(("pydantic",))], tmp_path, installed)
    assert (done.returncode, done.stderr) == (
        1,
        "error: the package pydantic is not installed; pip install ulysses-engine brings all that is needed\n",
    )


def test_the_command_works_from_any_folder_and_answers_at_once(installed, tmp_path):
    [entry] = installed.glob("*.dist-info/entry_points.txt")
    assert "ulysses = ulysses.cli:main" in entry.read_text()
    light = ("import sys; sys.argv[1:] = ['--version']; from ulysses.cli import main; code = main(); "
             "print(sorted({'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)), code)")  # fmt: skip
    [number] = re.findall(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert python(["-c", light], tmp_path, installed).stdout.splitlines() == [number, "[] 0"]
    late = "import ulysses; [getattr(ulysses, n) for n in ulysses.__all__]; print(ulysses.parallel.__name__)"
    assert python(["-c", late], tmp_path, installed).stdout == "ulysses.parallel\n"
    cases = {
        "": (0, "dry-run --config FILE"), "wrong": (2, "no command 'wrong'"),
        "report absent": (2, "absent holds no metrics.jsonl"),
        "dry-run --config absent.toml": (2, f"{tmp_path / 'absent.toml'} cannot be read"),
    }  # fmt: skip
    for words, (code, sentence) in cases.items():
        done = python(["-m", "ulysses.cli", *words.split()], tmp_path, installed)
        assert done.returncode == code and sentence in done.stdout + done.stderr, (
            words,
            done.stderr[-1000:],
        )


def test_the_images_steps_are_those_of_the_repository():
    """There is no docker here: every file that the image copies exists, and it installs as the Makefile does."""
    text = (ROOT / "Dockerfile").read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
        for word in line.split()
    ]
    assert {*PACKAGES, "configs", "examples", "pyproject.toml"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {project["readme"], *project["license-files"]}
    assert needed <= set(copied), "the build of the package reads them"
    [(install, extras)] = re.findall(
        r"^RUN \.venv/bin/(python -m pip install -q).* -e \"\.\[([\w,]+)\]\"$",
        text,
        re.MULTILINE,
    )
    assert f"$(BIN)/{install}" in (ROOT / "Makefile").read_text()
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert re.search(r'^ENTRYPOINT \["(\w+)"\]$', text, re.MULTILINE)[1] in project["scripts"]


def test_one_address_and_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [address], version = set(project["urls"].values()), project["version"]
    for name in ("mkdocs.yml", "CITATION.cff", "README.md"):
        assert address in (ROOT / name).read_text(), name
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_what_every_change_must_pass():
    assert "- run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_notebooks_cells_run_in_order(tmp_path):
    """At toy size, with a model of random weights in place of the downloaded one."""
    cells = json.loads((ROOT / "examples/single_gpu.ipynb").read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    demo = ROOT / "configs/demo"
    write_model(
        tmp_path / "model",
        ModelConfig.from_hf(json.loads((demo / "model/config.json").read_text())),
    )
    shutil.copytree(demo / "data/tokenizer", tmp_path / "model", dirs_exist_ok=True)
    for name, value in {
        "MODEL": str(tmp_path / "model"),
        "STEPS": 3,
        "DTYPE": "float32",
    }.items():
        code, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", code)
        assert found == 1
    done = python(["-c", code], tmp_path, ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 steps, loss" in done.stdout and (tmp_path / "runs/notebook/report.html").exists()
