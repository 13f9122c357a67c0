"""python -m ulysses.report: metrics in any state, the page, the picture."""

import json
import math
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ulysses.report.__main__ import main
from ulysses.report.page import LIGHT, html_page
from ulysses.report.panels import POINTS, Report, build_report, smoothed, thinned
from ulysses.report.runs import differences, read_runs
from ulysses.report.scale import number, scale_of


def write(folder: Path, rows: list[dict[str, Any] | str], config: dict[str, Any] | None = None) -> Path:
    """A run folder; rows that are texts are written as they are, without a line end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def training(steps: int = 40, **more: Any) -> list[dict[str, Any] | str]:
    rows: list[dict[str, Any] | str] = []
    for step in range(1, steps + 1):
        noise = 0.2 * math.sin(37.0 * step)
        rows.append({"step": step, "loss": 3 / step + 0.1, "lr": 1e-3 / step, "grad_norm": 1 + noise, "tokens_per_second": 100.0,
                     "grad/clipped": float(noise > 0.1), "grad/skipped": 0.0, **more})  # fmt: skip
    return rows


def report_of(*folders: Path) -> Report:
    return build_report(read_runs(folders))


def panel(report: Report, key: str) -> Any:
    (found,) = [p for p in report.panels if p.key == key]
    return found


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    return main()


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_rows_of_a_resumed_and_killed_run(tmp_path: Path) -> None:
    """Steps 4 and 5 were trained twice; step 6 belongs to the first attempt only; the last line is torn."""
    rows = [{"step": s, "loss": 10.0 + s} for s in range(1, 7)] + [{"step": s, "loss": 20.0 + s} for s in (4, 5)]
    run = read_runs([write(tmp_path / "run", [*rows, {"step": 5, "eval/loss": 7.0}, '{"step": 6, "loss": 26.', "\n[3]\n", "\n"])])[0]
    assert run.series("loss") == ([1, 2, 3, 4, 5], [11, 12, 13, 24, 25])
    assert run.series("eval/loss") == ([5], [7.0]) and run.unreadable == 2
    assert "run: 2 lines could not be read and left out." in html_page(build_report([run]))


def test_values_that_are_missing_or_not_finite(tmp_path: Path) -> None:
    """null and NaN are gaps that are marked; a metric that was not logged at a step is no gap, but for gradient policies."""
    rows: list[Any] = [{"step": s, "loss": float(s)} for s in range(1, 9)]
    rows[2]["loss"] = None
    rows[4] = '{"step": 5, "loss": NaN, "huge": 1' + "0" * 400 + ', "word": "x", "yes": true}\n'
    rows[0]["kl"] = rows[7]["kl"] = 0.5
    rows[7]["kl"] = 0.75
    rows[0]["grad/noise_sigma"], rows[7]["grad/noise_sigma"] = 1.0, 2.0
    report = report_of(write(tmp_path / "run", rows))
    (loss,) = panel(report, "loss").lines
    assert loss.bad == [3, 5] and [math.isnan(v) for v in loss.points[1]] == [s in (3, 5) for s in range(1, 9)]
    assert panel(report, "kl").lines[0].points == ([1, 8], [0.5, 0.75])
    assert sum(map(math.isnan, panel(report, "grad/noise_sigma").lines[0].points[1])) == 6
    assert {p.key for p in report.panels} == {"loss", "kl", "grad/noise_sigma", "huge"}
    paths = [e.get("d", "") for e in drawings(html_page(report))[1].iter() if e.get("class") == "line"]
    assert paths[0].count("M") == 2 and paths[0].count("L") == 3  # 1-2, the lonely 4, 6-7-8
    assert paths[1].count("l6 6") == 2 and "nan" not in html_page(report)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    evil = '</title><script>alert("1")</script>&'
    folder = write(tmp_path / "<img src=x onerror=alert(1)>$a_", training(5, **{evil: 1.0, f"grad/active/{evil}": 1.0}),
                   {"stage": "<b>sft</b>", "model": {"path": evil}})  # fmt: skip
    rows = training(5, **{evil: 2.0, f"grad/active/{evil}": 0.0})
    other = write(tmp_path / "other", rows, {"stage": "sft", "model": {"path": "x"}})
    page = html_page(report_of(folder, other))
    elements: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = parser.handle_startendtag = lambda tag, attributes: elements.append((tag, dict(attributes)))  # type: ignore
    parser.feed(page)
    assert {tag for tag, _ in elements} == set(
        "html head meta link title style body div span small svg g path rect text p h1 h2 table tr th td figure figcaption".split()
    )
    names = {name for _, attributes in elements for name in attributes}
    assert names <= set("lang charset name content http-equiv rel href class style viewbox role aria-label d x y width height "
                        "text-anchor".split())  # fmt: skip
    assert [a["href"] for _, a in elements if "href" in a] == ["data:,"] and "url(" not in page and "@import" not in page
    assert "&lt;script&gt;" in page and "&lt;b&gt;sft" in page and "&lt;img" in page and "default-src 'none'" in page
    assert len(drawings(page)) > 4  # well-formed


def test_runs_are_overlaid_with_a_legend(tmp_path: Path) -> None:
    first = write(tmp_path / "a/run", training(40), {"stage": "sft", "gradients": {"preset": "default"}, "run": {"output": "x"}})
    rows = [*training(60, **{"rewards/margins": 0.1}), {"step": 60, "eval/loss": 0.3, "eval/rewards/margins": 0.2}]
    second = write(tmp_path / "b/run", rows, {"stage": "dpo", "gradients": {"preset": "steady"}, "run": {"output": "y"}})
    report = report_of(first, second, first)
    assert [run.name for run in report.runs] == ["a/run", "b/run"] and report.steps == (1, 60)
    assert [(line.run, line.held_out) for line in panel(report, "loss").lines] == [(0, False), (1, False), (1, True)]
    assert [line.run for line in panel(report, "rewards/margins").lines] == [1, 1]
    assert differences(report.runs) == [("stage", ['"sft"', '"dpo"']), ("gradients.preset", ['"default"', '"steady"'])]
    assert report.constants == [("grad/skipped", 0.0), ("tokens_per_second", 100.0)]
    page = html_page(report)
    assert "different stages" in page and "Mean |g| was not logged" in page and "a/run <small>sft" in page
    assert "prefers-color-scheme: dark" in page
    loss = drawings(page)[2]
    titles = [e.text for e in loss.iter() if e.tag == "title"]
    assert titles == ["a/run", "b/run", "b/run"]
    short, long = (e.get("d", "") for e in loss.iter() if e.get("class") == "line")
    xs = [[float(x) for x in re.findall(r"[ML]([\d.]+)", d)] for d in (short, long)]
    assert len(xs[0]) == 40 and len(xs[1]) == 60 and xs[0] == pytest.approx(xs[1][:40]) and xs[1][-1] == pytest.approx(552)
    ys = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", long)]
    assert ys == sorted(ys)  # the loss falls, so the curve goes down the page
    clipped = next(lane for lane in report.lanes if lane.key == "grad/clipped" and lane.run == 0)
    acted = [row["step"] for row in training(40) if isinstance(row, dict) and row["grad/clipped"]]
    assert clipped.share == len(acted) / 40 and sorted(s for a, b in clipped.spans for s in range(a, b + 1)) == acted


def test_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "run", [{"step": 1, "loss": 2.0, "lr": 0.0}])
    assert run_main(monkeypatch, folder) == 0
    page = (folder / "report.html").read_text()
    assert page.count("<circle") == 2 and "nan" not in page and (folder / "report.png").stat().st_size > 5000


def test_picture_shows_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread

    names = ["_run", "$x_1$", "third"]
    folders = [write(tmp_path / n, training(40 - 10 * i, **{"$\\frac$": i + 0.1})) for i, n in enumerate(names)]
    folders[2].joinpath("metrics.jsonl").write_text('{"step": 3, "loss": null, "kl": 1}\n{"step": 9, "loss": 0.5, "kl": 2}\n')
    assert run_main(monkeypatch, *folders, "--output", tmp_path / "out") == 0
    assert capsys.readouterr().out.count("wrote ") == 2
    content = (tmp_path / "out/report.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 1200 and height > 800
    pixels = (imread(tmp_path / "out/report.png")[..., :3] * 255).round().astype(int)
    for color in LIGHT[:3]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - wanted).max(axis=-1) <= 2).sum() > 50
    assert (abs(pixels - [int(LIGHT[3][i : i + 2], 16) for i in (1, 3, 5)]).max(axis=-1) <= 2).sum() == 0


def test_without_matplotlib_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write(tmp_path / "run", training(5))
    assert run_main(monkeypatch, folder) == 0
    assert "no picture: matplotlib" in (out := capsys.readouterr().out) and "pip install matplotlib" in out
    assert (folder / "report.html").exists() and not (folder / "report.png").exists()


@pytest.mark.parametrize(("rows", "sentence"), [
    (None, "holds no metrics.jsonl; give the folder of a run"),
    ([], "holds no complete line yet"),
    (['{"step": 1, "lo'], "holds no complete line yet"),
])  # fmt: skip
def test_folders_without_metrics_are_refused(tmp_path: Path, monkeypatch: Any, capsys: Any, rows: Any, sentence: str) -> None:
    good, bad = write(tmp_path / "good", training(3)), tmp_path / "bad"
    bad.mkdir() if rows is None else write(bad, rows)
    assert run_main(monkeypatch, good, bad, "--output", tmp_path / "out") == 2
    assert (error := capsys.readouterr().err).startswith("error: ") and str(bad) in error and sentence in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_noise_is_smoothed_and_calm_curves_are_not() -> None:
    noisy = [2.0 + math.sin(97.0 * i) for i in range(300)]
    smooth = smoothed(noisy)
    assert smooth is not None and max(abs(v - 2) for v in smooth[50:]) < 0.5
    assert smoothed([math.exp(-i / 50) for i in range(300)]) is None and smoothed(noisy[:20]) is None
    spiky = smoothed([math.nan if i == 7 else 10.0 ** math.sin(97.0 * i) for i in range(300)], log=True)
    assert spiky is not None and math.isnan(spiky[7]) and all(0.5 < v < 2 for v in spiky[50:])


def test_thinning_keeps_spikes_and_gaps() -> None:
    values = [float(i % 10) for i in range(20_000)]
    values[12_345], values[777] = 1e6, -1e6
    values[5000:6000] = [math.nan] * 1000
    steps, kept = thinned(range(1, 20_001), values)
    assert len(steps) <= POINTS and steps == sorted(steps) and {1e6, -1e6} <= set(kept) and any(map(math.isnan, kept))
    assert kept[steps.index(12_346)] == 1e6
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_scales() -> None:
    linear = scale_of([0.0, math.nan, 10.0], 100, 0)
    assert linear.at(linear.low) == 100 and linear.at(linear.high) == 0 and linear.at(5.0) == pytest.approx(50)
    assert [t for _, t in linear.ticks] == ["0", "2.5", "5", "7.5", "10"]
    log = scale_of([1e-4, 1.0], 0, 100, log=True)
    assert log.at(1e-2) == pytest.approx(50) and [t for _, t in log.ticks] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert [v for v, _ in scale_of([1, 7], 0, 1, whole=True).ticks] == [2, 4, 6]
    assert scale_of([3.0], 0, 1).at(3.0) == pytest.approx(0.5) and scale_of([], 0, 1).ticks
    assert [number(v) for v in (0, 1234.5678, 25_000, 3e9, 0.00002, -1.5)] == ["0", "1235", "25,000", "3e9", "2e-5", "-1.5"]
