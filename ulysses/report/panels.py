"""Decide what is plotted: which metrics make a panel, how they are scaled, smoothed and thinned out."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ulysses.report.runs import Run

TITLES = {
    "loss": "Loss", "lr": "Learning rate", "grad_norm": "Gradient norm", "grad/mean_abs": "Mean |g|",
    "tokens_per_second": "Tokens per second", "mfu": "MFU", "seconds": "Seconds per step", "peak_memory_gib": "Peak memory, GiB",
}  # fmt: skip
FIRST = ("loss", "lr", "grad_norm", "grad/mean_abs")
SPEED = ("tokens_per_second", "mfu", "seconds", "tokens", "peak_memory_gib")
POINTS = 800  # drawn per line at most
LOG_RATIO = 50  # positive values that span more than this get a logarithmic axis


Series = tuple[list[int], list[float]]  # steps and values; nan is a gap


@dataclass(frozen=True)
class Line:
    """One run's curve, as points to draw; `smooth` lies above it if it is noisy.

    bad: steps whose value was logged but was not finite. held_out: measured on held-out data.
    """

    run: int
    points: Series
    smooth: Series | None
    bad: list[int]
    held_out: bool = False


@dataclass(frozen=True)
class Panel:
    """A plot over steps, of one metric."""

    section: str
    title: str
    key: str
    lines: list[Line]
    log: bool


@dataclass(frozen=True)
class Lane:
    """When one gradient policy acted in one run: (first, last) steps, and the share of steps."""

    key: str
    run: int
    spans: list[tuple[int, int]]
    share: float


@dataclass(frozen=True)
class Report:
    """All that is shown of some runs."""

    runs: list[Run]
    panels: list[Panel]
    lanes: list[Lane]
    constants: list[tuple[str, float]]  # metrics that never changed in any run
    steps: tuple[int, int]


def build_report(runs: list[Run]) -> Report:
    """Make a panel of every metric that changes, in the order: loss, learning rate, gradients, the stage's, speed."""
    logged = {key for run in runs for row in run.rows.values() for key in row}
    acted = {
        key for run in runs for row in run.rows.values() for key, value in row.items() if value > 0
    }
    lanes = sorted(filter(_is_action, acted))
    keys = sorted({key.removeprefix("eval/") for key in logged} - set(lanes), key=_order)
    panels, constants = [], []
    for key in keys:
        training, held_out = ([run.series(name) for run in runs] for name in (key, f"eval/{key}"))
        values = {v for _, found in (*training, *held_out) for v in found}
        if key not in FIRST and len(values) == 1 and math.isfinite(min(values)):
            constants.append((key, values.pop()))
        else:
            panels.append(_panel(key, training, held_out, runs))
    all_steps = [step for run in runs for step in run.rows]
    return Report(
        runs,
        panels,
        [lane for key in lanes for lane in _lanes(key, runs)],
        constants,
        (min(all_steps), max(all_steps)),
    )


def _is_action(key: str) -> bool:
    return key.startswith("grad/") and ("/active/" in key or key.endswith(("/clipped", "/skipped")))


def _order(key: str) -> tuple[int, str]:
    if key in FIRST:
        return FIRST.index(key), key
    return (
        (4, key)
        if key.startswith("grad/")
        else (6, str(SPEED.index(key)))
        if key in SPEED
        else (5, key)
    )


def _section(key: str) -> str:
    return ("Training", "Training", "Gradients", "Gradients", "Gradients", "Stage", "Speed")[
        _order(key)[0]
    ]


def _panel(key: str, training: list[Series], held_out: list[Series], runs: Sequence[Run]) -> Panel:
    finite = [v for _, values in (*training, *held_out) for v in values if math.isfinite(v)]
    log = key != "lr" and bool(finite) and min(finite) > 0 and max(finite) > LOG_RATIO * min(finite)
    lines = []
    for run, (steps, values) in enumerate(training):
        bad = [step for step, value in zip(steps, values) if math.isnan(value)]
        if steps and key.startswith(
            "grad/"
        ):  # a policy that does not act may log nothing: no line across that time
            steps, values = (
                list(runs[run].rows),
                [row.get(key, math.nan) for row in runs[run].rows.values()],
            )
        smooth = smoothed(values, log) if key != "lr" else None
        if steps:
            lines.append(
                Line(run, thinned(steps, values), thinned(steps, smooth) if smooth else None, bad)
            )
    for run, (steps, values) in enumerate(held_out):
        if steps:
            bad = [step for step, value in zip(steps, values) if math.isnan(value)]
            lines.append(Line(run, thinned(steps, values), None, bad, held_out=True))
    return Panel(_section(key), TITLES.get(key, key), key, lines, log)


def smoothed(values: Sequence[float], log: bool = False) -> list[float] | None:
    """Return the exponential average (span: a thirtieth of the points; of logarithms if `log`), or None for a calm curve.

    A curve is noisy if its typical step from one value to the next is above 4% of its whole range.
    """
    finite = [math.log(v) if log else v for v in values if math.isfinite(v)]
    if len(finite) < 30:
        return None
    ordered, jumps = sorted(finite), [abs(b - a) for a, b in pairwise(finite)]
    spread = ordered[-1 - len(ordered) // 20] - ordered[len(ordered) // 20]
    if statistics.median(jumps) <= 0.04 * spread:
        return None
    decay, total, weight, out = 1 - 2 / (max(len(finite) / 30, 5) + 1), 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total = decay * total + (1 - decay) * (math.log(value) if log else value)
            weight = decay * weight + (1 - decay)
        average = total / weight if weight and math.isfinite(value) else math.nan
        out.append(math.exp(average) if log else average)
    return out


def thinned(steps: Sequence[int], values: Sequence[float]) -> Series:
    """Keep at most POINTS points: the lowest and highest of each run of neighbours, so that no spike is lost."""
    if len(steps) <= POINTS:
        return list(steps), list(values)
    kept: list[int] = []
    for part in range(POINTS // 2):
        places = range(part * len(steps) // (POINTS // 2), (part + 1) * len(steps) // (POINTS // 2))
        finite = [i for i in places if math.isfinite(values[i])]
        ends = (
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if finite
            else {places[0]}
        )
        kept += sorted(ends)
    return [steps[i] for i in kept], [values[i] for i in kept]


def _lanes(key: str, runs: Sequence[Run]) -> list[Lane]:
    """Merge neighbouring steps at which a policy acted."""
    lanes = []
    for index, run in enumerate(runs):
        steps, values = run.series(key)
        if not steps:
            continue
        spans: list[tuple[int, int]] = []
        before = 0.0
        for step, value in zip(steps, values):
            if value > 0:
                spans = (
                    [*spans[:-1], (spans[-1][0], step)] if before > 0 else [*spans, (step, step)]
                )
            before = value
        lanes.append(Lane(key, index, spans, sum(v > 0 for v in values) / len(values)))
    return lanes
