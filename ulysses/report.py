"""Plot what runs have logged, several runs in the same panels: `python -m ulysses.report RUN [RUN ...]`.

It reads metrics.jsonl and writes report.png and report.html, a page that loads nothing from elsewhere, into the first
run's folder.
"""

import argparse
import io
import json
import math
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

SMOOTHED = 60  # curves of at least this many points get a running mean on top
LOG_RATIO = 50  # positive values that span more than this get a logarithmic axis
COLUMNS = 3
TABLE = ("loss", "eval/loss", "grad_norm", "lr", "tokens_per_second")  # last values in the table


@dataclass(frozen=True)
class Run:
    """One run: its name, its stage, and its metrics by step; nan stands for a value that was not finite."""

    name: str
    stage: str
    rows: dict[int, dict[str, float]]

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that logged a metric, and its values."""
        found = [(step, row[metric]) for step, row in self.rows.items() if metric in row]
        steps, values = np.array(found).reshape(-1, 2).T
        return steps, values


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder; ValueError if it holds no metrics.

    A run that continued from an earlier checkpoint repeats steps: the later ones count. Incomplete lines, such as the
    last one of a killed run, are left out.
    """
    path, rows, last = folder / "metrics.jsonl", {}, -1
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the folder of a run (run.output)")
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            content = json.loads(line, parse_int=float)
            step = int(content.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        content = {key: math.nan if value is None else value for key, value in content.items()}
        row = {key: value for key, value in content.items() if isinstance(value, float)}
        if step < last:
            rows = {earlier: kept for earlier, kept in rows.items() if earlier < step}
        rows[step] = rows.get(step, {}) | row
        last = step
    if not rows:
        raise ValueError(f"{path} holds no complete line; wait until the run has logged a step")
    stage = ""
    with suppress(OSError, ValueError, TypeError, KeyError):
        stage = str(json.loads((folder / "config.json").read_text())["stage"])
    return Run(name, stage, rows)


def draw_curves(axis: Axes, runs: Sequence[Run], metrics: Sequence[str]) -> None:
    """Draw metrics over steps: training as a line, held-out values as dots, a dotted line where one was not finite."""
    drawn = []
    for (i, run), (j, metric) in product(enumerate(runs), enumerate(metrics)):
        steps, values = run.series(metric)
        held_out_steps, held_out = run.series(f"eval/{metric}")
        finite, color, style = np.isfinite(values), f"C{i}", ("-", "--", "-.", ":")[j % 4]
        noisy = finite.sum() >= SMOOTHED and metric != "lr"
        marker = "." if len(steps) == 1 else ""
        axis.plot(steps, values, style + marker, color=color, alpha=0.3 if noisy else 1)
        if noisy:
            width = int(finite.sum()) // 30
            means = np.convolve(values[finite], np.full(width, 1 / width), "valid")
            axis.plot(steps[finite][width - 1 :], means, style, color=color)
        axis.plot(held_out_steps, held_out, "o:", color=color, markersize=4)
        for step in steps[~finite]:
            axis.axvline(step, color=color, linestyle=":")
        drawn += [*values[finite], *held_out[np.isfinite(held_out)]]
    if "lr" not in metrics and drawn and 0 < LOG_RATIO * min(drawn) < max(drawn):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")


def draw_actions(axis: Axes, runs: Sequence[Run], metrics: Sequence[str]) -> None:
    """Mark the steps at which gradient policies acted: a row for each metric and run, with the share of steps."""
    labels = []
    for place, (metric, (i, run)) in enumerate(product(metrics, enumerate(runs))):
        steps, values = run.series(metric)
        acted = steps[values > 0]
        axis.plot(acted, np.full(len(acted), place), "|", color=f"C{i}")
        labels.append(f"{metric.removeprefix('grad/')} {len(acted) / len(run.rows):.0%}")
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.set_ylim(len(labels) - 0.5, -0.5)


# title, the metrics that are shown together (a regular expression), how they are drawn
PANELS = (
    ("Loss", "loss", draw_curves),
    ("Learning rate", "lr", draw_curves),
    ("Gradient norm", "grad_norm", draw_curves),
    ("When gradient policies acted", "grad/(.*/)?(active/.*|clipped|skipped)", draw_actions),
)


def draw_figure(runs: Sequence[Run]) -> Figure:
    """Draw PANELS, and a panel for every other metric that changes."""
    values: dict[str, set[float]] = {}
    for key, value in (item for run in runs for row in run.rows.values() for item in row.items()):
        values.setdefault(key.removeprefix("eval/"), set()).add(value)
    panels, shown = [], set()
    for title, pattern, draw in PANELS:
        if metrics := [metric for metric in sorted(values) if re.fullmatch(pattern, metric)]:
            panels.append((title, metrics, draw))
            shown.update(metrics)
    changing = (metric for metric in sorted(values) if len(values[metric]) > 1)
    panels += [(metric, [metric], draw_curves) for metric in changing if metric not in shown]
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure((5.5 * COLUMNS, 0.4 + 2.8 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).flat
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, metrics, draw) in zip(axes, panels):
        draw(axis, runs, metrics)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.25)
    lines = [Line2D([], [], color=f"C{i}", linewidth=3) for i in range(len(runs))]
    # matplotlib drops names that begin with _
    names = [f" {run.name} ({run.stage})" for run in runs]
    figure.legend(lines, names, loc="outside upper left", ncols=4)
    return figure


def html_page(runs: Sequence[Run], figure: Figure) -> str:
    """Return a page with the figure as SVG and a table of where each run stands; all text is escaped."""
    rows = [["run", "stage", "last step", *TABLE]]
    for run in runs:
        found = [values[np.isfinite(values)] for _, values in map(run.series, TABLE)]
        numbers = [f"{values[-1]:.6g}" if len(values) else "" for values in found]
        rows.append([run.name, run.stage, str(max(run.rows)), *numbers])
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(", ".join(run.name for run in runs))}</title>
<style>body {{ font: 14px sans-serif }} svg {{ max-width: 100%; height: auto }} td {{ padding: 2px 12px }}</style>
</head><body><table>{table}</table>{svg[svg.index("<svg") :]}</body></html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; return 2, after one sentence, where a folder holds no metrics."""
    parser = argparse.ArgumentParser(
        "python -m ulysses.report", description="Plot what runs have logged."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (run.output)")
    parser.add_argument(
        "--output", type=Path, help="folder of both files (default: the first run's)"
    )
    given = parser.parse_args(arguments)
    folders = list(dict.fromkeys(folder.resolve() for folder in given.runs))
    output = given.output or folders[0]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    style = {"text.parse_math": False, "svg.fonttype": "none"}  # names are text, not formulas
    try:
        runs = [read_run(folder, name) for folder, name in zip(folders, names)]
        with matplotlib.rc_context(style), warnings.catch_warnings(action="ignore"):
            figure = draw_figure(runs)
            output.mkdir(parents=True, exist_ok=True)
            (output / "report.html").write_text(html_page(runs, figure), encoding="utf-8")
            figure.savefig(output / "report.png", dpi=110)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output / 'report.html'} and {output / 'report.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
