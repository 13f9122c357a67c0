"""The same plots as one PNG, by matplotlib."""

import math
from pathlib import Path
from typing import Any

from ulysses.report.page import LIGHT
from ulysses.report.panels import Line, Panel, Report

DPI, WIDE, HIGH, LANE = 110, 6.0, 2.5, 0.2  # of a plot with its margins, and of a strip, in inches
LEFT, RIGHT, TOP, BOTTOM, NAMES = (
    0.65,
    0.15,
    0.3,
    0.3,
    2.9,
)  # margins of a plot; of the strips' names
NAMES_IN_A_ROW = 4  # of the legend


def write_picture(report: Report, path: Path) -> None:
    """Draw all panels into a PNG.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    columns = min(len(report.panels), 2 if len(report.panels) <= 8 else 3)
    wide, lanes = WIDE * columns, TOP + BOTTOM + LANE * len(report.lanes) if report.lanes else 0.0
    head = 0.2 + 0.2 * math.ceil(len(report.runs) / NAMES_IN_A_ROW)
    high = head + HIGH * math.ceil(len(report.panels) / columns) + lanes
    figure = Figure((wide, high), dpi=DPI)

    def axis(left: float, top: float, width: float, height: float) -> Any:
        return figure.add_axes(
            (left / wide, 1 - (top + height) / high, width / wide, height / high)
        )

    for i, panel in enumerate(report.panels):
        row, column = divmod(i, columns)
        place = axis(
            LEFT + WIDE * column, head + TOP + HIGH * row, WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM
        )
        _draw(place, panel, report)
    if report.lanes:
        _draw_lanes(
            axis(NAMES, high - lanes + TOP, wide - NAMES - RIGHT, lanes - TOP - BOTTOM), report
        )
    _legend(figure, report)
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
        axis.plot(
            steps,
            values,
            marker="o",
            markersize=3.5,
            linewidth=0.9,
            clip_on=False,
            **style | {"linestyle": ":"},
        )
    else:
        axis.plot(
            steps,
            values,
            linewidth=0.8 if line.smooth else 1.3,
            alpha=0.3 if line.smooth else 1,
            **style,
        )
        lonely = [
            i
            for i, v in enumerate(values)
            if all(map(math.isnan, [*values[max(i - 1, 0) : i], *values[i + 1 : i + 2]])) and v == v
        ]
        axis.plot(
            [steps[i] for i in lonely],
            [values[i] for i in lonely],
            "o",
            markersize=3,
            clip_on=False,
            color=style["color"],
        )
    if line.smooth:
        axis.plot(*line.smooth, linewidth=1.4, **style)
    if line.bad:
        axis.plot(
            line.bad,
            [0.97] * len(line.bad),
            "x",
            markersize=5,
            color=style["color"],
            transform=axis.get_xaxis_transform(),
        )


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
    labels = [f"{run.name} ({run.stage})" if run.stage else run.name for run in report.runs]
    labels = [
        "\u200a" + label if label.startswith("_") else label for label in labels
    ]  # matplotlib drops labels that begin so
    legend = figure.legend(
        handles, labels, loc="upper left", ncols=NAMES_IN_A_ROW, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
