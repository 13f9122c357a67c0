"""The wheel holds all three packages and nothing else; foreign packages of the same names are refused by their file."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, environment

PACKAGES = ("losses", "models", "ulysses")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built from a copy of the checkout, installed in it, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # fetches nothing
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=copy, check=True, capture_output=True, timeout=120)
    [wheel] = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)],
        check=True,
        timeout=120,
    )
    shutil.copyfile(wheel, folder / "site.zip")
    return folder / "site"


def python(arguments: list[str], cwd: Path, site: Path) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_imports_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = python(
        [
            "-c",
            "import losses, models, ulysses.training.run; print(*(m.__file__ for m in (losses, models, ulysses)))",
        ],
        tmp_path,
        installed,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(p).parent.parent for p in done.stdout.split()[-3:]] == [installed] * 3


def test_wheel_holds_every_module_and_no_more(installed: Path) -> None:
    found = {n for n in zipfile.ZipFile(installed.parent / "site.zip").namelist() if ".dist-info/" not in n}
    assert {n.split("/")[0] for n in found} == set(PACKAGES)
    assert {f"{p}/py.typed" for p in PACKAGES} <= found
    ours = {
        str(p.relative_to(ROOT))
        for name in PACKAGES
        for pattern in ("*.py", "*.jinja", "*.toml")
        for p in (ROOT / name).rglob(pattern)
    }
    assert ours - found == set()


@pytest.mark.parametrize("name", ["models", "losses"])
def test_a_foreign_package_is_named_by_its_file(name: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    done = python(["-c", "import ulysses.training.run"], tmp_path, installed)  # the working directory comes first
    assert done.returncode == 1
    assert (
        f"ImportError: {tmp_path / name / '__init__.py'} shadows the engine's own package {name} ({installed / name})"
        in done.stderr
    )
    done = python(["-m", "ulysses.export", "a", "b"], tmp_path, installed)
    assert f"{tmp_path / name / '__init__.py'} shadows" in done.stderr
    done = python(["-c", "from ulysses import UlyssesAttention"], tmp_path, installed)
    assert done.returncode == 0, "as a library it needs no models: " + done.stderr


def test_train_from_a_folder_with_its_own_models(tmp_path: Path) -> None:
    """A script's own folder comes before the working directory: nothing is shadowed there."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("")
    done = python([str(ROOT / "train.py"), "--help"], tmp_path, ROOT)
    assert done.returncode == 0 and "--config" in done.stdout
