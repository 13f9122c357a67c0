"""python -m ulysses.report: metrics in any state, the page, the picture."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.tiny_tokenizer import write_rows
from ulysses.report import draw_figure, main, read_run


def write(folder, rows):
    """A run folder, whose rows are objects or text as it stands in the file."""
    folder.mkdir(exist_ok=True)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def training(steps, **more):
    never_change = {"constant": 1.0, "grad/skipped": 0.0, **more}
    return [
        {"step": s, "loss": 3 / s + 0.1, "lr": 1e-3 / s, "grad_norm": 1 + s % 3, "grad/clipped": s % 4 // 3}
        | never_change
        for s in range(1, steps + 1)
    ]  # fmt: skip


def axes(*folders):
    figure = draw_figure({folder.name: read_run(folder) for folder in folders})
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def curve(axis, number):
    return [(float(x), float(y)) for x, y in zip(*axis.lines[number].get_data(), strict=True)]


def test_rows_of_a_killed_run(tmp_path):
    """The evaluation of step 5 has a line of its own, some lines are no rows, and the last one is torn."""
    rows = "".join(f'{{"step": {s}, "loss": {10 + s}}}\n' for s in range(1, 6))
    more = '{"step": 5, "eval/loss": 7.0}\n\n[3]\n\n{}\n{"step": 6, "loss": 26.'
    loss = axes(write(tmp_path / "run", rows + more))["Loss"]
    assert curve(loss, 0) == [(s, 10 + s) for s in range(1, 6)]
    assert curve(loss, 1) == [(5, 7)]


def test_values_that_are_missing_or_not_finite(tmp_path):
    """null and NaN are left out, as is a metric at a step that did not log it."""
    huge = "1" + "0" * 400
    rows = f"""{{"step": 1, "loss": 1.0, "kl": 0.5}}
{{"step": 2, "loss": null}}
{{"step": 3, "loss": NaN, "word": "x"}}
{{"step": 3, "huge": {huge}}}
{{"step": 4, "loss": 4.0, "kl": 0.75}}
"""
    found = axes(write(tmp_path / "run", rows))
    assert curve(found["Loss"], 0) == [(1, 1), (4, 4)]
    assert curve(found["kl"], 0) == [(1, 0.5), (4, 0.75)] and set(found) == {"Loss", "kl"}


def test_runs_are_laid_over_each_other(tmp_path):
    last = {"step": 60, "eval/loss": 0.3, "eval/rewards/margins": 0.2}
    rows = [*training(60, **{"rewards/margins": 0.1}), last]
    found = axes(write(tmp_path / "first", training(40)), write(tmp_path / "second", rows))
    titles = ["Loss", "Learning rate", "rewards/margins", "Gradient norm", "grad/clipped"]
    assert list(found) == titles  # what never changes has no panel
    loss = found["Loss"]
    lengths = {(line.get_color(), len(line.get_xdata())) for line in loss.lines}
    assert lengths >= {("C0", 40), ("C1", 60), ("C1", 1)} and loss.get_yscale() == "linear"


def test_held_out_nll_by_position_first_and_last(tmp_path):
    """A panel of its own over the octaves, whichever of them a run reached, and no panels over steps."""
    rows = """{"step": 1, "loss": 1, "eval/nll": 1, "eval/nll/0-1k": 2, "eval/nll_se/0-1k": 0.5, "eval/nll/1k-2k": 3, \
"eval/nll_se/1k-2k": 0.25}
{"step": 2, "loss": 1, "eval/nll": 0, "eval/nll/0-1k": 1, "eval/nll_se/0-1k": 0.3, "eval/nll/1k-2k": 2, \
"eval/nll_se/1k-2k": 0.25}
{"step": 3, "loss": 1, "eval/nll": -1, "eval/nll/0-1k": 0, "eval/nll_se/0-1k": 0.125, "eval/nll/1k-2k": 1, \
"eval/nll_se/1k-2k": 0.25}
"""
    found = axes(write(tmp_path / "long", rows), write(tmp_path / "other", training(9)))
    axis = found.pop("Held-out nll by position")
    assert not [title for title in found if "k" in title.split("/")[-1]] and "nll" in found
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0-1k", "1k-2k"]
    lines = [container[0] for container in axis.containers]
    assert [list(line.get_ydata()) for line in lines] == [[2, 3], [0, 1], [], []]
    (bars,) = axis.containers[1][2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[-0.125, 0.125], [0.75, 1.25]]


def test_page_and_picture(tmp_path, capsys, monkeypatch):
    """Names that look like HTML, XML comments or formulas are only text, and the page shows every run."""
    monkeypatch.chdir(tmp_path)
    evil = "</title><script>alert('1')</script>&--><b>$\\frac$"
    names = ["<img src=x>", "$x_1$", "_third"]
    for i, name in enumerate(names):
        write(Path(name), training(5, **{evil: i, f"grad/active/{evil}": 1.0}))
    assert main([*names, names[0]]) == 0
    page, picture = Path(names[0], "report.html"), Path(names[0], "report.png")
    assert capsys.readouterr().out == f"wrote {page} and {picture}\n"
    text = page.read_text()
    assert not set(re.findall(r"<(\w+)", text)) & {"script", "b", "img", "link"}
    assert all(target.startswith("#") for target in re.findall(r'(?:src|href)="([^"]*)', text))
    [well_formed] = re.findall(r"(?s)<svg.*?</svg>", text)
    svg = ElementTree.fromstring(well_formed)
    shown = [element.text or "" for element in svg.iter() if element.tag.endswith("text")]
    assert evil in shown and [shown.count(f" {name}") for name in names] == [1, 1, 1]
    assert imread(picture).std() > 0


def test_a_stages_own_metrics_come_before_the_gradients(tmp_path):
    rows = [
        {"objective/kl": s, "objective/scores": s, "rewards/accuracies": s, "grad/active/x": s, "time/sampling": s}
        for s in range(5)
    ]  # fmt: skip
    rows = [metrics | more for metrics, more in zip(training(5), rows)]
    found = axes(write(tmp_path / "run", rows))
    first = ["Loss", "Learning rate", "objective/kl", "objective/scores", "rewards/accuracies"]
    last = ["Gradient norm", "grad/active/x", "grad/clipped", "time/sampling"]
    assert list(found) == first + last
    assert {axis.get_xlabel() for axis in found.values()} == {"step"}


def test_the_legend_says_what_is_pale_and_what_is_dotted(tmp_path):
    run = read_run(write(tmp_path / "run", training(70)))
    (legend,) = draw_figure({"run": run}).legends
    lines = {line.get_label(): line for line in legend.get_lines()}
    assert list(lines) == [" run", "each step", "running mean", "held out"]
    assert lines["each step"].get_alpha() == 0.3 and lines["held out"].get_linestyle() == ":"


@pytest.mark.parametrize("rows", [None, '{"step": 1, "lo'])
def test_folders_without_metrics_are_refused(tmp_path, capsys, rows):
    good, bad = write(tmp_path / "good", training(3)), tmp_path / "bad"
    write(bad, rows or [])
    assert main([str(good), str(bad)]) == 2
    sentence = f"error: {bad} holds no metrics.jsonl with a complete line; give the folder (run.output) of a run "
    assert (error := capsys.readouterr().err).startswith(sentence)
    assert error.count("\n") == 1 and not (good / "report.html").exists()
