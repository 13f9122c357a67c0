"""Translate a configuration of LLaMA-Factory, TRL or axolotl: `ulysses migrate FILE > run.toml`.

    YAML, JSON or a shell command  ->  {their name: value}  ->  {our key: value} with comments  ->  TOML

The rules are data: ulysses/config/foreign_names.toml, which is applied here. What does not change what is trained, and
has no counterpart, is listed below the settings, with what to do. A file that would train something else here is
refused with the line that says so, and so is every setting that the rules do not know.
"""

import argparse
import json
import math
import re
import sys
import tomllib
from os.path import expanduser
from pathlib import Path
from typing import Any

import ulysses.run  # noqa: F401 - first: it refuses foreign packages named models or losses
from ulysses.cli import run_as
from ulysses.config.command_line import check, contradictions, known_keys, put
from ulysses.config.foreign_files import existing_path, read_settings, read_yaml
from ulysses.config.foreign_names import foreign_names
from ulysses.config.section import SECRETS, ConfigError, Values, existing, flat, refuse
from ulysses.config.stage_sections import LEARNING_RATES

NOTHING = (None, "", "auto", -1, [], {})
PROCESSES = re.compile(r"--(?:num_processes|nproc[-_]per[-_]node|num_gpus)[= ](\d+)")
NAMES = foreign_names()
UNKNOWN = "this setting is not known here; take it out if it does not change what is trained"


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
        "--stage",
        choices=NAMES["ours"]["stage"]["values"],
        help="if the file does not say it (TRL's do not)",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="number of GPUs, for batch.examples; by default as a launcher in the file says, or 1",
    )
    asked = parser.parse_args(arguments)
    try:
        given = read_settings(Path(expanduser(asked.file)))
        if asked.stage:
            given["stage"] = asked.stage
        print(SECRETS.sub("***", translate(given, asked.file, asked.gpus)))
    except Exception as error:  # a value of a wrong kind may fail anywhere
        said = str(error)
        if not isinstance(error, ConfigError):
            said = (
                f"it cannot be read, or holds a value of a wrong kind: {' '.join(said.split())}"
            )
        print(f"error: {asked.file}: {said}", file=sys.stderr)
        return 2
    return 0


def translate(given: Values, path: Path, gpus: int | None) -> str:
    """Return our settings as TOML with comments, and what is left to do.

    Args:
        given: their settings.
        path: their file; what it names is looked for in its folder and in the current one.

    Raises ConfigError if no stage is named, or if the settings would train something else here.
    """
    system = _system(given)
    given, method, written, left_out = _complete(given, system, path.parent)
    kinds = _kinds(given, path.parent)
    owners = [*(f"{kind}:{system}" for kind in kinds), *kinds, system, method]
    settings: Values = {}
    comments: dict[str, str] = {}
    remarks: list[str] = []
    refused: list[tuple[str, object, str]] = []  # name, value and reason
    # other rules depend on the stage
    for name in sorted(given, key=lambda name: name not in ("stage", "rl")):
        for value in [given[name]] if name in NAMES["ours"] else _entries(given[name]):
            stage = settings.get("stage", "")
            kind, rule = _rule(name, value, owners, stage)
            if kind == "ours":
                if rule["key"] in ("data.train", "data.eval"):
                    sources = []
                    for entry in _entries(value):
                        if isinstance(entry, dict) and (unknown := entry.pop("unknown", "")):
                            remarks.append(f"{name} = {entry['path']}: {unknown}")
                        source, wrong = _source(entry, stage)
                        sources.append(source)
                        refused += wrong
                    value = sources[0] if len(sources) == 1 else sources
                kind, rule, new = _ours(value, rule, stage)
                settings |= new
                comments |= dict.fromkeys(new if rule else (), f"  # {name}: {rule}")
            if kind == "by_hand":
                remarks.append(f"{name} = {value}: {rule}")
            elif kind == "not_supported":
                refused.append((name, value, rule))
            elif kind == "not_needed" and value and name in written:
                left_out[name] = rule
    if not method:
        methods = ", ".join(NAMES["ours"]["stage"]["values"])
        raise ConfigError(f"no stage is named; add --stage with one of {methods}")
    text = existing(path).read_text(encoding="utf-8-sig")
    if gpus is None:
        gpus = int(max(PROCESSES.findall(text), default="1", key=int))
    groups = max(1, gpus // settings.get("parallel.sequence_parallel_size", 1))
    answers = given["num_generations"] if "ppo.answers_per_prompt" in settings else 0
    settings |= _batch(given, groups, answers, comments)
    refuse([_refusal(*each, text) for each in refused])
    if not system:
        raise ConfigError(
            f"whose settings these are cannot be told: none of the names that mark {', '.join(NAMES['marks'])} is here"
        )
    if "data.train" not in settings:
        raise ConfigError(
            "this file names no training data, so it does not train; give the one that the trainer reads"
        )
    return _toml(settings, comments, left_out, remarks)


def _toml(
    settings: Values, comments: dict[str, str], left_out: dict[str, str], remarks: list[str]
) -> str:
    """Write settings with their comments; below them what is left out, what is left to do, and what contradicts itself.

    Raises ConfigError for a value that is none of ours.
    """
    lines = [
        "# What every setting means: ulysses train --help. Settings that are not needed here are left out."
    ]
    for key, value in settings.items():
        # an inline table of TOML is a JSON object with = instead of colons
        try:
            written = json.dumps(
                value,
                ensure_ascii=False,
                allow_nan=False,
                separators=(", ", " = "),
                default=str,
            )
        except ValueError:
            raise ConfigError(f"{key} is {value}, which is not a finite number") from None
        lines.append(f"{key} = {written}{comments.get(key, '')}")
    remarks += contradictions(check(tomllib.loads("\n".join(lines))))
    lines += [f"# left out: {name}: {why}" for name, why in left_out.items()]
    if remarks:
        lines += ["", "# Without a counterpart here or still wrong, and what to do:"]
    for line in "\n".join(remarks).splitlines():
        lines.append(re.sub(r"[\0-\x1f\x7f]", " ", f"#   {line}"))
    return "\n".join(lines)


def _rule(name: str, value: object, owners: list[str], stage: str) -> tuple[str, Any]:
    """Return the rule that says most about a setting, and the table that it stands in."""
    rules, said, table = NAMES["rules"], f"{name}={value}".lower(), name.partition(".")[0]
    places = [f"{owner}:{each}" for owner in owners for each in (said, name)]
    places += [f"{stage}.{said}", f"{stage}.{name}", said, name, table]
    place = next((place for place in places if place in rules), said)
    kind, rule = rules.get(place, ("not_supported", UNKNOWN))
    if kind == "ours":
        key = rule["key"].replace("STAGE", stage)
        return kind, rule | {"key": key + name[len(table) :] if place == table else key}
    # what is off asks for nothing
    return kind if value or "=" in place else "not_needed", rule


def _ours(value: object, rule: Values, stage: str) -> tuple[str, str, Values]:
    """Apply a rule of `ours`: return which table's the setting is after all, a comment, and our settings."""
    key, choices, keys = rule["key"], rule.get("values"), (f"{key}." for key in known_keys())
    if not f"{key}.".startswith(tuple(keys)) or key.split(".")[0] in {*LEARNING_RATES} - {
        stage
    }:
        return "by_hand", "a run of this stage has no such setting; leave it out", {}
    note = rule.get("note", "") if value or choices else ""
    if rule.get("list"):
        value = _listed(value)
        if choices:
            value = ",".join(sorted(value))
    if key.endswith("_every") and isinstance(value, float) and value % 1:
        return "by_hand", f"a share of all steps there; set {key} in steps", {}
    if choices:
        # a chat template may be its own text
        own = value if "{%" in str(value) or "{{" in str(value) else None
        chosen = [choices.get(str(each).lower(), own) for each in _entries(value)]
        said = [choice for choice in chosen if choice != ""] or [""]
        value = said[0] if len(said) == 1 else None
    if value is None:
        kind, stands = "not_supported", ""
        if key.startswith(tuple(NAMES["free_choice"])):
            kind, stands = "by_hand", ", so its default stands"
        todo = rule.get("else", "see ulysses train --help")
        return kind, f"{key} has no such choice{stands}; {todo}", {}
    new = value if choices and isinstance(value, dict) else {key: value}
    return "ours", note, new if value != "" else {}


def _batch(
    given: Values, groups: int, answers: int, comments: dict[str, str]
) -> dict[str, int]:
    """Return the examples of an optimizer step, or the prompts of a rollout.

    Args:
        groups: GPUs that do not share sequences.
        answers: to each prompt, which TRL's batch sizes count; 0 is any other method.
    """
    factors = {name: int(given[name]) for name in NAMES["batch_factors"] if name in given}
    examples = math.prod(factors.values()) * groups
    product = " x ".join(f"{name} {value}" for name, value in factors.items())
    comment = f"  # {product} x {groups} GPUs (those that share a sequence count once)"
    if "global_batch_size" in given:
        examples, comment = int(given["global_batch_size"]), "  # global_batch_size"
    settings = {"batch.examples": examples}
    if answers:
        parts = factors.get("gradient_accumulation_steps", 1)
        rollout = examples // parts * given.get("steps_per_generation", parts)
        rollout = given.get("generation_batch_size", rollout)
        if rollout % examples or rollout % answers:
            raise ConfigError(
                f"a rollout of {rollout} answers must be whole optimizer steps of {examples} and whole prompts of "
                f"num_generations {answers}; --gpus N says how many processes there are"
            )
        settings = {
            "ppo.minibatches": rollout // examples,
            "batch.examples": rollout // answers,
        }
        comment += f", a rollout of {rollout} answers / num_generations {answers}"
    comments["batch.examples"] = f"{comment}; --gpus N for others"
    return settings


def _refusal(name: str, value: object, reason: str, text: str) -> str:
    """Say what cannot be translated, and on which line of their file it stands."""
    last = re.escape(name.rpartition(".")[2])
    found = re.search(rf"^[^#\n]*(--{last}\b|\b{last}[\"']? *:)", text, re.M)
    line = f"line {text.count(chr(10), 0, found.end()) + 1}: " if found else ""
    return f"{line}{name} = {' '.join(str(value).split())} has no counterpart here; {reason}"


def _system(given: Values) -> str:
    """Tell whose settings these are, "" if nothing says it; ConfigError for those that are not translated."""
    for name, marks in NAMES["not_translated"].items():
        if found := sorted(given.keys() & marks):
            raise ConfigError(
                f"{found[0]} is a setting of {name}, whose files are not translated; start from configs/"
            )
    return next((name for name, marks in NAMES["marks"].items() if given.keys() & marks), "")


def _complete(
    given: Values, system: str, folder: Path
) -> tuple[Values, str, set[str], dict[str, str]]:
    """Add what their trainer takes where the file says nothing and what other files say; remove what is void.

    Returns the settings, the method, which says more than our stage, the names in the file, and those that are void.
    """
    found = existing_path(str(given.get("deepspeed")), folder)
    if found.is_file():
        given |= {"deepspeed": None, "deepspeed_json": json.loads(found.read_text())}
    # the older mixture of alignment-handbook, whose splits tell by their names what they are for
    mixer = given.get("dataset_mixer")
    held_out: object = []
    splits = _entries(given.get("dataset_splits", ["train", "test"]))
    if isinstance(mixer, dict) and all(re.search("train|test", split) for split in splits):
        given.pop("dataset_splits", None)
        given["dataset_mixer"] = [
            {"path": path, "split": split, "weight": weight}
            for path, weight in mixer.items()
            for split in splits
            if "train" in split
        ]
        held_out = [{"path": p, "split": s} for p in mixer for s in splits if "train" not in s]
    # axolotl's table for GRPO holds TRL's names; keys of TOML have these letters only
    plain = re.compile(r"^trl\.|[^\w.-]", re.A)
    renamed = ((NAMES["older"].get(name, name), value) for name, value in flat(given).items())
    named = {plain.sub("", name): _plain(value) for name, value in renamed}
    system = system or "trl"
    named |= {
        name: meant
        for name, meant in NAMES["null"].get(system, {}).items()
        if named.get(name, 0) is None
    }
    # "none" is a choice of scale_rewards
    given = {n: v for n, v in named.items() if v not in NOTHING or n == "scale_rewards"}
    defaults = NAMES["defaults"]
    for name, stage in NAMES["implied"].items():
        if given.get(name):
            given.setdefault("stage", stage)
    written, void = {*given}, {}
    # SimPO's own trainer
    if "gamma_beta_ratio" in given and given.get("loss_type", "sigmoid") == "sigmoid":
        gamma = given.pop("gamma_beta_ratio") * given.setdefault("beta", 2.0)
        given |= {"simpo_gamma": gamma, "loss_type": "simpo"}
    method = str(given.get("rl", given.get("stage", defaults[system].get("stage", ""))))
    for table in (f"{system}_{method}", method, system):
        given = defaults.get(table, {}) | given
    if "reward_funcs" in given:
        rewards = [
            re.sub(r"\.(\w+)$", r":\1", name) for name in _entries(given["reward_funcs"])
        ]
        if own := [name for name in rewards if ":" not in name]:
            raise ConfigError(
                f"reward_funcs = {own[0]} has no counterpart here; it is TRL's own function, so write module.function "
                "of yours"
            )
        rewards = _entries(given.pop("reward_model_name_or_path", [])) + rewards
        weights = _entries(given.pop("reward_weights", [1.0] * len(rewards)))
        given["reward_funcs"] = dict(zip(rewards, weights, strict=True))
    if system != "llamafactory_v1":
        given.setdefault("lora_alpha", 2 * given.get("lora_rank", 8))
    for rule in NAMES["replaces"]:
        value = str(given.get(rule["name"], 0)).lower()
        if value in rule["when"] if "when" in rule else value not in rule["unless"]:
            why = f"it does nothing beside {rule['name']}"
            void |= dict.fromkeys(written & {*rule["names"]}, why)
            given = {name: given[name] for name in given if name not in rule["names"]}
    given["adam_beta1"] = [given["adam_beta1"], given.pop("adam_beta2")]
    trained, tested = (given.pop(f"dataset_{part}_split", part) for part in ("train", "test"))
    if path := given.pop("dataset_name", None):
        source = {"path": path, "subset": given.pop("dataset_config", None)}
        given["datasets"], held_out = source | {"split": trained}, source | {"split": tested}
    if held_out and given.get("eval_strategy"):
        given["test_datasets"] = held_out
    named = {
        name: [{"path": t} if isinstance(t, str) else t for t in _entries(given[name])]
        for name in given.keys() & {"datasets", "test_datasets"}
    }
    said = [{k: t.get(k) for k in NAMES["of_all"]} for tables in named.values() for t in tables]
    if said and said.count(said[0]) == len(said):
        given |= {key: value for key, value in said[0].items() if value}
        given |= {
            name: [t | dict.fromkeys(said[0]) for t in tables] for name, tables in named.items()
        }
    # LLaMA-Factory describes data sets by their names in a file of this folder
    if "dataset_dir" in given:
        info = existing_path(f"{given['dataset_dir']}/dataset_info.json", folder)
        described = json.loads(info.read_text(encoding="utf-8")) if info.exists() else {}
        most = {"max_samples": given.pop("max_samples", None)}
        unknown = {"unknown": "dataset_info.json does not describe it, so write its path"}
        for each in described.values():
            if "file_name" in each:
                each["file_name"] = str(info.parent / each["file_name"])
        for name in given.keys() & {"dataset", "eval_dataset"}:
            given[name] = [
                most | described.get(each, {"path": each} | unknown)
                for each in _listed(given[name])
            ]
        if shares := given.get("interleave_probs"):
            pairs = zip(given["dataset"], map(float, _listed(shares)), strict=True)
            given["dataset"] = [source | {"probability": share} for source, share in pairs]
            given["interleave_probs"] = given.pop("mix_strategy", "concat")
    # v1 describes them in a file of their own
    for name in given.keys() & {"train_dataset", "eval_dataset"}:
        file = existing_path(str(given[name]), folder)
        if file.suffix in (".yaml", ".yml"):
            described = read_yaml(file.read_text(encoding="utf-8"))
            given[name] = [each | {"path": str(each["path"])} for each in described.values()]
    return given, method, written, void


def _kinds(given: Values, folder: Path) -> list[str]:
    """Return what rules may ask for: the chat template, and what the model is by its config.json, else by its name."""
    model = next((str(given[name]) for name in NAMES["models"] if name in given), "")
    if (file := existing_path(f"{model}/config.json", folder)).is_file():
        model = str(json.loads(file.read_text()).get("model_type"))
    kinds = [
        name for name, pattern in NAMES["kinds"].items() if re.search(pattern, model, re.I)
    ]
    return [str(given.get("chat_template")), *kinds]


def _source(
    entry: Values | str, stage: str
) -> tuple[Values | str, list[tuple[str, object, str]]]:
    """Turn one of their data sets, a path or a description, into ours; name what would change its rows."""
    source: Values = {}
    wrong, reasons = [], NAMES["row_reasons"]
    for name, value in flat({"path": entry} if isinstance(entry, str) else entry).items():
        name = name.removeprefix("columns.")
        key, allowed = (
            NAMES[table].get(f"{stage}.{name}", NAMES[table].get(name))
            for table in ("sources", "rows")
        )
        for pattern, means in NAMES["row_settings"].items():
            for place, meant in (
                flat(means).items() if re.fullmatch(pattern, f"{key or name}={value}") else ()
            ):
                put(source, place, meant)
        said = (f"{name}={entry}" for entry in _entries(value))
        wrong += [(name, value, reasons[each]) for each in said if each in reasons]
        if value in NOTHING or key == f"columns.{value}" or allowed == []:
            continue
        if key == "split" and "[" in str(value):
            wrong.append((name, value, "write max_examples for a part of a split"))
        elif key:
            put(source, key, value)
        elif allowed is None or _plain(value) not in allowed:
            wrong.append((name, value, reasons.get(name, UNKNOWN)))
    return source["path"] if source.keys() == {"path"} else source, wrong


def _entries(value: object) -> list:
    """Return a list of their values as it is, and one value alone as a list."""
    return value if isinstance(value, list) else [value]


def _listed(value: object) -> list:
    """Return a list of their values, which may be a text with commas."""
    return (
        [each.strip() for each in value.split(",")]
        if isinstance(value, str)
        else _entries(value)
    )


def _plain(value: Any) -> Any:
    """Read the numbers and switches that YAML and a shell leave as text, such as 1e-5; one value alone is no list."""
    if isinstance(value, list):
        return _plain(value[0]) if len(value) == 1 else [*map(_plain, value)]
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        words = {"true": True, "false": False, "yes": True, "no": False, "none": None}
        return words.get(str(value).lower(), value)


run_as("migrate", __name__)
