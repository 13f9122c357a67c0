"""Translate a configuration of LLaMA-Factory, TRL or axolotl: `ulysses migrate FILE > run.toml`.

    YAML, JSON or a shell command  ->  {their name: value}  ->  {our key: value} with comments  ->  TOML

The rules are data: ulysses/training/foreign_names.toml, which is applied here. What has no counterpart is listed below
the settings, with what to do.
"""

import argparse
import json
import math
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

import ulysses.training  # noqa: F401 - first: it refuses foreign packages named models or losses
from ulysses.training.command_line import check, known_keys, put
from ulysses.training.foreign_names import foreign_names
from ulysses.training.section import ConfigError, flat
from ulysses.training.stages import STAGES

# Their product over all GPUs is batch.examples.
BATCH_FACTORS = (
    "per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
NOTHING = (None, "", "auto", -1, [], {})


def main(arguments: list[str] | None = None) -> int:
    """Print the translation; return the exit code."""
    parser = argparse.ArgumentParser(
        "ulysses migrate",
        description="Translate a configuration of LLaMA-Factory, TRL or axolotl into TOML.",
    )
    parser.add_argument(
        "file", type=Path, help="YAML, JSON, or a file that holds a shell command"
    )
    parser.add_argument(
        "--stage", choices=STAGES, help="if the file does not say it (TRL's do not)"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs, for batch.examples"
    )
    asked = parser.parse_args(arguments)
    try:
        given = read_settings(asked.file)
        if asked.stage:
            given["stage"] = asked.stage
        print(translate(given, asked.file.parent, asked.gpus))
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"error: {asked.file}: {error}", file=sys.stderr)
        return 2
    return 0


def read_settings(path: Path) -> dict[str, Any]:
    """Read their settings from YAML, JSON, or the arguments of a command such as `trl dpo --config FILE --beta 0.2`."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".yaml", ".yml", ".json"):
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            raise ConfigError(
                "this file holds no settings; give the YAML that the trainer reads"
            )
        return values
    scripts = foreign_names()["scripts"]
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    while words and Path(words[0]).stem not in scripts:
        del words[0]
    if not words:
        raise ConfigError(f"no command here starts a trainer: none of {', '.join(scripts)}")
    # llamafactory-cli train FILE
    name, given = "config", {"stage": [scripts[Path(words[0]).stem]]}
    for word in words[1:]:
        if word.startswith("--"):
            name, _, word = word[2:].partition("=")
        given.setdefault(name, []).append(word)
    values = {name: [word for word in words if word] or True for name, words in given.items()}
    for file in values.pop("config", []):
        values = read_settings(_find(file, path.parent)) | values
    return values


def translate(given: dict[str, Any], folder: Path, gpus: int) -> str:
    """Return our settings as TOML with comments, and what is left to do.

    Args:
        given: their settings.
        folder: where their file lies; what it names is looked for there and in the current folder.
    """
    names, keys = foreign_names(), known_keys()
    rules = names["ours"] | names["not_needed"] | names["not_supported"]
    given = _complete(given, folder, names)
    factors = {name: given.pop(name) for name in BATCH_FACTORS if name in given}
    settings: dict[str, Any] = {}
    comments: dict[str, str] = {}
    remarks: list[str] = []
    # other rules depend on the stage
    for name in sorted(given, key=lambda name: name not in ("stage", "rl")):
        value, problem = given[name], ""
        table = name if name in rules else name.partition(".")[0]
        lower, rule = str(value).lower(), rules.get(table)
        if table in names["not_needed"] or lower in names["harmless"].get(name, ()):
            continue
        if table in names["ours"]:
            stage = settings.get("stage", "")
            key, choices = rule["key"].replace("STAGE", stage), rule.get("values")
            if rule.get("list") and isinstance(value, str):
                value = value.split(",")
            if key in ("data.train", "data.eval"):
                entries = value if isinstance(value, list) else [value]
                value = _plain([_source(each, names["sources"], remarks) for each in entries])
            new = choices.get(lower) if choices and not isinstance(value, list) else value
            if key not in keys or key.split(".")[0] in {*STAGES} - {stage}:
                problem = "a run of this stage has no such setting; leave it out"
            elif new is None:
                problem = (
                    f"{key} has no such choice, so its default stands; see train.py --help"
                )
            elif new != "":
                key += name.removeprefix(table)
                settings |= new if choices and isinstance(new, dict) else {key: new}
                if "note" in rule:
                    comments[key] = f"  # {name}: {rule['note']}"
        elif value or not rule:
            problem = rule or "unknown; train.py --help lists the settings"
        if problem:
            remarks.append(f"{name} = {value}: {problem}")
    if "stage" not in settings:
        raise ConfigError(f"no stage is named; add --stage with one of {', '.join(STAGES)}")
    groups = max(1, gpus // settings.get("parallel.sequence_parallel_size", 1))
    settings["batch.examples"] = math.prod(map(int, factors.values())) * groups
    product = " x ".join(f"{name} {value}" for name, value in factors.items())
    comments["batch.examples"] = (
        f"  # {product} x {groups} GPUs (those that share a sequence count once); --gpus N for others"
    )
    lines = [
        "# What every setting means: train.py --help. Settings that are not needed here are left out."
    ]
    for key, value in settings.items():
        # an inline table of TOML is a JSON object but for its colons
        text = json.dumps(value, ensure_ascii=False, separators=(", ", " = "))
        lines.append(f"{key} = {text}{comments.get(key, '')}")
    try:
        remarks += check(tomllib.loads("\n".join(lines))).complaints()
    except ConfigError as error:
        remarks += str(error).splitlines()
    if remarks:
        lines += ["", "# Without a counterpart here or still wrong, and what to do:"]
    return "\n".join([*lines, *(f"#   {line}" for line in remarks)])


def _complete(given: dict[str, Any], folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Add what their trainer takes where the file says nothing and what other files say; remove what is void."""
    found = _find(str(given.get("deepspeed")), folder)
    if found.is_file():
        given |= {"deepspeed": None, "deepspeed_json": json.loads(found.read_text())}
    given = {name: _plain(value) for name, value in flat(given).items()}
    given = {name: value for name, value in given.items() if value not in NOTHING}
    marks, defaults = names["marks"], names["defaults"]
    system = next((name for name in marks if given.keys() & marks[name]), "trl")
    for name, stage in names["implied"].items():
        if given.get(name):
            given.setdefault("stage", stage)
    given = defaults[system] | defaults.get(f"{system}_{given.get('stage')}", {}) | given
    given.setdefault("lora_alpha", 2 * given.get("lora_rank", 8))
    for rule in names["replaces"]:
        if str(given.get(rule["name"], 0)).lower() not in rule["unless"]:
            given = {name: given[name] for name in given if name not in rule["names"]}
    given["adam_beta1"] = [given["adam_beta1"], given.pop("adam_beta2")]
    if path := given.pop("dataset_name", None):
        source = {"path": path, "subset": given.pop("dataset_config", None)}
        given["datasets"] = source | {"split": given.pop("dataset_train_split", "train")}
        if given.get("eval_strategy"):
            given["test_datasets"] = source | {"split": given.pop("dataset_test_split", "test")}
    # LLaMA-Factory describes data sets by their names in a file of this folder
    if "dataset_dir" in given:
        info = _find(f"{given['dataset_dir']}/dataset_info.json", folder)
        described = json.loads(info.read_text(encoding="utf-8")) if info.exists() else {}
        most = {"num_samples": given.pop("max_samples", None)}
        unknown = {"dataset_info.json": "does not describe it, so write its path"}
        for each in described.values():
            if "file_name" in each:
                each["file_name"] = str(info.parent / each["file_name"])
        for name in given.keys() & {"dataset", "eval_dataset"}:
            given[name] = [
                most | described.get(each, {"path": each} | unknown)
                for each in given[name].replace(" ", "").split(",")
            ]
    return given


def _source(entry: Any, keys: dict[str, str], remarks: list[str]) -> Any:
    """Turn one of their data sets, a path or a description, into ours."""
    source: dict[str, Any] = {}
    left = []
    for name, value in flat({"path": entry} if isinstance(entry, str) else entry).items():
        name = name.removeprefix("columns.")
        key = keys.get(name)
        if value in NOTHING or key == f"columns.{value}":
            continue
        if key:
            put(source, key, value)
        else:
            left.append(f"{name} {value}")
    if left:
        remarks.append(
            f"{source.get('path')}: {', '.join(left)}: formats follow from the rows' keys; look with --inspect 3"
        )
    return source["path"] if source.keys() == {"path"} else source


def _plain(value: Any) -> Any:
    """Read the numbers and switches that YAML and a shell leave as text, such as 1e-5; one value alone is no list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        words = {"true": True, "false": False, "no": False, "none": None}
        return words.get(str(value).lower(), value)


def _find(path: str, folder: Path) -> Path:
    """Return a path as it is, or as seen from `folder` or one above it, wherever the file exists."""
    places = (Path(), folder, *folder.absolute().parents)
    return next((place / path for place in places if (place / path).exists()), Path(path))
