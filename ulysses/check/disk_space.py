"""Whether a run may write where it is to write, and whether the disk holds its export and its checkpoints."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import AbsentError, ConfigError
from ulysses.data.read.sources import parse_sources
from ulysses.disk import RECORD, check_apart, check_replaceable
from ulysses.plan.planned_run import planner_model

# How files begin that are written anew whenever a run starts, config.json and metrics.jsonl.
BEGINNING = re.compile(rb'\{\s*"stage": |\{"step": \d+, "run": |$')


def check_folders(
    config: Config,
    folder: Path | None,
    place: Path | None,
    weights: InitialWeights,
    others: Mapping[str, InitialWeights],
) -> None:
    """Refuse an output folder in which something of the user's would be lost, or that belongs to what the run reads.

    Args:
        folder: of the trained model.
        place: of its tokenizer.
    """
    run, output, data = config.run, config.output, config.data
    read = []
    for setting, given in (("data.train", data.train), ("data.eval", data.eval)):
        read += [(setting, s.place) for s in parse_sources(given) if not s.is_on_hub]
    read.append(("data.cache", Path(data.cache)))
    if folder:
        read.append(("model.path", folder))
    if config.model.tokenizer and place:
        read.append(("model.tokenizer", place))
    for setting, found in {"model.path": weights, **others}.items():
        read += [(setting, place) for place in {path.parent for path in found.paths}]
    parts = [output / name for name in ("checkpoints", "tokenizer", "export")]
    for place in (output, *parts):
        check_apart("run.output", place, read)
    replaced = parts[1:] if run.export or run.overwrite else parts[1:2]
    if config.ppo.sampler:
        taken = (("a folder of run.output", part) for part in parts)
        check_apart("ppo.sampler_folder", config.sampler_folder, [*read, *taken])
        replaced.append(config.sampler_folder)
    # a file in the place of a folder that is not replaced is refused, too
    replaced += [p for p in (parts[0], output / "tensorboard") if not p.is_dir()]
    for place in replaced:
        check_replaceable(place)
    for around in (output, *output.parents):
        if (around / RECORD).exists() or (around / "rank-00000.json").exists():
            raise ConfigError(
                f"run.output {output} is or lies in {around}, which a run or export wrote as a whole; set a folder "
                "apart from it"
            )
    for name in ("config.json", "metrics.jsonl"):
        path = output / name
        if path.exists() and not (path.is_file() and BEGINNING.match(path.open("rb").read(64))):
            raise ConfigError(
                f"run.output {output} holds {name}, which no run wrote; move it away, or set another folder"
            )


def check_disk(config: Config, shape: ModelConfig, resume_from: Path | None) -> str:
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
    export = trained * getattr(torch, config.export_dtype).itemsize if run.export else 0

    def lacking(setting: str, count: int) -> str:
        """Return a sentence if there is no room for so many checkpoints, which a setting asks for, and the export."""
        need = 12 * trained * count + export
        if need <= free:
            return ""
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
        return (
            f"run.output {place} has {_size(free)} free but {' and '.join(what)} need {_size(need)}; "
            f"set {' or '.join(changes)}, or use another disk"
        )

    if run.save_every:
        sentence = lacking("run.save_every", 2 + (run.keep or run.steps // run.save_every))
    else:  # a run that continues a checkpoint keeps it until the last one is written
        count = 2 if resume_from else 1
        sentence = lacking("run.save_last", count if run.save_last else 0)
    if sentence:
        raise AbsentError(sentence)
    return lacking("run.save_minutes", 1 + run.keep) if run.save_minutes else ""


def _size(count: float) -> str:
    """Write a number of bytes so that it does not round to nothing."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
