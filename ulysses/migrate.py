"""Translate a configuration of LLaMA-Factory, TRL or axolotl: `python -m ulysses.migrate FILE > run.toml`.

    YAML, JSON or a shell command  ->  {their name: value}  ->  {our key: value} with comments  ->  TOML

The rules are data: ulysses/training/foreign_names.toml. Here is what no table can say: batch sizes, data sets and files
that the configuration names. What has no counterpart is listed below the settings, with what to do.
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
from ulysses.training.foreign_names import BATCH_FACTORS, foreign_names
from ulysses.training.section import ConfigError
from ulysses.training.stages import STAGES

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
        print(Migration(given, asked.file.parent, asked.gpus).toml())
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
    words, scripts = (
        shlex.split(text.replace("\\\n", " "), comments=True),
        foreign_names()["scripts"],
    )
    start = next((i for i, word in enumerate(words) if Path(word).stem in scripts), None)
    if start is None:
        raise ConfigError(f"no command here starts a trainer: none of {', '.join(scripts)}")
    name, lists = "config", {}  # llamafactory-cli train FILE
    for word in words[start + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            lists[name] = [value] if equals else []
        else:
            lists.setdefault(name, []).append(word)
    files = lists.pop("config", [])
    given = {"stage": scripts[Path(words[start]).stem]}
    for file in files:
        given |= read_settings(_find(file, path.parent))
    return given | {name: values or True for name, values in lists.items()}


class Migration:
    """One file on its way.

    Args:
        given: their settings.
        folder: where the file lies; what it names is looked for here and in the current folder.

    Attributes:
        settings: our settings by dotted key.
        comments: by our key, what its value means now.
        remarks: what has no counterpart, and what to do about it.
        not_needed: names that can be left out.
    """

    def __init__(self, given: dict[str, Any], folder: Path, gpus: int = 1) -> None:
        self.names = names = foreign_names()
        self.settings: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.remarks: list[str] = []
        self.not_needed: list[str] = []
        given = {
            name: plain
            for name, value in given.items()
            if (plain := _plain(value)) not in NOTHING
        }
        self.system = next(
            (name for name, marks in names["marks"].items() if given.keys() & marks), "trl"
        )
        for name, stage in names["implied"].items():
            if given.get(name):
                given.setdefault("stage", stage)
        given = names["defaults"][self.system] | given
        for name in ("stage", "rl"):
            self._one(name, given.pop(name, None))
        stage = self.settings.get("stage")
        if stage not in STAGES:
            raise ConfigError(f"no stage is named; add --stage with one of {', '.join(STAGES)}")
        given = names["defaults"].get(f"{self.system}_{stage}", {}) | given
        trained = {given.get(name) for name in ("finetuning_type", "use_peft", "adapter")}
        if trained & {"lora", "qlora", True}:
            given = {"lora_alpha": 2 * given.get("lora_rank", 8)} | given
        else:
            given = {
                name: value for name, value in given.items() if not name.startswith("lora_")
            }
        self.settings["optimizer.betas"] = [given.pop("adam_beta1"), given.pop("adam_beta2")]
        if path := given.pop("dataset_name", None):
            source = {"path": path, "subset": given.pop("dataset_config", None)}
            given["datasets"] = source | {"split": given.pop("dataset_train_split", "train")}
            if given.get("eval_strategy"):
                test = given.pop("dataset_test_split", "test")
                given["test_datasets"] = source | {"split": test}
        info = _find(f"{given.pop('dataset_dir', 'data')}/dataset_info.json", folder)
        self.described = json.loads(info.read_text(encoding="utf-8")) if info.exists() else {}
        self.data_folder, self.most = info.parent, given.pop("max_samples", None)
        file = given.get("deepspeed")
        if isinstance(file, str) and (found := _find(file, folder)).exists():
            given["deepspeed"] = json.loads(found.read_text())
        for name, others in names["replaces"].items():
            if str(given.get(name, 0)) not in ("0", "0.0", "steps"):
                given = {key: value for key, value in given.items() if key not in others}
        factors = {name: given.pop(name) for name in BATCH_FACTORS if name in given}
        for name, value in given.items():
            self._one(name, value)
        if "data.eval" not in self.settings:
            self.settings.pop("run.eval_every", None)
        groups = max(1, gpus // self.settings.get("parallel.sequence_parallel_size", 1))
        self.settings["batch.examples"] = math.prod(factors.values()) * groups
        self.comments["batch.examples"] = (
            " x ".join(f"{name} {value}" for name, value in factors.items())
            + f" x {groups} GPU(s), where those that share a sequence count once; --gpus N for others"
        )

    def toml(self) -> str:
        """Return our settings as TOML with comments, and what is left to do."""
        lines, section = ["# what every setting means: train.py --help"], ""
        for key in sorted(self.settings, key=[*known_keys()].index):
            if key.partition(".")[0] != section:
                section = key.partition(".")[0]
                lines.append("")
            # an inline table of TOML is a JSON object but for its colons
            value = json.dumps(self.settings[key], ensure_ascii=False, separators=(", ", " = "))
            comment = f"  # {self.comments[key]}" if key in self.comments else ""
            lines.append(f"{key} = {value}{comment}")
        try:
            config = check(tomllib.loads("\n".join(lines)))
            wrong = [*config.stage_class.check(config)]
        except ConfigError as error:
            wrong = str(error).splitlines()
        for title, found in {
            "Without a counterpart here, and what to do": self.remarks,
            "Still wrong": wrong,
            "Not needed here (train.py says why if you set them)": [", ".join(self.not_needed)],
        }.items():
            if any(found):
                lines += ["", f"# {title}:", *(f"#   {line}" for line in found)]
        return "\n".join(lines)

    def _one(self, name: str, value: Any) -> None:
        """Apply the rule of one of their settings."""
        names, lower, problem = self.names, str(value).lower(), ""
        if value in NOTHING:
            return
        if name in names["not_needed"] or lower in names["harmless"].get(name, ()):
            self.not_needed.append(name)
        elif rule := names["ours"].get(name):
            table = rule if isinstance(rule, dict) else {"key": rule}
            stage = self.settings.get("stage", "")
            key, values = table["key"].replace("STAGE", stage), table.get("values")
            if key in ("data.train", "data.eval"):
                value = self._sources(value)
            if key == "model.lora.targets" and isinstance(value, str) and lower not in values:
                value = value.split(",")
            new = values.get(lower) if values and not isinstance(value, list) else value
            if key not in known_keys() or key.split(".")[0] in {*STAGES} - {stage}:
                problem = "a run of this stage has no such setting; leave it out"
            elif new is None:
                problem = (
                    f"{key} has no such choice, so its default stands; see train.py --help"
                )
            elif new != "":
                self.settings |= new if values and isinstance(new, dict) else {key: new}
                if "note" in table:
                    self.comments[key] = f"{name}: {table['note']}"
        elif isinstance(value, dict):
            for key, each in value.items():
                self._one(f"{name}.{key}", each)
        elif instead := names["not_supported"].get(name):
            problem = instead if value else ""
        elif not name.startswith("deepspeed."):
            problem = "unknown; train.py --help lists the settings"
        if problem:
            self.remarks.append(f"{name} = {value}: {problem}")

    def _sources(self, value: Any) -> Any:
        """Turn one or several of their data sets, each a name or a description, into ours."""
        if isinstance(value, str):
            value = value.split(",")
        sources = [
            self._source(entry) for entry in (value if isinstance(value, list) else [value])
        ]
        return sources if len(sources) > 1 else sources[0]

    def _source(self, entry: Any) -> Any:
        if isinstance(entry, str):
            name = entry.strip()
            if self.system == "llamafactory" and name not in self.described:
                self.remarks.append(
                    f"{name}: not in dataset_info.json of dataset_dir; write the file's path into data.train"
                )
            entry = self.described.get(name, {"path": name})
        entry = {"num_samples": self.most} | entry
        columns = entry.pop("columns", None)
        entry |= columns if isinstance(columns, dict) else {}
        source: dict[str, Any] = {}
        left = []
        for name, value in entry.items():
            key = self.names["sources"].get(name)
            if name == "file_name":
                value = str(self.data_folder / value)
            if key and value not in NOTHING and key != f"columns.{value}":
                put(source, key, value)
            elif not key and value not in NOTHING:
                left.append(f"{name} {value}")
        if left:
            self.remarks.append(
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


if __name__ == "__main__":
    raise SystemExit(main())
