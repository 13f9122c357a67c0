"""The wheel holds all three packages and nothing else; foreign packages of the same names are refused by their file."""

import re
import shutil
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest
import yaml

from models.folders import read_json
from tests.e2e.launch import ROOT, python, run_script
from tests.model_folder import demo_model

PACKAGES = "losses models ulysses".split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BEGUN = "loading the libraries ...\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, built from a copy of the checkout, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    uncached = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=uncached)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "source" / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # fetches nothing
    python("-c", build, folder, cwd=folder / "source").check()
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def elsewhere(installed, tmp_path):
    """A function that runs Python in an empty folder, with what the wheel holds."""
    return partial(python, cwd=tmp_path, PYTHONPATH=str(installed))


def test_wheel_holds_every_module_and_no_more(installed, elsewhere):
    files = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file()]
    found = {str(path) for path in files if ".dist-info" not in path.parts[0]}
    assert {name.split("/")[0] for name in found} == set(PACKAGES)
    kinds = (".py", ".jinja", ".toml", "py.typed")
    sources = (path for name in PACKAGES for path in (ROOT / name).rglob("*"))
    ours = {str(p.relative_to(ROOT)) for p in sources if p.name.endswith(kinds)}
    assert {f"{name}/py.typed" for name in PACKAGES} <= ours <= found
    script = "import losses, models, ulysses.run.training_run; print(*(m.__file__ for m in (losses, models, ulysses)))"
    done = elsewhere("-c", script)  # from an empty folder
    places = [Path(path).parent.parent for path in done.stdout.split()[-3:]]
    assert places == [installed] * 3, done.stderr


@pytest.mark.parametrize("name", ["models", "losses"])
def test_a_foreign_package_is_named_by_its_file(name, installed, elsewhere, tmp_path):
    foreign = tmp_path / f"{name}.py"
    foreign.touch()
    (tmp_path / "run.toml").write_text('stage = "sft"')  # settings are read before the packages
    sentence = f"{foreign} shadows the engine's own package {name} ({installed / name}); rename it, or start"
    library = elsewhere("-c", "import ulysses.run.training_run")
    assert library.code == 1 and f"ImportError: {sentence}" in library.stderr
    every = ["-m ulysses.train --dry-run --config run.toml"]
    words = (
        *(f"{word} --config run.toml" for word in ("train", "dry-run", "inspect")),
        "export a b",
        "migrate a.yaml",
        "report a",
    )
    every += [f"-m ulysses.cli {word}" for word in words]
    # each command asks for both packages in the same words
    for command in every if name == "models" else every[:1] + every[-1:]:
        # the working directory comes first
        done = elsewhere(*command.split())
        told = done.stderr.removeprefix(BEGUN)
        assert done.code == 1 and told.startswith(f"error: {sentence}")
        assert told.count("\n") == 1
    # the packages of an editable installation are looked for last, after the folder of the user
    editable = f"""
import sys
from importlib.machinery import PathFinder

class Editable:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path or [{str(installed)!r}])

sys.path = [place for place in sys.path if place not in ("", {str(installed)!r})]
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
sys.argv[1:] = ["dry-run", "--config", "run.toml"]
from ulysses.cli import main
main()"""
    done = elsewhere("-c", editable)
    told = done.stderr.removeprefix(BEGUN)
    assert done.code == 1 and told.startswith(f"error: {sentence}"), told
    done = elsewhere("-c", "from ulysses import UlyssesAttention")
    assert done.code == 0, "as a library it needs no models: " + done.stderr


def test_help_needs_pydantic_alone_and_a_missing_package_is_named(elsewhere):
    for absent, code, told in (
        (("torch", "deepspeed", "transformers", "datasets"), 0, "--optimizer.lr float"),
        (
            ("pydantic",),
            1,
            "error: the package pydantic is not installed; pip install ulysses-engine brings all",
        ),
    ):
        without = (
            f"import sys; sys.argv[1:] = ['train', '--help']; sys.modules |= dict.fromkeys({absent}); "
            "from ulysses.cli import main; main()"
        )
        done = elsewhere("-c", without)
        assert done.code == code and told in done.stdout + done.stderr
        assert done.stderr.count("\n") == code


def test_the_command_works_from_any_folder_and_answers_at_once(installed, elsewhere, tmp_path):
    [entry] = installed.glob("*.dist-info/entry_points.txt")
    assert "ulysses = ulysses.cli:main" in entry.read_text()
    light = ("import sys; sys.argv[1:] = ['--version']; from ulysses.cli import main; code = main(); "
             "print(sorted({'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)), code)")  # fmt: skip
    number = PROJECT["version"]
    assert elsewhere("-c", light).stdout.splitlines() == [number, "[] 0"]
    cases = {
        "": (0, "dry-run --config FILE"), "wrong": (2, "no command 'wrong'"),
        "report absent": (2, f"there is no {tmp_path / 'absent'}; correct the path"),
        "dry-run --config absent.toml": (2, f"there is no {tmp_path / 'absent.toml'}; correct the path"),
    }  # fmt: skip
    for words, (code, sentence) in cases.items():
        done = elsewhere("-m", "ulysses.cli", *words.split())
        assert done.code == code and sentence in done.stdout + done.stderr, words


def test_every_file_that_the_image_copies_exists():
    """There is no docker here, nor a cluster: the other files are read as YAML, with the commands that they name."""
    for name in ("skypilot", "kubernetes"):
        text = (ROOT / f"examples/{name}.yaml").read_text()
        assert all(yaml.safe_load_all(text)) and "ulysses.train" in text
    text = (ROOT / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)).split()
    assert all((ROOT / name).exists() for name in copied)
    read = {PROJECT["readme"], *PROJECT["license-files"]}  # by the build of the package
    assert {*PACKAGES, "configs", "examples", "pyproject.toml", *read} <= set(copied)


def test_one_version_everywhere():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("name, run", [("single_gpu", "notebook"), ("dpo_lora", "preferences")])
def test_the_notebooks_cells_run_in_order(name, run, tmp_path):
    """At toy size, with a model of random weights in place of the downloaded one."""
    cells = read_json(ROOT / f"examples/{name}.ipynb")["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    model = demo_model(tmp_path / "model")
    for setting, value in (("MODEL", str(model)), ("STEPS", 3), ("DTYPE", "float32")):
        code, found = re.subn(rf"(?m)^{setting} = .*$", f"{setting} = {value!r}", code)
        assert found == 1
    assert "3 steps, loss" in run_script(code, tmp_path).stdout
    assert (tmp_path / f"runs/{run}/report.html").exists()
    answers = tmp_path / "answers.jsonl"
    assert name != "dpo_lora" or "response" in read_json(answers)
