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
from html import escape
from os.path import expanduser
from pathlib import Path

from ulysses.cli import run_as
from ulysses.imports import explained_imports

run_as("report", __name__)

with explained_imports():
    import matplotlib
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ulysses.config.section import existing

SMOOTHED = 60  # curves of at least this many points get a running mean on top
COLUMNS = 3
TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
}
LAST = re.compile(r"grad|time/|tokens|seconds|mfu|peak_memory")  # panels, after the stage's own
# of the legend: alpha and format of grey lines
LEGEND = {"each step": (0.3, "-"), "running mean": (1, "-"), "held out": (1, "o:")}
OCTAVE = re.compile(r"nll(_se)?/\d.*")  # see stages/sft.py


def read_run(folder: Path) -> pd.DataFrame:
    """Return a run folder's metrics, a column each, by step; ValueError if it holds none.

    Incomplete lines, such as the last one of a killed run, are left out. No step is repeated: a run that continues from
    an earlier checkpoint first drops the lines of later steps.
    """
    lines = complete_lines(existing(folder) / "metrics.jsonl")
    if lines.empty:
        raise ValueError(
            f"{folder} holds no metrics.jsonl with a complete line; give the folder (run.output) of a run that has "
            "logged a step"
        )
    return lines.set_index("step").select_dtypes("number")


def complete_lines(path: Path) -> pd.DataFrame:
    """Return the objects of a run's file, of which a kill may have cut the last one short."""
    text = path.read_text() if path.is_file() else ""
    return pd.DataFrame(map(json.loads, re.findall(r'^\{"step": .*\}$', text, re.MULTILINE)))


def samples_table(folder: str) -> str:
    """Return a run's answers (run.samples) as HTML: a row for each prompt, and a column for each who answered it."""
    lines = complete_lines(Path(folder) / "samples.jsonl").drop_duplicates()
    if lines.empty:
        return ""
    cells = lines.pivot_table("answer", "prompt", "by", "\n\n".join, sort=False)
    cells = cells.fillna("").reset_index().rename_axis(columns=None)
    # str: pandas itself writes the ends of lines out, and an index takes no formatters
    shown = cells.to_html(index=False, formatters=[str] * len(cells.columns), border=0)
    return f"<div>{shown}</div>"


def series(run: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric's finite values by the steps that logged it."""
    return run.get(metric, pd.Series(dtype=float)).dropna()


def draw_curves(axis: Axes, runs: dict[str, pd.DataFrame], metric: str) -> None:
    """Draw a metric over steps: training as a line, held-out values as dots."""
    for i, (name, run) in enumerate(runs.items()):
        color, curve = f"C{i}", series(run, metric)
        noisy = len(curve) >= SMOOTHED and metric != "lr"
        axis.plot(curve, color=color, alpha=0.3 if noisy else 1)
        if noisy:
            axis.plot(curve.rolling(len(curve) // 30).mean(), color=color)
        # matplotlib drops labels that begin with _
        label, held_out = f" {name}", series(run, f"eval/{metric}")
        axis.plot(held_out, "o:", color=color, markersize=4, label=label)


def draw_octaves(axis: Axes, runs: dict[str, pd.DataFrame], octaves: Sequence[str]) -> None:
    """Draw the first (dotted) and the last evaluation's nll by position, with standard errors."""
    axis.set_xticks(range(len(octaves)), octaves)
    for i, run in enumerate(runs.values()):
        reached = [x for x, name in enumerate(octaves) if f"eval/nll/{name}" in run]
        for style, place in (("o:", 0), ("o-", -1)):
            values, errors = (
                [series(run, f"eval/{metric}/{octaves[x]}").iloc[place] for x in reached]
                for metric in ("nll", "nll_se")
            )
            axis.errorbar(reached, values, errors, fmt=style, color=f"C{i}", markersize=4)


def draw_figure(runs: dict[str, pd.DataFrame]) -> Figure:
    """Draw the metrics in TITLES, every other metric that changes, and octaves; a stage's own before the gradient's."""
    seen: dict[str, set[float]] = {}
    for run in runs.values():
        for metric in run:
            seen.setdefault(metric.removeprefix("eval/"), set()).update(series(run, metric))
    of_octaves = list(filter(OCTAVE.match, seen))
    # as they were logged, from the first to the last
    octaves = list(dict.fromkeys(metric.partition("/")[2] for metric in of_octaves))
    drawn = [m for m in seen.keys() - of_octaves if m in TITLES or len(seen[m]) > 1]
    panels = sorted(drawn, key=lambda m: (bool(LAST.match(m)), m not in TITLES, m))
    if octaves:
        panels.append("Held-out nll by position")

    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure((5.5 * COLUMNS, 0.4 + 2.8 * rows), layout="constrained")
    for place, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, COLUMNS, place)
        if panel in seen:
            draw_curves(axis, runs, panel)
            axis.set_xlabel("step")
            axis.locator_params("x", integer=True)
        else:
            draw_octaves(axis, runs, octaves)
            axis.set_xlabel("tokens before it (dotted: first evaluation, line: last)")
        axis.set_title(TITLES.get(panel, panel), fontsize=10, loc="left")
        axis.grid(alpha=0.25)
    axis = figure.axes[0]
    for label, (alpha, style) in LEGEND.items():
        axis.plot([], style, color="grey", alpha=alpha, markersize=4, label=label)
    entries = axis.get_legend_handles_labels()
    figure.legend(*entries, loc="outside upper left", ncols=4)
    return figure


def html_page(runs: dict[str, pd.DataFrame], figure: Figure) -> str:
    """Return a page with the figure as SVG and a table of each run's last values; all text is escaped."""
    last = {name: run.reset_index().ffill().iloc[-1] for name, run in runs.items()}
    table = pd.DataFrame(last).to_html(float_format="{:.7g}".format, na_rep="", border=0)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(", ".join(runs))}</title>
<style>body {{ font: 14px sans-serif }} svg {{ max-width: 100%; height: auto }} td {{ padding: 2px 12px }}
div td {{ min-width: 14em }}
th, td {{ text-align: left; vertical-align: top; white-space: pre-wrap }}</style>
</head><body>{svg[svg.index("<svg") :]}{table}{"".join(map(samples_table, runs))}</body></html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; return 2, after one sentence, where a folder holds no metrics."""
    parser = argparse.ArgumentParser(
        "python -m ulysses.report", description="Plot what runs have logged."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=lambda run: Path(expanduser(run)),
        metavar="RUN",
        help="run folder (run.output)",
    )
    folders = parser.parse_args(arguments).runs
    page, picture = folders[0] / "report.html", folders[0] / "report.png"
    style = {"text.parse_math": False, "svg.fonttype": "none"}  # names are text, not formulas
    try:
        runs = {str(folder): read_run(folder) for folder in folders}
        whole = pd.option_context("display.max_colwidth", None)
        with whole, matplotlib.rc_context(style), warnings.catch_warnings(action="ignore"):
            figure = draw_figure(runs)
            page.write_text(html_page(runs, figure), encoding="utf-8")
            figure.savefig(picture, dpi=110)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {page} and {picture}")
    return 0
