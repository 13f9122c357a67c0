"""Plot what runs have logged, several runs in the same panels: `ulysses report RUN [RUN ...]`.

It reads metrics.jsonl and samples.jsonl and writes into the first run's folder report.html, a page that loads nothing
from elsewhere, and report.png, its first screen.
"""

import argparse
import io
import json
import re
import sys
import warnings
from collections.abc import Sequence
from html import escape
from itertools import chain, cycle, product
from os.path import expanduser
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ulysses.config.section import existing

Runs = dict[str, pd.DataFrame]  # by their folders
COLUMNS = 3
TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
}
MARKERS = "os^Dv*PX"
BY_POSITION = "Held-out nll by position (dotted: first evaluation, line: last)"
# The panels of the first screen, as far as a run has them; in the middle those by which its stage is judged.
OF_STAGES = "divergence accuracy margin rewards/accuracies rewards/margins objective/scores objective/kl"
FIRST = ["loss", BY_POSITION, *OF_STAGES.split(), "lr", "grad_norm", "tokens_per_second"]
OCTAVE = re.compile(r"nll(_se)?/\d.*")  # see stages/sft.py


def read_run(folder: Path) -> pd.DataFrame:
    """Return a run's metrics by step, a column for each that is a number; ValueError if there is no line.

    No step is repeated, because a run that continues a checkpoint first drops the lines of later steps.
    """
    lines = pd.DataFrame(complete_lines(existing(folder) / "metrics.jsonl"))
    if lines.empty:
        raise ValueError(
            f"{folder} holds no metrics.jsonl with a complete line; give the folder (run.output) of a run that has "
            "logged a step"
        )
    return lines[lines.map(type).eq(float)].astype(float).set_index("step")


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a run's file, their numbers as floats; ValueError if a line is broken.

    Incomplete lines, such as the last one of a killed run, are left out.
    """
    objects = []
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in re.findall(r'^\{"step": \d{1,15}\b.*\}$', text, re.MULTILINE):
        try:
            objects.append(json.loads(line, parse_int=float))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} holds a line that is not JSON ({error}): {line:.80}"
            ) from None
    return objects


def samples_tables(folder: str) -> str:
    """Return a run's answers (run.samples) as HTML: a table for each prompt, with a row for each answer.

    Where a resumed run has answered again, its answers stand for those of before.
    """
    lines = complete_lines(Path(folder) / "samples.jsonl")
    names = ["prompt", "by", "answer", "run"]
    rows = pd.DataFrame(lines, columns=names).fillna("").astype(str)
    rows = rows[rows["run"] == rows.groupby(names[:2])["run"].transform("last")]
    # str, because pandas' own formatter escapes line breaks
    style = {"index": False, "header": False, "formatters": [str, str], "border": 0}
    return "".join(
        f"<h4>{escape(prompt)}</h4>{answers[['by', 'answer']].to_html(**style)}"
        for prompt, answers in rows.drop_duplicates().groupby("prompt", sort=False)
    )


def draw_panel(
    axis: Axes, runs: Runs, metric: str, sets: dict[str, str], octaves: list[str]
) -> None:
    """Draw a metric over steps, or the nll of the first (dotted) and the last evaluation by position."""
    for (i, (name, run)), (prefix, marker) in product(enumerate(runs.items()), sets.items()):
        style = {"color": f"C{i}", "marker": marker, "markersize": 4}
        if metric == BY_POSITION:
            nll, se = (
                run.reindex(columns=[f"{prefix}{kind}/{octave}" for octave in octaves])
                for kind in ("nll", "nll_se")
            )
            axis.errorbar(octaves, nll.bfill().iloc[0], se.bfill().iloc[0], ls=":", **style)
            axis.errorbar(octaves, nll.ffill().iloc[-1], se.ffill().iloc[-1], **style)
        elif prefix + metric in run:
            curve = run[prefix + metric].dropna()
            window = 1 if marker or metric == "lr" else max(1, len(curve) // 30)
            style["ls"] = ":" if marker else "-"
            axis.plot(curve, alpha=0.3, **style)
            # with a space before it, because matplotlib drops labels that begin with _
            label = f" {name} {prefix}".rstrip(" /")
            axis.plot(curve.rolling(window).mean(), label=label, **style)
            axis.locator_params("x", integer=True)
    axis.set_xlabel("tokens before it" if metric == BY_POSITION else "step")
    axis.set_title(TITLES.get(metric, metric), fontsize=10, loc="left")
    axis.grid(alpha=0.25)


def draw_figures(runs: Runs) -> list[Figure]:
    """Draw the panels of the first screen, and in a second figure every other metric that changes."""
    logged = dict.fromkeys(chain(*runs.values()))
    named = [name.removesuffix("loss") for name in logged if re.fullmatch("eval/.+/loss", name)]
    # training, all held-out data and each named set, by the prefix of their metrics
    sets = {"": ""} | dict(zip(["eval/", *named], cycle(MARKERS)))
    prefixes = "|".join(map(re.escape, sorted(sets, reverse=True)))
    seen: dict[str, set[float]] = {"loss": set()}
    for name, run in product(logged, runs.values()):
        values = seen.setdefault(re.sub(prefixes, "", name, count=1), set())
        values.update(run.get(name, pd.Series(dtype=float)).dropna())
    of_octaves = [metric for metric in seen if OCTAVE.fullmatch(metric)]
    # they were logged from the first position to the last
    octaves = list(dict.fromkeys(metric.partition("/")[2] for metric in of_octaves))
    first = [m for m in FIRST if m in seen or (m == BY_POSITION and len(octaves) > 1)]
    rest = sorted(m for m in seen if len(seen[m]) > 1 and m not in first + of_octaves)

    figures = []
    for panels in first, rest:
        rows = -(-len(panels) // COLUMNS)
        figure = Figure((5.5 * COLUMNS, 0.4 + 2.8 * rows), layout="constrained")
        for place, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(rows, COLUMNS, place), runs, panel, sets, octaves)
        figures.append(figure)
    entries = figures[0].axes[0].get_legend_handles_labels()
    legend = "pale: each step; line: running mean; dots: held out"
    figures[0].legend(*entries, title=legend, loc="outside upper left", ncols=4)
    return figures


def html_page(runs: Runs, figures: list[Figure]) -> str:
    """Return a page with the first figure as SVG, and the rest folded away below; all text is escaped."""
    last = {name: run.reset_index().ffill().iloc[-1] for name, run in runs.items()}
    table = pd.DataFrame(last).dropna(how="all")
    drawn = []
    for figure in figures:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        drawn.append(svg[svg.index("<svg") :])
    folded = {
        "Other metrics": drawn[1],
        "Last values": table.to_html(float_format="{:.7g}".format, na_rep="", border=0),
        **{f"Samples of {name}": samples_tables(name) for name in runs},
    }
    details = "".join(
        f"<details><summary>{escape(title)}</summary>{text}</details>"
        for title, text in folded.items()
        if text
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(", ".join(runs))}</title>
<style>body {{ font: 14px sans-serif }} svg {{ max-width: 100%; height: auto }} summary {{ padding: 4px }}
td, th {{ padding: 2px 12px; text-align: left; vertical-align: top; border-top: 1px solid #ddd }}
h4, td {{ max-width: 60em; margin: 1em 12px 4px; white-space: pre-wrap }}</style>
</head><body>{drawn[0]}{details}</body></html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; return 2, after one sentence, where a folder holds no metrics."""
    parser = argparse.ArgumentParser(
        "ulysses report", description="Plot what runs have logged."
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
            figures = draw_figures(runs)
            page.write_text(html_page(runs, figures), "utf-8", "replace")
            figures[0].savefig(picture, dpi=110)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {page} and {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit("error: the command is: ulysses report")
