"""Read what runs have logged, whatever state their files are in."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = dict[
    int, dict[str, float]
]  # step -> name -> value; nan where a value was logged that is not finite


@dataclass(frozen=True)
class Run:
    """One run folder.

    name: the folder's, with as much of its path as tells it from the others. config: flat, dotted keys, {} if unknown.
    unreadable: lines that are no metrics.
    """

    name: str
    config: dict[str, Any]
    rows: Rows
    unreadable: int

    @property
    def stage(self) -> str:
        return str(self.config.get("stage", ""))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps that logged `key`, and its values."""
        found = [(step, row[key]) for step, row in self.rows.items() if key in row]
        return [step for step, _ in found], [value for _, value in found]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders; one that is named twice is read once.

    Raises ValueError naming the first folder that holds no metrics.
    """
    unique = list({folder.resolve(): None for folder in folders})
    return [
        Run(name, _config(folder), *_rows(folder)) for name, folder in zip(_names(unique), unique)
    ]


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    for length in range(1, max(len(f.parts) for f in folders)):
        names = ["/".join(f.parts[-length:]) for f in folders]
        if len(set(names)) == len(names):
            return names
    return [str(f) for f in folders]


def _rows(folder: Path) -> tuple[Rows, int]:
    """Rows by step, and how many lines could not be read.

    A run that went on from an earlier checkpoint repeats steps: what it overtook is dropped. Several lines of one step
    (training, then evaluation) are one row, in which the later value counts.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the folder of a run (run.output)")
    rows: Rows = {}
    last, unreadable = -1, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _row(line)
        if row is None:
            unreadable += bool(line.strip())
            continue
        step, values = row
        if step < last:
            rows = {s: kept for s, kept in rows.items() if s < step}
        rows.setdefault(step, {}).update(values)
        last = step
    if not rows:
        raise ValueError(f"{path} holds no complete line yet; wait until the run has logged a step")
    return rows, unreadable


def _row(line: str) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of a line; None for the torn last line of a killed run, and for anything else that is no row."""
    try:
        content = json.loads(line)
        step = int(content.pop("step"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    values = {}
    for key, value in content.items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            finite = (
                value is not None and abs(value) < 1e300
            )  # also keeps integers that no float can hold out
            values[key] = float(value) if finite else math.nan
    return step, values


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text())
        return _flat(content) if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {prefix + key: value}
        )
    return found


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, each with its value in every run."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "run.output")
    rows = [
        (key, [json.dumps(run.config[key]) if key in run.config else "" for run in runs])
        for key in keys
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
