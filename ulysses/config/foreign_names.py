"""What an unknown setting may mean: another trainer's name for one of ours, or a misspelling.

The names are in foreign_names.toml, which the migration (ulysses/migrate.py) reads too.
"""

import difflib
import tomllib
from functools import cache
from pathlib import Path

from ulysses.config.section import Values


@cache
def foreign_names() -> Values:
    """Read the table: names of other trainers' settings, and what to do about each."""
    names = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    rules = names["ours"].items()
    names["ours"] = {n: rule if isinstance(rule, dict) else {"key": rule} for n, rule in rules}
    kinds = ("ours", "not_needed", "by_hand", "not_supported")
    names["rules"] = {
        name: (kind, rule) for kind in kinds for name, rule in names[kind].items()
    }
    return names


def explain_unknown(key: str, keys: list[str]) -> str:
    """Return one sentence about an unknown setting: what it is called here, or why it is not there.

    Args:
        keys: all of our settings.
    """
    names, last = foreign_names(), key.rpartition(".")[2]
    for name in (key, last):
        kind, rule = names["rules"].get(name, ("", {}))
        if kind == "ours":
            note = f" ({rule['note']})" if "note" in rule else ""
            end = rule["key"].removeprefix("STAGE")
            ours = " or ".join(ours for ours in keys if ours.endswith(end))
            return f"{key}: unknown; here it is {ours}{note}"
        if kind == "not_needed":
            return f"{key}: not needed here ({rule}); leave it out"
        if kind:
            return f"{key}: not supported; {rule}"
    same_name = [ours for ours in keys if ours.endswith(f".{last}")]
    if near := same_name or difflib.get_close_matches(key, keys, 1, 0.8):
        return f"{key}: unknown; did you mean {' or '.join(near)}?"
    return f"{key}: unknown; ulysses train --help lists the settings"
