"""The same plots as one PNG, by matplotlib."""

import math
from pathlib import Path
from typing import Any

from ulysses.report.page import LIGHT
from ulysses.report.panels import Line, Panel, Report

DPI, WIDE, HIGH = 110, 6.0, 2.5  # of one plot, inches


def write_picture(report: Report, path: Path) -> None:
    """Draw all panels into a PNG.

    Raises:
        ImportError: where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    count = len(report.panels)
    columns = min(count, 2 if count <= 8 else 3)
    rows = -(-count // columns)
    heights = [HIGH * rows + 0.4, 0.7 + 0.2 * len(report.lanes)][: 1 + bool(report.lanes)]
    figure = Figure((WIDE * columns, sum(heights)), dpi=DPI, layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flatten().tolist()
    axes = parts[0].subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel, axis in zip(report.panels, axes):
        _draw(axis, panel, report)
    for left_over in axes[count:]:
        left_over.remove()
    if report.lanes:
        _draw_lanes(parts[1].subplots(), report)
    _legend(parts[0], report)
    figure.savefig(path, format="png")


def _style(run: int) -> dict[str, Any]:
    return {"color": LIGHT[run % len(LIGHT)], "linestyle": "-" if run < len(LIGHT) else "--"}


def _draw(axis: Any, panel: Panel, report: Report) -> None:
    for line in panel.lines:
        _draw_line(axis, line)
    if panel.log:
        axis.set_yscale("log")
    _frame(axis, panel.title, report)


def _draw_line(axis: Any, line: Line) -> None:
    style, (steps, values) = _style(line.run), line.points
    if line.held_out:
        axis.plot(steps, values, marker="o", markersize=3.5, linewidth=0.9, clip_on=False, **style | {"linestyle": ":"})
    else:
        axis.plot(steps, values, linewidth=0.8 if line.smooth else 1.3, alpha=0.3 if line.smooth else 1, **style)
        lonely = [i for i, v in enumerate(values) if all(map(math.isnan, [*values[max(i - 1, 0) : i], *values[i + 1 : i + 2]])) and v == v]
        axis.plot([steps[i] for i in lonely], [values[i] for i in lonely], "o", markersize=3, clip_on=False, color=style["color"])
    if line.smooth:
        axis.plot(*line.smooth, linewidth=1.4, **style)
    if line.bad:
        axis.plot(line.bad, [0.97] * len(line.bad), "x", markersize=5, color=style["color"], transform=axis.get_xaxis_transform())


def _draw_lanes(axis: Any, report: Report) -> None:
    labels = []
    for place, lane in enumerate(report.lanes):
        bars = [(a - 0.5, b - a + 1) for a, b in lane.spans]
        axis.broken_barh(bars, (place - 0.4, 0.8), color=LIGHT[lane.run % len(LIGHT)])
        labels.append(f"{lane.key.removeprefix('grad/')} {lane.share:.0%}")
    axis.set_yticks(range(len(labels)), labels, parse_math=False)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    _frame(axis, "When gradient policies acted", report)


def _frame(axis: Any, title: str, report: Report) -> None:
    low, high = report.steps
    axis.set_xlim((low, high) if low < high else (low - 0.5, high + 0.5))
    axis.set_title(title, fontsize=9.5, loc="left", fontweight="bold", parse_math=False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=7.5)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, report: Report) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=2.5, **_style(i)) for i in range(len(report.runs))]
    # matplotlib leaves out labels that begin with an underscore
    labels = [f"\u200a{run.name}  {run.stage}" if run.name.startswith("_") else f"{run.name}  {run.stage}" for run in report.runs]
    legend = figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 4), frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
