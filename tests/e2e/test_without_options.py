"""The files of options, which CONTRIBUTING lists, can be deleted: what is left trains, and says what it lacks.

A file that the list names wrongly, or an import past an option's door, fails here.
"""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.e2e.launch import EXPERTS, Outcome, metrics, python, ranks, tiny
from tests.harness import free_port

# Start train.py of a copied tree, in which an editable installation must not find what was deleted.
START = """
import json, runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path.insert(0, {tree!r})
if sys.argv[1] != "--all":
    runpy.run_path({tree!r} + "/train.py", run_name="__main__")
from ulysses.train import main
print([main(line) for line in json.loads(sys.argv[2])])  # several commands, of which none starts
"""


def listed() -> dict[str, tuple[list[str], list[str]]]:
    """Read CONTRIBUTING's list: of each option its files and the options without which it is of no use."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"## Options\n.*?```\n(.*?)```", text, re.S)[1]
    found = {}
    for line in block.splitlines():
        name, files, needs = re.fullmatch(
            r"([\w -]+\w) {2,}(.*?)(?: {2,}needs (.*))?", line
        ).groups()
        found[name] = files.split(), (needs or "").split(", ") if needs else []
    return found


OPTIONS = listed()
# What asks for an option, and the file that its sentence names.
REFUSED = {
    "--stage dpo": "ulysses.stages.dpo",
    "--model.lora.rank 4": "models.lora",
    "--optimizer.moments 8bit": "ulysses.zero.eight_bit",
    "--gradients.preset ulysses-pro": "ulysses.gradients.ulysses_pro",
    '--run.trackers ["tensorboard"]': "ulysses.run.trackers.tensorboard",
    EXPERTS: "models.moe",
}


def without(names: list[str], folder: Path) -> Path:
    """Copy the product into a folder, and delete the files of options and of the options that need them."""
    tree = folder / "tree"
    for name in ("losses", "models", "ulysses"):
        shutil.copytree(
            ROOT / name,
            tree / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "train.py", tree)
    gone = {*names}
    while more := {name for name, (_, needs) in OPTIONS.items() if gone & {*needs}} - gone:
        gone |= more
    for name in gone:
        for file in OPTIONS[name][0]:
            path = tree / file
            # a file may lie in the folder of another option
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (tree / "start.py").write_text(START.format(tree=str(tree)))
    return tree


def imported(file: Path) -> set[str]:
    """Return the files of ours that a file imports at its top."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            paths = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {path.replace(".", "/") + ".py" for path in paths}
    return found


def test_only_doors_lead_to_options() -> None:
    """At the top of files the core imports no option, and an option only what its line in the list says."""
    option_of = {
        str(path.relative_to(ROOT)): name
        for name, (files, _) in OPTIONS.items()
        for file in files
        for path in ([ROOT / file] if file.endswith(".py") else (ROOT / file).rglob("*.py"))
    }
    for folder in ("losses", "models", "ulysses"):
        for path in (ROOT / folder).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            option = option_of.get(file)
            allowed, more = {option}, {option}
            while more := {need for name in more if name for need in OPTIONS[name][1]}:
                allowed |= more
            reached = {option_of[other] for other in imported(path) if other in option_of}
            assert reached <= allowed, f"{file} imports {reached - allowed}"


def start(tree: Path, arguments: list[str], processes: int = 1) -> Outcome:
    launcher = (
        f"-m torch.distributed.run --nproc_per_node={processes} --master_port={free_port()}"
    )
    words = [*launcher.split() * (processes > 1), tree / "start.py", *arguments]
    return python(*words, PYTHONPATH=str(tree))


def trained(tree: Path, arguments: list[str], processes: int = 1) -> list[float]:
    """Train, and return the losses of the steps."""
    start(tree, arguments, processes).check()
    output = Path(arguments[arguments.index("--run.output") + 1])
    assert (output / "export/config.json").exists()
    return [row["loss"] for row in metrics(output)]


def test_the_core_trains_and_exports_with_all_options_deleted(tmp_path: Path) -> None:
    tree = without([*OPTIONS], tmp_path)
    given = "--run.steps 2 --run.log_every 1 --optimizer.warmup 1 --run.trackers [] --parallel.sequence_parallel_size"
    alone = trained(tree, tiny("sft", tmp_path / "alone", f"{given} 1"))
    split = trained(tree, tiny("sft", tmp_path / "split", f"{given} 2"), 2)
    assert alone == pytest.approx(split, rel=1e-5) and len(alone) == 2
    ranks(tiny("sft", tmp_path / "whole", f"{given} 1"), 1)
    assert alone == [row["loss"] for row in metrics(tmp_path / "whole")]
    again = f"{given} 1 --model.path {tmp_path / 'alone/export'} --model.init pretrained"
    trained(tree, tiny("sft", tmp_path / "again", again))
    lines = [tiny("sft", tmp_path / "refused", f"{given} 1 {typed}") for typed in REFUSED]
    refused = start(tree, ["--all", json.dumps(lines)])
    assert refused.stdout.endswith(f"{[2] * len(lines)}\n"), refused.stdout + refused.stderr
    said = re.findall("error: .*", refused.stderr)
    for lacking, sentence in zip(REFUSED.values(), said, strict=True):
        assert re.search(f"needs {lacking}, which is not part of this installation", sentence)
    assert not (tmp_path / "refused").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_can_be_deleted_alone(name: str, tmp_path: Path) -> None:
    tree = without([name], tmp_path)
    given = "--run.steps 1 --optimizer.warmup 1 --run.trackers [] --parallel.sequence_parallel_size 1"
    trained(tree, tiny("sft", tmp_path / "run", given))
