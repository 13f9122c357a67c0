"""Translate a configuration of LLaMA-Factory, TRL or axolotl: `ulysses migrate FILE > run.toml`.

    YAML or JSON  ->  {their name: value}  ->  {our key: value} with comments  ->  TOML

The rules are data: ulysses/config/foreign_names.toml, whose head explains them. A setting without a counterpart that
does not change what is trained is listed below ours, with what to do. A file that would train something else here is
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

import yaml

from ulysses.config.command_line import check, contradictions, foreign_names, known_keys, put
from ulysses.config.section import SECRETS, ConfigError, Values, existing, flat, refuse
from ulysses.config.stage_sections import LEARNING_RATES
from ulysses.data.read.messages import as_list

NOTHING = (None, "", "auto", -1, [], {})  # values with which a setting asks for nothing
NAMES = foreign_names()
Refusal = tuple[str, object, str]  # the name of a setting, its value and the reason
UNKNOWN = "this setting is not known here; take it out if it does not change what is trained"


def main(arguments: list[str] | None = None) -> int:
    """Print the translation; return the exit code."""
    parser = argparse.ArgumentParser(
        "ulysses migrate",
        description="Translate a configuration of LLaMA-Factory, TRL or axolotl into TOML.",
    )
    parser.add_argument("file", type=Path, help="YAML or JSON that the trainer reads")
    parser.add_argument(
        "--stage",
        choices=NAMES["ours"]["stage"]["values"],
        help="if the file does not say it (TRL's do not)",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs, for batch.examples"
    )
    asked = parser.parse_args(arguments)
    if asked.gpus < 1:
        parser.error("--gpus must be at least 1")
    try:
        file = Path(expanduser(asked.file))
        theirs = read_settings(file)
        if asked.stage:
            theirs["stage"] = asked.stage
        translation = translate(theirs, file, asked.gpus)
    except Exception as error:  # a value of a wrong kind may fail anywhere
        reason = str(error)
        if not isinstance(error, ConfigError):
            reason = f"it cannot be read, or holds a value of a wrong kind: {' '.join(reason.split())}"
        print(f"error: {asked.file}: {reason}", file=sys.stderr)
        return 2
    print(SECRETS.sub("***", translation))
    return 0


def read_settings(path: Path) -> Values:
    """Read their settings from YAML or JSON."""
    text, values = existing(path).read_text(encoding="utf-8-sig"), None
    if path.suffix == ".json":
        values = json.loads(text)
    elif path.suffix in (".yaml", ".yml"):
        values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ConfigError(
            "this file holds no settings; give the YAML or JSON that the trainer reads (of a command, write each "
            "--name value as a line name: value)"
        )
    return {str(name): value for name, value in values.items()}


def translate(theirs: Values, path: Path, gpus: int) -> str:
    """Return our settings as TOML, with comments and a list of what is left to do.

    Args:
        theirs: their settings.
        path: their file; the files that it names are looked for in the current folder and in its own.

    Raises ConfigError if no stage is named, or if the settings would train something else here.
    """
    system = _system(theirs)
    theirs, method, written, left_out = _complete(theirs, system, path.parent)
    kinds = _kinds(theirs, path.parent)
    # the prefixes that a rule may have, the one that says most first
    owners = [*(f"{kind}:{system}" for kind in kinds), *kinds, system, method]
    settings = {}
    comments = {}
    remarks = []
    refused = []
    # the stage first, because other rules depend on it
    for name in sorted(theirs, key=lambda name: name not in ("stage", "rl")):
        for value in [theirs[name]] if name in NAMES["ours"] else as_list(theirs[name]):
            stage = settings.get("stage", "")
            kind, rule = _rule(name, value, owners, stage)
            if kind == "ours":
                if rule["key"] in ("data.train", "data.eval"):
                    sources = []
                    for entry in as_list(value):
                        if isinstance(entry, dict) and (unknown := entry.pop("unknown", "")):
                            remarks.append(f"{name} = {entry['path']}: {unknown}")
                        sources.append(_source(entry, stage, refused))
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
    text = path.read_text(encoding="utf-8-sig")
    groups = max(1, gpus // settings.get("parallel.sequence_parallel_size", 1))
    answers = theirs["num_generations"] if "ppo.answers_per_prompt" in settings else 0
    settings |= _batch(theirs, groups, answers, comments)
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
    """Write settings with their comments, and below them what is left out, left to do, or contradicts itself.

    Raises ConfigError for a value that our setting cannot have.
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
    """Return the table that the rule which says most about a setting stands in, and the rule."""
    rules, choice, table = NAMES["rules"], f"{name}={value}".lower(), name.partition(".")[0]
    patterns = [f"{owner}:{each}" for owner in owners for each in (choice, name)]
    patterns += [f"{stage}.{choice}", f"{stage}.{name}", choice, name, table]
    pattern = next((pattern for pattern in patterns if pattern in rules), choice)
    kind, rule = rules.get(pattern, ("not_supported", UNKNOWN))
    if kind == "ours":
        key = rule["key"].replace("STAGE", stage)
        return kind, rule | {"key": key + name[len(table) :] if pattern == table else key}
    # a setting that is off asks for nothing, unless the rule is about this very value
    return kind if value or "=" in pattern else "not_needed", rule


def _ours(value: object, rule: Values, stage: str) -> tuple[str, str, Values]:
    """Apply a rule of `ours`: return the table that the value belongs to, a comment or reason, and our settings."""
    key, choices, keys = rule["key"], rule.get("values"), (f"{key}." for key in known_keys())
    other_stages = {*LEARNING_RATES} - {stage}
    if not f"{key}.".startswith(tuple(keys)) or key.split(".")[0] in other_stages:
        return "by_hand", "a run of this stage has no such setting; leave it out", {}
    note = rule.get("note", "") if value or choices else ""
    if rule.get("list"):
        value = _listed(value)
        if choices:
            value = ",".join(sorted(value))
    if key.endswith("_every") and isinstance(value, float) and value % 1:
        return "by_hand", f"a share of all steps there; set {key} in steps", {}
    if choices:
        # the text of a chat template may stand in place of its name
        template = value if "{%" in str(value) or "{{" in str(value) else None
        chosen = [choices.get(str(each).lower(), template) for each in as_list(value)]
        chosen = [choice for choice in chosen if choice != ""] or [""]
        value = chosen[0] if len(chosen) == 1 else None
    if value is None:
        kind, default = "not_supported", ""
        if key.startswith(tuple(NAMES["free_choice"])):
            kind, default = "by_hand", ", so its default stands"
        todo = rule.get("else", "see ulysses train --help")
        return kind, f"{key} has no such choice{default}; {todo}", {}
    new = value if choices and isinstance(value, dict) else {key: value}
    return "ours", note, new if value != "" else {}


def _batch(
    theirs: Values, groups: int, answers: int, comments: dict[str, str]
) -> dict[str, int]:
    """Return the examples of an optimizer step, or the prompts of a rollout.

    Args:
        groups: of GPUs that share sequences.
        answers: to each prompt, which TRL's batch sizes count; 0 for a method that samples none.
    """
    factors = {name: int(theirs[name]) for name in NAMES["batch_factors"] if name in theirs}
    examples = math.prod(factors.values()) * groups
    product = " x ".join(f"{name} {value}" for name, value in factors.items())
    comment = f"  # {product} x {groups} GPUs (those that share a sequence count once)"
    if "global_batch_size" in theirs:
        examples, comment = int(theirs["global_batch_size"]), "  # global_batch_size"
    settings = {"batch.examples": examples}
    if answers:
        parts = factors.get("gradient_accumulation_steps", 1)
        rollout = examples // parts * theirs.get("steps_per_generation", parts)
        rollout = theirs.get("generation_batch_size", rollout)
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
    match = re.search(rf"^[^#\n]*\b{last}[\"']? *:", text, re.M)
    line = f"line {text.count(chr(10), 0, match.end()) + 1}: " if match else ""
    return f"{line}{name} = {' '.join(str(value).split())} has no counterpart here; {reason}"


def _system(theirs: Values) -> str:
    """Tell whose settings these are, "" if nothing says it; ConfigError for those that are not translated."""
    for name, marks in NAMES["not_translated"].items():
        if marked := sorted(theirs.keys() & marks):
            raise ConfigError(
                f"{marked[0]} is a setting of {name}, whose files are not translated; start from configs/"
            )
    return next((name for name, marks in NAMES["marks"].items() if theirs.keys() & marks), "")


def _complete(
    theirs: Values, system: str, folder: Path
) -> tuple[Values, str, set[str], dict[str, str]]:
    """Add what other files say and what their trainer takes where the file says nothing; remove what is void.

    Returns the settings, the method, which says more than our stage, the names in the file, and those that are void,
    with the reason.
    """
    deepspeed = theirs.get("deepspeed")  # a file, or what would stand in it
    if (file := existing_path(str(deepspeed), folder)).is_file():
        deepspeed = json.loads(file.read_text())
    if isinstance(deepspeed, dict):
        theirs |= {"deepspeed": None, "deepspeed_json": deepspeed}
    system = system or "trl"
    theirs = _flat(theirs, system)
    for name, stage in NAMES["implied"].items():
        if theirs.get(name):
            theirs.setdefault("stage", stage)
    written, void = {*theirs}, {}
    defaults = NAMES["defaults"]
    method = str(theirs.get("rl", theirs.get("stage", defaults[system].get("stage", ""))))
    for table in (f"{system}_{method}", method, system):
        theirs = defaults.get(table, {}) | theirs
    if "reward_funcs" in theirs:
        theirs["reward_funcs"] = _weighted_rewards(theirs)
    theirs.setdefault("lora_alpha", 2 * theirs.get("lora_rank", 8))
    for rule in NAMES["replaces"]:
        value = str(theirs.get(rule["name"], 0)).lower()
        if value in rule["when"] if "when" in rule else value not in rule["unless"]:
            why = f"it does nothing beside {rule['name']}"
            void |= dict.fromkeys(written & {*rule["names"]}, why)
            theirs = {name: theirs[name] for name in theirs if name not in rule["names"]}
    theirs["adam_beta1"] = [theirs["adam_beta1"], theirs.pop("adam_beta2")]
    _gather_data(theirs)
    _describe_data(theirs, folder)
    return theirs, method, written, void


def _flat(theirs: Values, system: str) -> Values:
    """Return the settings under their dotted names of today, without those that ask for nothing."""
    # axolotl's table for GRPO holds TRL's names; keys of TOML have these letters only
    dropped = re.compile(r"^trl\.|[^\w.-]", re.A)
    settings = {}
    for name, value in flat(theirs).items():
        settings[dropped.sub("", NAMES["older"].get(name, name))] = _plain(value)
    for name, meant in NAMES["null"].get(system, {}).items():
        if settings.get(name, 0) is None:
            settings[name] = meant
    # "none", which is read as nothing, is a choice of scale_rewards
    return {n: v for n, v in settings.items() if v not in NOTHING or n == "scale_rewards"}


def _weighted_rewards(theirs: Values) -> Values:
    """Take the settings of rewards out, and return the weight of each reward model and reward function."""
    names = as_list(theirs["reward_funcs"])
    functions = [re.sub(r"\.(\w+)$", r":\1", name) for name in names]
    if of_trl := [name for name in functions if ":" not in name]:
        raise ConfigError(
            f"reward_funcs = {of_trl[0]} has no counterpart here; it is TRL's own function, so write module.function "
            "of yours"
        )
    rewards = as_list(theirs.pop("reward_model_name_or_path", [])) + functions
    weights = as_list(theirs.pop("reward_weights", [1.0] * len(rewards)))
    return dict(zip(rewards, weights, strict=True))


def _gather_data(theirs: Values) -> None:
    """Write TRL's one data set as `datasets`, too."""
    trained, tested = (theirs.pop(f"dataset_{part}_split", part) for part in ("train", "test"))
    if path := theirs.pop("dataset_name", None):
        source = {"path": path, "subset": theirs.pop("dataset_config", None)}
        theirs["datasets"] = source | {"split": trained}
        if theirs.get("eval_strategy"):
            theirs["test_datasets"] = source | {"split": tested}


def _describe_data(theirs: Values, folder: Path) -> None:
    """Put in place of LLaMA-Factory's names of data sets what its files say about them."""
    # they are described in dataset_info.json of this folder
    if "dataset_dir" in theirs:
        info = existing_path(f"{theirs['dataset_dir']}/dataset_info.json", folder)
        described = json.loads(info.read_text(encoding="utf-8")) if info.exists() else {}
        most = {"max_samples": theirs.pop("max_samples", None)}
        unknown = {"unknown": "dataset_info.json does not describe it, so write its path"}
        for each in described.values():
            if "file_name" in each:
                each["file_name"] = str(info.parent / each["file_name"])
        for name in theirs.keys() & {"dataset", "eval_dataset"}:
            theirs[name] = [
                most | described.get(each, {"path": each} | unknown)
                for each in _listed(theirs[name])
            ]
        if shares := theirs.get("interleave_probs"):
            pairs = zip(theirs["dataset"], map(float, _listed(shares)), strict=True)
            theirs["dataset"] = [source | {"probability": share} for source, share in pairs]
            theirs["interleave_probs"] = theirs.pop("mix_strategy", "concat")


def _kinds(theirs: Values, folder: Path) -> list[str]:
    """Return the kinds that rules may ask for: the chat template, and what the model is by its config.json or name."""
    model = next((str(theirs[name]) for name in NAMES["models"] if name in theirs), "")
    if (file := existing_path(f"{model}/config.json", folder)).is_file():
        model = str(json.loads(file.read_text()).get("model_type"))
    kinds = [
        name for name, pattern in NAMES["kinds"].items() if re.search(pattern, model, re.I)
    ]
    return [str(theirs.get("chat_template")), *kinds]


def _source(entry: Values | str, stage: str, refused: list[Refusal]) -> Values | str:
    """Turn one of their data sets, a path or a description, into ours; refuse what would change its rows."""
    source = {}
    reasons = NAMES["row_reasons"]
    for name, value in flat({"path": entry} if isinstance(entry, str) else entry).items():
        name = name.removeprefix("columns.")
        key, allowed = (
            NAMES[table].get(f"{stage}.{name}", NAMES[table].get(name))
            for table in ("sources", "rows")
        )
        for pattern, settings in NAMES["row_settings"].items():
            if re.fullmatch(pattern, f"{key or name}={value}"):
                for our_key, our_value in flat(settings).items():
                    put(source, our_key, our_value)
        choices = (f"{name}={each}" for each in as_list(value))
        refused += [(name, value, reasons[choice]) for choice in choices if choice in reasons]
        if value in NOTHING or key == f"columns.{value}" or allowed == []:
            continue
        if key == "split" and "[" in str(value):
            refused.append((name, value, "write max_examples for a part of a split"))
        elif key:
            put(source, key, value)
        elif allowed is None or _plain(value) not in allowed:
            refused.append((name, value, reasons.get(name, UNKNOWN)))
    return source["path"] if source.keys() == {"path"} else source


def existing_path(path: str, folder: Path) -> Path:
    """Return a path as it is, or as seen from `folder` or a folder above it, wherever the file exists first."""
    path, places = expanduser(path), (Path(), folder, *folder.absolute().parents)
    return next((place / path for place in places if (place / path).exists()), Path(path))


def _listed(value: object) -> list:
    """Return a list; a text is one whose entries commas separate."""
    return (
        [each.strip() for each in value.split(",")]
        if isinstance(value, str)
        else as_list(value)
    )


def _plain(value: Any) -> Any:
    """Read the numbers and switches that YAML and shells leave as text, such as 1e-5; a list of one is that value."""
    if isinstance(value, list):
        return _plain(value[0]) if len(value) == 1 else [*map(_plain, value)]
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        words = {"true": True, "false": False, "yes": True, "no": False, "none": None}
        return words.get(str(value).lower(), value)


if __name__ == "__main__":
    raise SystemExit("error: the command is: ulysses migrate")
