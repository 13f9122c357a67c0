"""Fit the planner's constants to half of the measured runs and print its errors on the other half.

    python benchmarks/plan_accuracy.py [MORE.jsonl ...]
    grep -h predicted_seconds LOGS >> benchmarks/measured.jsonl            new runs join the old

Rows are what benchmarks/throughput.py prints as JSON lines; benchmarks/measured.jsonl holds those of this repository, other
files are appended to it; fit mode's (max_length.py) have no time. Rows that an older, slower engine left are to be deleted.
Rows 1, 3, 5 ... are fitted, rows 2, 4, 6 ... only predicted. The last lines are the constants for
ulysses/memory/calibration.py. A constant that the rows say nothing about stays where it started (`PRIOR`), and so do those of
what lies outside the allocator (device_gib - reserved_gib in a process that built one engine): what the driver sees beyond
includes memory that the allocator has ready and gives back when it is short, which decides nothing.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from models.arch import architecture
from ulysses.memory.calibration import PRIOR, Calibration
from ulysses.memory.case import GIB, Machine, Model, Options, Work
from ulysses.memory.plan import Prediction, level_list, predict
from ulysses.memory.tiling import TilingOptions
from ulysses.training.memory import plain_model
from ulysses.training.metrics import PEAK_FLOPS

MEASURED = Path(__file__).with_name("measured.jsonl")
MEMORY_LIMIT, TIME_LIMIT = 0.05, 0.15
NOISE = 0.03  # of a measurement, relative
WIDTHS = {
    "working": 0.05
}  # how well a constant is known beforehand, relative: these bytes are counted
WIDTH = 0.25  # the others
SPEEDS = (
    "matrices",
    "attention",
    "narrow_heads",
    "memory",
    "exchange",
    "gather",
    "layer_seconds",
    "step_seconds",
)
BYTES = ("working",)

Row = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of JSON-lines files that a step's time or memory was measured in."""
    lines = [
        line for path in paths for line in path.read_text().splitlines() if line.startswith("{")
    ]
    return [
        row
        for row in map(json.loads, lines)
        if (row.get("seconds") or row.get("peak_gib")) and row.get("gpu") in PEAK_FLOPS
    ]


def case_of(row: Row) -> tuple[Model, Machine, Work, Options]:
    """Return what the planner is asked about a row; keys that are absent mean the plain case."""
    shape = architecture(row["arch"])
    changes = {
        "num_hidden_layers": row["layers"],
        "vocab_size": row.get("vocab_size", shape.vocab_size),
    }
    if "heads" in row:  # "query/kv", of the same size as the shape's own
        changes |= zip(
            ("num_attention_heads", "num_key_value_heads"), map(int, row["heads"].split("/"))
        )
        changes["head_dim"] = shape.head_dim
    shape = type(shape).from_hf({**shape.to_hf(), **changes})
    model = plain_model(shape, adapters=row.get("adapters", 0), reward=row["stage"] == "rm")
    if "ranks" in row:  # "U x R": ranks that exchange heads, ranks that split rows
        model = model._replace(head_divisor=int(row["ranks"].split(" x ")[0]))
    machine = Machine(row["gpus"], 1 << 60, 1 << 60, peak_flops=PEAK_FLOPS[row["gpu"]])
    work = Work(row["tokens"], row["sp"], row.get("micro_batches", 1), row.get("documents", 1))
    levels = level_list(row["recompute"], model.layers)
    upper = levels.count(levels[-1]) if levels[0] != levels[-1] else 0
    tiling = TilingOptions(head_chunks=row.get("head_chunks", 1))
    options = Options(
        levels[0], levels[-1], upper, row.get("offload", 0), tiling,
        gathered_layers=row.get("gathered", 0), offload_optimizer=row.get("optimizer") == "host",
    )  # fmt: skip
    return model, machine, work, options


def predicted(row: Row, constants: Calibration) -> Prediction:
    """Predict a row with the given constants."""
    model, machine, work, options = case_of(row)
    return predict(model, machine, work, options._replace(calibration=constants))


def beside(row: Row) -> Row:
    """Return what the planner says of a measured row, to stand beside it; nothing for a device it does not know."""
    if row.get("gpu") not in PEAK_FLOPS:
        return {}
    p = predicted(row, Calibration())
    return {
        "predicted_seconds": round(p.seconds, 4), "predicted_peak_gib": round(p.allocated / GIB, 1),
        "predicted_device_gib": round(p.gpu_bytes / GIB, 1), "predicted_host_gib": round(row["gpus"] * p.host_bytes / GIB, 1),
    }  # fmt: skip


def seconds(row: Row, p: Prediction) -> tuple[float, float | None]:
    return p.seconds, row.get("seconds")


def allocated(row: Row, p: Prediction) -> tuple[float, float | None]:
    return p.allocated / GIB, row.get("peak_gib")


Measure = Callable[[Row, Prediction], tuple[float, float | None]]


def fit(
    rows: list[Row], names: tuple[str, ...], measure: Measure, start: Calibration
) -> Calibration:
    """Return `start` with `names` moved to the least squares of log(predicted / measured), held to PRIOR by its width."""
    rows = [row for row in rows if measure(row, predicted(row, start))[1] is not None]
    first = np.log([getattr(PRIOR, name) for name in names])
    widths = np.array([WIDTHS.get(name, WIDTH) for name in names])

    def constants(x: np.ndarray) -> Calibration:
        return start._replace(**dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        found = [measure(row, predicted(row, constants(x))) for row in rows]
        errors = [np.log(p / m) / NOISE for p, m in found if m is not None]
        return np.concatenate([np.array(errors), (x - first) / widths])

    x = first.copy()
    for _ in range(20):  # Gauss-Newton
        here = residuals(x)
        jacobian = np.stack(
            [(residuals(x + 1e-4 * unit) - here) / 1e-4 for unit in np.eye(len(x))], axis=1
        )
        x = x - np.linalg.lstsq(jacobian, here, rcond=None)[0]
    return constants(x)


def calibrate(rows: list[Row]) -> Calibration:
    """Fit speeds to the seconds, activations to the allocator's peaks."""
    found = PRIOR
    for names, measure in ((SPEEDS, seconds), (BYTES, allocated)):
        found = fit(rows, names, measure, found)
    return Calibration(*(float(f"{value:.3g}") for value in found))


def errors(row: Row, constants: Calibration) -> tuple[float, float]:
    """Return predicted / measured - 1 of memory and time, 0 of what was not measured."""
    p = predicted(row, constants)
    (here, there), (fast, slow) = allocated(row, p), seconds(row, p)
    return here / there - 1 if there else 0.0, fast / slow - 1 if slow else 0.0


def main() -> None:
    rows = read([MEASURED, *map(Path, sys.argv[1:])])
    constants = calibrate(rows[0::2])
    worst = {"fitted": [0.0, 0.0], "held out": [0.0, 0.0]}
    head = f"{'':<9}{'arch':<14}{'layers':>6}{'gpus':>5}{'sp':>4}{'tokens':>9} {'recompute':<28}"
    print(f"{head}{'GiB':>7}{'error':>8}{'seconds':>9}{'error':>8}")
    for number, row in enumerate(rows):
        kind = "held out" if number % 2 else "fitted"
        memory, time = errors(row, constants)
        worst[kind] = [max(worst[kind][0], abs(memory)), max(worst[kind][1], abs(time))]
        print(
            f"{kind:<9}{row['arch']:<14}{row['layers']:>6}{row['gpus']:>5}{row['sp']:>4}{row['tokens']:>9} {row['recompute']:<28}"
            f"{row.get('peak_gib') or 0:>7.1f}{memory:>+8.1%}{row.get('seconds') or 0:>9.3f}{time:>+8.1%}"
        )
    for kind, (memory, time) in worst.items():
        print(
            f"largest errors, {kind}: memory {memory:.1%} (limit {MEMORY_LIMIT:.0%}), time {time:.1%} (limit {TIME_LIMIT:.0%})"
        )
    seen = [
        row["device_gib"] - predicted(row, constants).gpu_bytes / GIB
        for row in rows
        if row.get("device_gib")
    ]
    if seen:
        print(
            f"the driver saw {min(seen):.1f} to {max(seen):.1f} GiB more than the planner counts: the allocator's cache included"
        )
    print(
        "".join(
            f"    {name}: float = {value:g}\n"
            for name, value in zip(Calibration._fields, constants, strict=True)
        ),
        end="",
    )


if __name__ == "__main__":
    main()
