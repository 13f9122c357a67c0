"""Whether a run may write where it is to write, and whether the disk holds its export and its checkpoints."""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from models.arch import ModelConfig
from ulysses.config.schema import Config
from ulysses.config.section import AbsentError, ConfigError
from ulysses.disk import check_apart, check_replaceable
from ulysses.plan.memory_choice import planner_model
from ulysses.plan.planner import GIB

# How files begin that are written anew whenever a run starts, config.json and metrics.jsonl.
BEGINNING = re.compile(rb'\{\s*"(stage|step)": |$')


def check_folders(config: Config, read: Iterable[tuple[str, Path]]) -> None:
    """Refuse an output folder in which something of the user's would be lost, or that belongs to what the run reads.

    Args:
        read: the files and folders that the run reads, with the settings that name them.
    """
    run, output, read = config.run, config.output, list(read)
    parts = [output / name for name in ("checkpoints", "tokenizer", "export")]
    for folder in (output, *parts):
        check_apart("run.output", folder, read)
    replaced = parts[1 : 2 + (run.export or run.overwrite)]
    if config.ppo.sampler:
        taken = (("a folder of run.output", part) for part in parts)
        check_apart("ppo.sampler_folder", config.sampler_folder, [*read, *taken])
        replaced.append(config.sampler_folder)
    for folder in replaced:
        check_replaceable(folder)
    for name in ("config.json", "metrics.jsonl"):
        path = output / name
        if path.exists() and not BEGINNING.match(path.open("rb").read(64)):
            raise ConfigError(
                f"run.output {output} holds {name}, which no run wrote; move it away, or set another folder"
            )


def check_disk(config: Config, shape: ModelConfig, *, resumes: bool) -> str:
    """Refuse a disk that cannot hold the export and the checkpoints that are saved by step.

    Return a warning if it cannot hold those of run.save_minutes, which a short run never saves. What the run folder
    holds already counts as free: those are checkpoints that are kept or go.
    """
    run, output = config.run, config.output
    place = next(folder for folder in (output, *output.parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"run.output {output} cannot be written: {place} is not a folder that you may write to; set another folder"
        )
    free = shutil.disk_usage(place).free
    for file in (f for name in ("checkpoints", "export") for f in (output / name).rglob("*")):
        with suppress(OSError):
            free += file.lstat().st_size
    trained = planner_model(config, shape).trained
    export = run.export * trained * getattr(torch, config.model.dtype).itemsize
    asked = "run.save_last", run.save_last * (1 + resumes)
    if run.save_every:
        asked = "run.save_every", 2 + (run.keep or run.steps // run.save_every)
    timed = "run.save_minutes", bool(run.save_minutes) * (1 + run.keep)
    for setting, count in (asked, timed):
        need = 12 * trained * count + export
        if need <= free:
            continue
        what, changes = ["the export"] * run.export, ["run.export = false"] * run.export
        if count:
            best = ", the best" * bool(run.save_every)
            kept = f" (run.keep = {run.keep}{best} and one being written)" * (count > 2)
            what.insert(0, f"{count} checkpoint{'s' * (count > 1)} of {setting}{kept}")
            changes.insert(0, f"{setting} = {'false' if setting == 'run.save_last' else 0}")
        if count > 2 and run.keep != 1:
            changes.append("run.keep = 1")
        sentence = (
            f"run.output {place} has {_size(free)} free but {' and '.join(what)} need {_size(need)}; "
            f"set {' or '.join(changes)}, or use another disk"
        )
        if setting != "run.save_minutes":
            raise AbsentError(sentence)
        return sentence
    return ""


def _size(count: float) -> str:
    """Write a number of bytes so that it does not round to nothing."""
    power, unit = (
        (30, "GiB") if count >= GIB else (20, "MiB") if count >= 1 << 20 else (10, "KiB")
    )
    return f"{count / (1 << power):.1f} {unit}"
