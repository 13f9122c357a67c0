"""One self-contained HTML page: inline SVG and CSS, no script, nothing fetched. Every text is escaped."""

import math
import statistics
from html import escape

from ulysses.report.panels import FIRST, Line, Panel, Report, Series
from ulysses.report.runs import Run, differences
from ulysses.report.scale import Scale, number, scale_of

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 230, 58, 8, 10, 22
LANE = 11  # height of one run's strip
LIGHT = ("#0068b5", "#d1500a", "#00855f", "#a8428d", "#96700a", "#4c5ec9", "#b3263a", "#55626f")
DARK = ("#5db0f5", "#ff8f57", "#3ecfa3", "#e58fd0", "#e3b94a", "#9aa8ff", "#ff7f8e", "#b3c0cc")
STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --faint: #667; --grid: #e3e6ea; --card: #f7f8fa; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e6e9ed; --faint: #98a2ad; --grid: #2b3138; --card: #1b1f25; DARK } }
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 1240px; padding: 16px 20px 40px }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 15px; margin: 28px 0 8px; color: var(--faint); font-weight: 600 }
.legend { position: sticky; top: 0; background: var(--paper); padding: 8px 0; display: flex; flex-wrap: wrap; gap: 4px 20px }
.legend span { display: inline-flex; align-items: center; gap: 6px } .legend svg { width: 26px; height: 10px }
.note, small { color: var(--faint); font-weight: normal }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px }
figure { margin: 0; background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 8px 10px 4px }
figcaption { font-weight: 600; display: flex; justify-content: space-between; gap: 12px; overflow-wrap: anywhere }
.wide { grid-column: 1 / -1; overflow-x: auto } .wide > svg { min-width: 760px }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--faint); font: 11px system-ui, sans-serif }
.grid { stroke: var(--grid); fill: none } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.raw { opacity: .28; stroke-width: 1 } .held { stroke-width: 1.2; stroke-dasharray: 2 3 } .empty { fill: var(--grid); opacity: .6 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top }
th:first-child, td:first-child { text-align: left } th { color: var(--faint); font-weight: 600 }
"""


def html_page(report: Report) -> str:
    """Return the page."""
    runs, notes = report.runs, []
    title = ", ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
    if len({run.stage for run in runs if run.stage}) > 1:
        notes.append("These runs are of different stages: their losses are different quantities.")
    notes += [
        f"{run.name}: {_lines(run.unreadable)} could not be read and left out."
        for run in runs
        if run.unreadable
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(" ".join(notes))}</p>' if notes else "",
        _legend(report),
        _summary(runs),
    ]
    for section in ("Training", "Gradients", "Stage", "Speed"):
        panels = [panel for panel in report.panels if panel.section == section]
        figures = [_figure(panel, report) for panel in panels]
        if section == "Gradients" and report.lanes:
            figures.insert(sum(panel.key in FIRST for panel in panels), _lanes_figure(report))
        if figures:
            body.append(f'<h2>{section}</h2><div class="plots">{"".join(figures)}</div>')
        if section == "Gradients" and not any(
            panel.key == "grad/mean_abs" for panel in report.panels
        ):
            body.append(
                '<p class="note">Mean |g| was not logged; --debug and gradient policies that look at it log it.</p>'
            )
    if report.constants:
        text = ", ".join(f"{key} = {number(value)}" for key, value in report.constants)
        body.append(f'<h2>Never changed</h2><p class="note">{escape(text)}</p>')
    if len(runs) > 1 and (rows := differences(runs)):
        head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
        cells = "".join(_row([key, *values]) for key, values in rows)
        body.append(
            f'<h2>Settings that differ</h2><div class="scroll"><table><tr><th>key</th>{head}</tr>{cells}</table></div>'
        )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _style() -> str:
    light, dark = (
        "".join(f"--c{i}: {c}; " for i, c in enumerate(colors)) for colors in (LIGHT, DARK)
    )
    return STYLE.replace("LIGHT", light).replace("DARK", dark)


def _color(run: int) -> str:
    return f"var(--c{run % len(LIGHT)})"


def _dashes(run: int) -> str:
    """Runs beyond the eighth repeat the colours in dashes."""
    return f' stroke-dasharray="{6 + 4 * (run // len(LIGHT))} 4"' if run >= len(LIGHT) else ""


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


def _row(cells: list[str]) -> str:
    return (
        "<tr>"
        + "".join(
            f"<td>{escape(cell if len(cell) <= 160 else cell[:157] + '...')}</td>" for cell in cells
        )
        + "</tr>"
    )


def _legend(report: Report) -> str:
    items = []
    for i, run in enumerate(report.runs):
        sample = f'<svg viewBox="0 0 26 10"><path class="line" d="M0 5H26" style="stroke:{_color(i)};stroke-width:3"{_dashes(i)}/></svg>'
        items.append(f"<span>{sample}{escape(run.name)} <small>{escape(run.stage)}</small></span>")
    lines = [line for panel in report.panels for line in panel.lines]
    notes = [text for text, there in (
        ("dots: held-out data", any(line.held_out for line in lines)), ("bold: smoothed", any(line.smooth for line in lines)),
        ("\u2715: not finite", any(line.bad for line in lines)),
    ) if there]  # fmt: skip
    return f'<div class="legend">{"".join(items)}<small>{escape(", ".join(notes))}</small></div>'


def _summary(runs: list[Run]) -> str:
    """A table: how far each run came and where it stands."""
    rows = []
    for run in runs:
        losses = [v for v in run.series("loss")[1] if math.isfinite(v)]
        held_out = [(v, s) for s, v in zip(*run.series("eval/loss")) if math.isfinite(v)]
        speed = [v for v in run.series("tokens_per_second")[1] if math.isfinite(v)]
        skipped = [v for v in run.series("grad/skipped")[1] if math.isfinite(v)]
        tail = losses[-max(1, len(losses) // 20) :]
        best = min(held_out, default=None)
        rows.append(_row([
            run.name, run.stage, f"{max(run.rows):,}", number(statistics.mean(tail)) if tail else "",
            number(held_out[-1][0]) if held_out else "", f"{number(best[0])} at {best[1]:,}" if best else "",
            f"{statistics.median(speed):,.0f}" if speed else "", f"{sum(skipped):,.0f}" if skipped else "",
        ]))  # fmt: skip
    head = (
        "run",
        "stage",
        "last step",
        "loss (last 5%)",
        "held-out loss",
        "best held-out",
        "tokens/s (median)",
        "steps skipped",
    )
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{"".join(rows)}</table></div>'


def _figure(panel: Panel, report: Report) -> str:
    x = _x_scale(report, WIDTH)
    y = scale_of(
        [v for line in panel.lines for v in line.points[1]], HEIGHT - BOTTOM, TOP, log=panel.log
    )
    drawn = "".join(_line(line, x, y, report.runs[line.run].name) for line in panel.lines)
    grid = "".join(
        f'<path class="grid" d="M{LEFT} {y.at(v):.1f}H{x.end}"/><text x="{LEFT - 6}" y="{y.at(v) + 4:.1f}" text-anchor="end">{text}</text>'
        for v, text in y.ticks
    )
    small = [panel.key] * (panel.key != panel.title) + ["logarithmic"] * panel.log
    return _card(panel.title, ", ".join(small), grid + _x_axis(x, HEIGHT) + drawn, WIDTH, HEIGHT)


def _card(title: str, small: str, content: str, width: int, height: int) -> str:
    return (
        f"<figure{' class=wide' if width > WIDTH else ''}><figcaption>{escape(title)}<small>{escape(small)}</small></figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{content}</svg></figure>'
    )


def _x_scale(report: Report, width: int) -> Scale:
    return scale_of(report.steps, LEFT, width - RIGHT, whole=True)


def _x_axis(x: Scale, height: int) -> str:
    places = [(x.at(value), text) for value, text in x.ticks]
    return "".join(
        f'<text x="{at:.1f}" y="{height - 6}" text-anchor="{"end" if at > x.end - 20 else "middle"}">{text}</text>'
        for at, text in places
    )


def _line(line: Line, x: Scale, y: Scale, name: str) -> str:
    """One curve: a path over each stretch without gaps, dots for lonely points, crosses for what was not finite."""
    color, dashes = f'style="stroke:{_color(line.run)}"', _dashes(line.run)
    kind = "line held" if line.held_out else "line raw" if line.smooth else "line"
    path, dots = _path(line.points, x, y, dots=line.held_out)
    out = [
        f"<g><title>{escape(name)}</title>",
        f'<path class="{kind}" d="{path}" {color}{dashes}/>' if path else "",
    ]
    if dots:
        out.append(f'<g style="fill:{_color(line.run)}">{dots}</g>')
    if line.smooth:
        out.append(f'<path class="line" d="{_path(line.smooth, x, y)[0]}" {color}{dashes}/>')
    crosses = "".join(f"M{x.at(s) - 3:.1f} {TOP - 3}l6 6m0 -6l-6 6" for s in line.bad[:400])
    out.append(f'<path class="line" d="{crosses}" {color}/>' if crosses else "")
    return "".join(out) + "</g>"


def _path(points: Series, x: Scale, y: Scale, *, dots: bool = False) -> tuple[str, str]:
    pieces, lonely = [], []
    values = [math.nan, *points[1], math.nan]
    for i, (step, value) in enumerate(zip(*points)):
        if not math.isfinite(value):
            continue
        place = f"{x.at(step):.1f} {y.at(value):.1f}"
        starts, ends = not math.isfinite(values[i]), not math.isfinite(values[i + 2])
        if not (starts and ends):
            pieces.append(("M" if starts else "L") + place)
        if dots or (starts and ends):
            lonely.append(f'<circle cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" r="2.4"/>')
    return "".join(pieces), "".join(lonely)


def _lanes_figure(report: Report) -> str:
    """When gradient policies acted: a strip for each key and run."""
    x, out, top, key = _x_scale(report, 2 * WIDTH), [], 0, ""
    for lane in report.lanes:
        if lane.key != key:
            key, top = lane.key, top + 20
            out.append(f'<text x="{LEFT}" y="{top - 4}">{escape(key)}</text>')
        bars = "".join(
            f"M{x.at(a):.1f} {top}h{max(x.at(b) - x.at(a), 1):.1f}v{LANE}H{x.at(a):.1f}z"
            for a, b in lane.spans
        )
        run = report.runs[lane.run]
        left, right = x.at(min(run.rows)), x.at(max(run.rows))
        out.append(
            f"<g><title>{escape(run.name)}</title>"
            f'<rect class="empty" x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{LANE}"/>'
            f'<path d="{bars}" style="fill:{_color(lane.run)}"/>'
            f'<text x="{LEFT - 6}" y="{top + LANE - 1}" text-anchor="end">{lane.share:.0%}</text></g>'
        )
        top += LANE + 3
    height = top + BOTTOM
    return _card(
        "When gradient policies acted",
        "share of steps",
        "".join(out) + _x_axis(x, height),
        2 * WIDTH,
        height,
    )
