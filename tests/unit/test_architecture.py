"""The house rules, read from the source: imports go down, nothing is patched, folders stand alone."""

import ast
import gc
import importlib
import multiprocessing
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec, resolve_name

import pytest

from tests import ROOT
from tests.e2e.launch import python
from ulysses.options import TRACKERS

PACKAGES = ("losses", "models", "ulysses")
FLOORS = {
    name: floor
    for floor, names in enumerate(
        """losses ulysses.parallel ulysses.disk ulysses.environment ulysses.imports ulysses.config ulysses.memory \
            ulysses.gradients
        ulysses.data models
        ulysses.zero
        ulysses.stages ulysses.watch
        ulysses.rl ulysses.run.trackers
        ulysses.options
        ulysses.plan
        ulysses.check
        ulysses.run
        ulysses.train ulysses.cli ulysses.export ulysses.report ulysses.migrate ulysses.answers""".splitlines(),
        start=1,
    )
    for name in names.split()
}
# Of our own code, what the models and the configuration may import.
ONLY = {
    "models": ("models", "losses", "ulysses.parallel", "ulysses.memory", "ulysses.disk"),
    "ulysses.config": ("ulysses.config",),
}
# ... and what the configuration may not: it is read before torch is.
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "peft", "numpy"}
FOREIGN_ONLY_IN = {
    "deepspeed": "ulysses/zero/",
    "transformers": ("ulysses/data/read/tokenizer.py", "ulysses/answers.py"),
    "datasets": "ulysses/data/read/library.py",
    "peft": (),  # the tests' alone
    "bitsandbytes": ("models/quantized.py", "ulysses/zero/eight_bit.py"),
}
# Words of DeepSpeed's internals: one file touches them, each with its reason.
DEEPSPEED_INTERNALS = """param_coordinator _clear_trace_structures ds_grad_is_ready stage3_allgather_sequential
    grad_partitions_flat_buffer _partition_all_parameters _reassign_or_swap_out_partitioned_parameters
    averaged_gradients""".split()
# The one assignment onto a foreign module: a compiled CPU collective, whose build can hang, is switched off.
ALLOWED_FOREIGN_ASSIGNMENT = 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False'


@cache
def sources():
    files = [f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py"))]
    assert len(files) > 30
    return files


def module_name(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def imports(path):
    """(module, imported name) pairs, relative ones resolved; those for type checkers count like all others."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(a.name, "") for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found += [(base, a.name) for a in node.names]
    return found


def floor(module):
    best = max(
        (k for k in FLOORS if module == k or module.startswith(k + ".")), key=len, default=None
    )
    return FLOORS[best] if best else None


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_follows_the_house_rules(path):
    text, name = path.read_text(), module_name(path)
    assert text.count("\n") <= 500, "a file this long is telling us something"
    if name.startswith(
        ("losses", "ulysses.parallel")
    ):  # they work when they are copied elsewhere
        assert not re.search(r"(?m)^\s*(from|import) (losses|ulysses)\b", _code(text)), (
            f"{name} imports itself by name"
        )
    own = floor(name)
    for module, imported in imports(path):
        top = module.split(".")[0]
        assert str(path.relative_to(ROOT)).startswith(FOREIGN_ONLY_IN.get(top, "")), (
            f"{name} imports {top}"
        )
        assert top not in PACKAGES or not re.match("_[^_]", imported), (
            f"{name} imports {imported}"
        )
        target = floor(f"{module}.{imported}") or floor(module)
        if own and target:
            assert target <= own, f"{name} (floor {own}) imports {module} (floor {target})"
        allowed = next(
            (names for folder, names in ONLY.items() if name.startswith(folder)), PACKAGES
        )
        assert top not in PACKAGES or module.startswith(allowed), f"{name} imports {module}"
        assert top not in HEAVY or not name.startswith("ulysses.config"), (
            f"{name} imports {top}"
        )
    foreign = {m.split(".")[0] for m, _ in imports(path)} - set(PACKAGES)
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Global), f"{name} uses global"
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if (
                isinstance(target, ast.Attribute | ast.Subscript)
                and isinstance(root, ast.Name)
                and root.id in foreign
            ):
                line = ast.get_source_segment(text, node) or ""
                switch = line.startswith("torch.backends.")  # documented switches, not patches
                own_place = name == "ulysses.environment"
                assert switch or own_place or line == ALLOWED_FOREIGN_ASSIGNMENT, (
                    f"{name} assigns onto {root.id}: {line}"
                )


def test_no_import_circles():
    modules = {module_name(p) for p in sources()}
    edges = {
        module_name(p): {f"{m}.{i}" if f"{m}.{i}" in modules else m for m, i in imports(p)}
        for p in sources()
    }
    TopologicalSorter(
        {k: {t for t in v if t in edges and t != k} for k, v in edges.items()}
    ).prepare()


def test_no_two_modules_or_classes_have_one_name():
    """A stage may be called like its losses: both are the algorithm's name."""
    seen = {}
    for path in sources():
        own = not path.stem.startswith("__") and not (
            path.parent.name in ("stages", "rl") and (ROOT / "losses" / path.name).exists()
        )
        names = [path.stem] if own else []
        names += [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
        for name in names:
            assert name not in seen, (
                f"{name} is in {seen[name].relative_to(ROOT)} and in {path.relative_to(ROOT)}"
            )
            seen[name] = path


def test_every_file_begins_with_its_purpose():
    for path in sources():
        text = ast.get_docstring(tree(path))
        if path.read_text().strip():
            assert text and text.split("\n\n")[0].rstrip().endswith((".", ":")), (
                path.relative_to(ROOT)
            )


def test_each_kind_of_knowledge_stays_in_its_place():
    """Stages are told apart in their rooms, DeepSpeed's internals in one file, and no error is edited as a string."""
    for path in sources():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if not name.startswith(("ulysses/stages/", "ulysses/rl/ppo.py")):
            found = re.search(r"\.stage\s*(?:==|!=|in\b|not in\b)", _code(text))
            assert not found, f"{name} asks which stage it is"
        if name != "ulysses/zero/deepspeed_internals.py":
            assert not [w for w in DEEPSPEED_INTERNALS if w in _code(text)], name
        assert "str(error).replace" not in text, name


@cache
def _code(text):
    """Return a file's code without its docstrings and other bare strings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            rest = [
                n
                for n in body
                if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            ]
            node.body = rest or [ast.Pass()]
    return ast.unparse(tree)


def test_one_file_knows_the_environment():
    """It needs the standard library only; ulysses/parallel, which imports none of us, presets what flash-attn reads."""
    home = ROOT / "ulysses/environment.py"
    assert {module.split(".")[0] for module, _ in imports(home)} <= sys.stdlib_module_names
    for path in set(sources()) - {home}:
        code = _code(path.read_text())
        if path == ROOT / "ulysses/parallel/kernels/varlen.py":
            code = code.replace("os.environ.setdefault(", "")
        found = re.search(r"\b(environb?|getenvb?|putenv|unsetenv)\b", code)
        assert not found, f"{path.relative_to(ROOT)} uses environment variables"


def test_tests_use_public_faces():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "test_architecture.py":
            assert "ParallelMesh.__new__" not in path.read_text(), path


def import_alone(name):
    """Import a module in a fork, which forgets all that is ours and keeps the large packages of others."""
    for known in [module for module in sys.modules if module.split(".")[0] in PACKAGES]:
        del sys.modules[known]
    importlib.import_module(name)


@pytest.mark.full
def test_every_module_imports_alone():
    for large in ("peft", "bitsandbytes", "datasets", "deepspeed"):
        importlib.import_module(large)
    names = [n for n in map(module_name, sources()) if not n.endswith("__main__")]
    for package in TRACKERS:
        if find_spec(package) is None:  # the checks refuse a run that asks for it
            names.remove(f"ulysses.run.trackers.{package}")
    with multiprocessing.get_context("fork").Pool(2, gc.disable, maxtasksperchild=1) as pool:
        pool.map(import_alone, names, chunksize=1)


def test_the_faces_stay_light():
    light = (
        "import losses, ulysses, models, sys\n"
        "bad = {'deepspeed', 'transformers', 'datasets', 'pydantic'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    python("-c", light).check()
