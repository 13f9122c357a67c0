"""A run's folder: whether a run may write there, what its checkpoints are, and which one it continues.

RUN/checkpoints/step-12/run.json holds the run's id and settings, the digests of every other file and of itself, and
those of what a run reads and no checkpoint holds: data, the base of adapters, frozen models.
"""

import json
import os
import re
import shutil
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import TypedDict

import torch
import torch.distributed as dist

from ulysses import environment
from ulysses.check.input_files import RunInputs
from ulysses.config.schema import Config, RunSection
from ulysses.config.section import AbsentError, ConfigError, error_context
from ulysses.config.stage_sections import is_function
from ulysses.data.cache import content_digest, digest_of_value
from ulysses.data.read.sources import parse_sources
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import (
    HOLDER,
    DiskError,
    check_apart,
    check_empty,
    digest_of,
    held,
    lies_in,
    write_json,
)
from ulysses.environment import NODE
from ulysses.parallel.mesh import gather
from ulysses.plan.planner import planner_model

FORMAT = 6
FIELDS = {"step", "files", "config", "shape", "policies", "inputs"}  # of run.json, at least
CHECKPOINT = re.compile("step-(0|[1-9][0-9]*)")
TRAINED_ON, HELD_OUT = "the training data or how they are tokenised", "the held-out data"
TRAINED_MODEL = "model.path"  # the setting that names it
BEFORE_CONFIG = {".lock", HOLDER, "checkpoints"}  # what a run makes before its config.json
CHECKPOINT_BYTES = 12  # of a trained weight: it and AdamW's two moments in float32
BEGINNING = re.compile(rb'\{\s*"stage": ')  # of a run's config.json


# ---------------------------------------------------------------- the folder


def check_folders(inputs: RunInputs) -> None:
    """Refuse an output folder that is neither new, empty nor a run's own, or that overlaps with what the run reads."""
    config = inputs.config
    output, data = config.output, config.data
    places = []  # what the run reads, each with the setting that names it
    for setting, sources in (("data.train", data.train), ("data.eval", data.eval)):
        places += [(setting, s.local_path) for s in parse_sources(sources) if not s.is_on_hub]
    places.append(("data.cache", Path(data.cache)))
    if inputs.folder:
        places.append((TRAINED_MODEL, inputs.folder))
    for setting, weights in {TRAINED_MODEL: inputs.weights, **inputs.others}.items():
        places += [(setting, folder) for folder in {path.parent for path in weights.paths}]
    places.append(("model.tokenizer", inputs.tokenizer_path))
    parts = [output / name for name in ("checkpoints", "tokenizer", "export")]
    for part in (output, *parts):
        check_apart("run.output", part, places)
    if config.ppo.sampler:
        taken = (("a folder of run.output", part) for part in parts)
        check_apart("ppo.sampler_folder", config.sampler_folder, [*places, *taken])
        if not (lies_in(config.sampler_folder, output) or _has_served(config)):
            check_empty(config.sampler_folder, "ppo.sampler_folder")
    has_begun = output.is_dir() and {*os.listdir(output)} <= BEFORE_CONFIG
    # a power cut may have emptied the run's config.json, whose next start writes it again
    written = output / "config.json"
    if not (written.exists() and written.stat().st_size):
        has_begun = has_begun or bool(saved_checkpoints(output / "checkpoints"))
    if not has_begun and not is_run_folder(output):
        check_empty(output, "run.output")
    if config.run.export and inputs.resume_from is None:
        check_empty(output / "export", "the run's export")
    for around in output.parents:
        if is_run_folder(around) or around in saved_checkpoints(around.parent):
            raise ConfigError(
                f"run.output {output} lies in {around}, which belongs to another run; set a folder apart from it"
            )


def _has_served(config: Config) -> bool:
    """Return whether the run has begun before with the same folder for its servers, which it may have written to."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        written = json.loads((config.output / "config.json").read_text())
        return bool(written["ppo"]["sampler_folder"] == str(config.ppo.sampler_folder))
    return False


def is_run_folder(folder: Path) -> bool:
    """Return whether a run has begun in a folder, by its config.json."""
    with suppress(OSError):
        return bool(BEGINNING.match((folder / "config.json").open("rb").read(64)))
    return False


def check_disk(inputs: RunInputs) -> str:
    """Refuse a disk that cannot hold the export and the checkpoints that are saved by step.

    Return a warning if it cannot hold the checkpoints of run.save_minutes, which a short run never saves. What the run
    folder holds already counts as free, because new checkpoints take its place.
    """
    config = inputs.config
    run, output = config.run, config.output
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(
            f"run.output {output} cannot be written: {nearest} is not a folder that you may write to; set "
            "another folder"
        )
    free = shutil.disk_usage(nearest).free
    for name in ("checkpoints", "export"):
        for file in (output / name).rglob("*"):
            with suppress(OSError):
                free += file.lstat().st_size
    trained = planner_model(inputs.stage, inputs.shape).trained
    export = trained * getattr(torch, config.export_dtype).itemsize if run.export else 0
    checkpoints = {}  # how many a setting makes
    if run.save_every:
        checkpoints["run.save_every"] = 2 + (run.keep or run.steps // run.save_every)
    elif run.save_last:
        # a run that continues a checkpoint keeps it until the last one is written
        checkpoints["run.save_last"] = 2 if inputs.resume_from else 1
    else:  # the export must fit in any case
        checkpoints["run.save_last"] = 0
    if run.save_minutes:
        checkpoints["run.save_minutes"] = 1 + run.keep
    for setting, count in checkpoints.items():
        need = CHECKPOINT_BYTES * trained * count + export
        if need <= free:
            continue
        what, changes = [], []
        if count:
            kept = ""
            if count > 2:
                best = ", the best" if run.save_every else ""
                kept = f" (run.keep = {run.keep}{best} and one being written)"
            what.append(f"{count} checkpoint{'s' if count > 1 else ''} of {setting}{kept}")
            changes.append(f"{setting} = {'false' if setting == 'run.save_last' else 0}")
        if run.export:
            what.append("the export")
            changes.append("run.export = false")
        if count > 2 and run.keep != 1:
            changes.append("run.keep = 1")
        sentence = (
            f"run.output {nearest} has {_size(free)} free but {' and '.join(what)} would take {_size(need)}; "
            f"set {' or '.join(changes)}, or use another disk"
        )
        if setting == "run.save_minutes":
            return sentence
        raise AbsentError(sentence)
    return ""


def _size(count: float) -> str:
    """Write a number of bytes so that it does not round to nothing."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def hold_output(config: Config, resources: ExitStack) -> tuple[str, str]:
    """Let rank 0 hold the run folder until `resources` are closed, and check that all nodes share it.

    Return the run's id, and the run that held the folder before and ended without giving it back, or "". Raises
    ConfigError on every rank if another run holds the folder, or if a node does not see what rank 0 writes there.
    """
    output = config.output
    run_id = token_hex(4)
    before = ""
    complaint = ""
    holder = f"run {run_id}, process {os.getpid()} on {NODE}"
    if dist.get_rank() == 0:
        try:
            before = resources.enter_context(held(output, holder))
        except DiskError as error:
            complaint = str(error)
    run_id, before, holder = gather((run_id, before, holder))[0]
    # a network file system that has told this node that there is no such folder repeats it for up to a minute, unless
    # the node tries to make it
    with suppress(OSError):
        os.makedirs(os.path.realpath(output), exist_ok=True)
    file = output / HOLDER
    if not complaint and not (file.exists() and file.read_text() == holder):
        complaint = (
            f"{output} on {NODE} is not the folder that rank 0 writes to; set it to a folder on a file system "
            "that all nodes share"
        )
    for refusal in filter(None, gather(complaint)):  # every rank raises the first one
        raise ConfigError(refusal, "run.output")
    return run_id, before


# ---------------------------------------------------------------- checkpoints


class RunState(TypedDict):
    """What a checkpoint's run.json says."""

    run: str
    step: int
    best: list[float] | None  # step and loss of the best evaluation
    config: dict[str, object]
    shape: dict[str, object]
    inputs: dict[str, str]
    policies: dict[str, object]
    files: dict[str, str]


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder such as RUN/checkpoints, oldest first."""
    names = (CHECKPOINT.fullmatch(f.parent.name) for f in folder.glob("step-*/run.json"))
    steps = sorted(int(name[1]) for name in names if name)
    return [folder / f"step-{step}" for step in steps]


def read_run_state(path: Path) -> RunState:
    """Read a checkpoint's run.json, and check that it was not changed and names the files next to it.

    Raises ValueError if the folder is not a complete checkpoint, has another format, or disagrees with itself.
    """
    file = path.absolute() / "run.json"
    try:
        state = json.loads(file.read_text())
        number = state["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(
            f"{path.absolute()} is not a complete checkpoint; give a folder RUN/checkpoints/step-N"
        ) from None
    if number != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {number}, but this version reads format {FORMAT}; continue it with the "
            "version that wrote it"
        )
    if state.pop("digest", "") != digest_of_value(state) or FIELDS - state.keys():
        wrong = "does not hold what was written there: it was cut or changed"
    elif unnamed := {f.name for f in path.glob("rank-*")} - state["files"].keys():
        wrong = f"does not name {min(unnamed)} among its files"
    elif CHECKPOINT.fullmatch(file.parent.name) and file.parent.name != f"step-{state['step']}":
        wrong = f"is of step {state['step']}, and not of the one that its folder is named after"
    else:
        return state
    raise ValueError(f"{file} {wrong}; restore it, or use another copy of the folder")


def write_run_state(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint's run.json, with a digest of all that it says."""
    state = json.loads(json.dumps({"format": FORMAT, **state}))  # as it will be read back
    write_json(path / "run.json", state | {"digest": digest_of_value(state)})


def resume_point(run: RunSection) -> Path | None:
    """Return the checkpoint that a run continues, or None if it begins anew.

    Raises ValueError for a folder that is not a complete checkpoint, and for checkpoints in the run folder that could
    later be taken for this run's own.
    """
    folder = Path(run.output) / "checkpoints"
    chosen = None
    saved = saved_checkpoints(folder)
    for path in folder.glob("step-*"):
        if CHECKPOINT.fullmatch(path.name) and path.exists() and path not in saved:
            raise ValueError(
                f"{path.absolute()} is in the way of a checkpoint and is none; move it away"
            )
    newest = ["auto"]  # the values of run.resume that mean the newest checkpoint
    # a run that torchrun may start again then continues what it has written since, wherever it began
    if environment.may_restart():
        newest.append("never")
        if saved:
            newest.append(read_run_state(saved[-1])["config"]["run"]["resume"])
    if run.resume in newest:
        chosen = next(reversed(saved), None)
    elif run.resume != "never":
        chosen = Path(run.resume)
        with error_context("run.resume"):
            read_run_state(chosen)
    later = saved  # checkpoints that the run does not continue
    for number, path in enumerate(saved, 1):
        if chosen and path.samefile(chosen):  # run.resume may name a link to it
            later = saved[number:]
    if later:
        names = ", ".join(path.name for path in later)
        raise ValueError(
            f'run.output {run.output} already holds checkpoints; set run.resume = "auto" to continue the '
            f"newest, delete {names}, or set another run.output"
        )
    return chosen


def digests_of_inputs(
    inputs: RunInputs, train: TokenizedDataset, held_out: TokenizedDataset | None
) -> dict[str, str]:
    """Return digests of what a run's numbers depend on and its checkpoints do not hold, by words that name it.

    Whole files of weights are digested: a part would not show an edited layer, or a row of an embedding. The trained
    model's config.json is compared key by key elsewhere; weights drawn at random have no digest. The code of a
    function of rewards or rollouts is its module's file, which the checks have imported.
    """
    digests = {TRAINED_ON: train.folder.name, HELD_OUT: str(held_out and held_out.folder.name)}
    if {*train.source_weights} != {1}:  # the order of the examples follows from them too
        digests[TRAINED_ON] += f" {train.source_weights}"
    config = inputs.config
    frozen = inputs.others
    # adapters, and a stage that compares with the initial policy, need the weights that the run began with
    if config.model.lora.rank or not all(m.path for m in inputs.stage.requirements.models):
        frozen = {TRAINED_MODEL: inputs.weights, **frozen}
    for setting, weights in frozen.items():
        if weights.paths:
            shape = "" if setting == TRAINED_MODEL else str(weights.shape)
            content = content_digest(weights.paths, Path(config.data.cache))
            digests[f"the weights of {setting}"] = digest_of_value([shape, content])
    for function in (*config.ppo.reward, config.ppo.rollout):
        if function and is_function(function) and "//" not in function:
            module = sys.modules.get(function.partition(":")[0])
            if file := getattr(module, "__file__", None):
                digests[f"the lines of {function}"] = digest_of(Path(file))
    return digests
