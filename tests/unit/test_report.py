"""ulysses report: metrics in any state, the page, the picture."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from tests.tiny_tokenizer import write_rows
from ulysses.report import BY_POSITION, draw_figures, main, read_run


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
    """The panels of the first screen, and those that are folded away, by their titles."""
    figures = draw_figures({folder.name: read_run(folder) for folder in folders})
    return [{axis.get_title(loc="left"): axis for axis in figure.axes} for figure in figures]


def curve(axis, number):
    return [(float(x), float(y)) for x, y in zip(*axis.lines[number].get_data(), strict=True)]


def test_rows_of_a_killed_run(tmp_path):
    """The evaluation of step 5 has a line of its own, some lines are no rows, and the last one is torn."""
    rows = "".join(f'{{"step": {s}, "loss": {10 + s}}}\n' for s in range(1, 6))
    more = '{"step": 5, "eval/loss": 7.0}\n\n[3]\n\n{}\n{"step": 6, "loss": 26.'
    loss = axes(write(tmp_path / "run", rows + more))[0]["Loss"]
    assert curve(loss, 1) == [(s, 10 + s) for s in range(1, 6)]
    assert curve(loss, 3) == [(5, 7)]


def test_values_that_are_missing_or_not_finite(tmp_path):
    """null, NaN and what is no number are left out, as is a metric at a step that did not log it."""
    huge = "1" + "0" * 400
    rows = f"""{{"step": 1, "loss": 1.0, "kl": 0.5}}
{{"step": 2, "loss": null}}
{{"step": 3, "loss": NaN, "word": "x"}}
{{"step": 3, "huge": {huge}}}
{{"step": 3, "loss": "x", "kl": [1, {{}}]}}
{{"step": "x", "loss": 1}}
{{"step": 4, "loss": 4.0, "kl": 0.75}}
"""
    first, rest = axes(write(tmp_path / "run", rows))
    assert curve(first["Loss"], 1) == [(1, 1), (4, 4)]
    assert curve(rest["kl"], 1) == [(1, 0.5), (4, 0.75)] and [*first, *rest] == ["Loss", "kl"]


SPARSE = """
{"step": 1, "loss": null}
{"step": 1}
{"step": 1, "eval/loss": null, "lr": NaN}
{"step": 1, "loss": 1, "eval/nll/0-1k": 2, "eval/nll/1k-2k": 2}
{"step": 1, "loss": 1, "eval/nll/0-1k": null, "eval/nll_se/0-1k": 1, "eval/nll/1k-2k": 2, "eval/nll_se/1k-2k": null}
"""


@pytest.mark.parametrize("line", SPARSE.strip().split("\n"))
def test_a_run_that_has_logged_next_to_nothing_has_a_report(tmp_path, line):
    """Also where what is drawn together is not all there, and where samples lack what they should say."""
    folder = write(tmp_path / "run", line + "\n")
    samples = [{"step": 1}, {"step": 1, "by": "data", "answer": [1]}, {"step": 1, "prompt": 3}]
    write_rows(folder / "samples.jsonl", samples)
    assert main([str(folder)]) == 0
    assert "<h4>3.0</h4>" in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize(
    "torn", ['"loss": tru', '"loss": ' + "[" * 100_000, '"a": 1} {"step": 2']
)
def test_a_broken_line_names_its_file(tmp_path, capsys, name, torn):
    folder = write(tmp_path / "run", training(3))
    with (folder / name).open("a") as file:
        print(f'{{"step": 4, {torn}}}', file=file)
    assert main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder / name} holds a line that is not JSON (")
    assert '): {"step": 4, "' in said and said.count("\n") == 1 and len(said) < 500


def test_runs_are_laid_over_each_other(tmp_path):
    last = {"step": 60, "eval/loss": 0.3, "eval/rewards/margins": 0.2}
    rows = [*training(60, **{"rewards/margins": 0.1}), last]
    found = axes(write(tmp_path / "first", training(40)), write(tmp_path / "second", rows))
    titles = ["Loss", "rewards/margins", "Learning rate", "Gradient norm"]
    # what never changes has no panel
    assert list(map(list, found)) == [titles, ["grad/clipped"]]
    loss = found[0]["Loss"]
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
    first, rest = axes(write(tmp_path / "long", rows), write(tmp_path / "other", training(9)))
    axis = first.pop(BY_POSITION)
    titles = [*first, *rest]
    assert not [title for title in titles if "k" in title.split("/")[-1]] and "nll" in rest
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0-1k", "1k-2k"]
    drawn = [box for box in axis.containers if not pd.isna(box[0].get_ydata()).any()]
    assert [list(box[0].get_ydata()) for box in drawn] == [[2, 3], [0, 1]]
    (bars,) = drawn[1][2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[-0.125, 0.125], [0.75, 1.25]]


def test_page_and_picture(tmp_path, capsys, monkeypatch):
    """Names that look like HTML, XML comments or formulas are only text, and the page shows every run."""
    monkeypatch.chdir(tmp_path)
    evil = "</title><script>alert('1')</script>&--><b>$\\frac$"
    names = ["<img src=x>", "$x_1$", "_third"]
    for i, name in enumerate(names):
        write(Path(name), training(5, **{evil: i, f"grad/active/{evil}": 1.0}))
    said = {"step": 0, "by": "step 0", "prompt": evil, "answer": evil}
    write_rows(Path(names[0], "samples.jsonl"), [said, said])  # a resumed run adds them again
    assert main([*names, names[0]]) == 0
    page, picture = Path(names[0], "report.html"), Path(names[0], "report.png")
    assert capsys.readouterr().out == f"wrote {page} and {picture}\n"
    text = page.read_text()
    assert not set(re.findall(r"<(\w+)", text)) & {"script", "b", "img", "link"}
    assert all(target.startswith("#") for target in re.findall(r'(?:src|href)="([^"]*)', text))
    assert text.count("<td>step 0</td>") == text.count("<h4>&lt;/title&gt;&lt;script&gt;") == 1
    figures = map(ElementTree.fromstring, re.findall(r"(?s)<svg.*?</svg>", text))
    first, rest = (
        [element.text or "" for element in svg.iter() if element.tag.endswith("text")]
        for svg in figures
    )
    assert evil in rest and [first.count(f" {name}") for name in names] == [1, 1, 1]
    # the first figure is seen at once, and the rest on demand
    assert text.index("</svg>") < text.index("<details>") < text.rindex("<svg")
    assert imread(picture).std() > 0


def test_the_first_screen_has_loss_speed_and_what_the_stage_is_judged_by(tmp_path):
    rows = [
        {"objective/kl": s, "objective/scores": s, "policy/x": s, "grad/active/x": s, "time/sampling": s}
        | {"tokens_per_second": s, "nll": s}
        for s in range(5)
    ]  # fmt: skip
    rows = [metrics | more for metrics, more in zip(training(5), rows)]
    first, rest = axes(write(tmp_path / "run", rows))
    titles = "Loss,objective/scores,objective/kl,Learning rate,Gradient norm,Tokens per second"
    assert list(first) == titles.split(",")
    assert list(rest) == ["grad/active/x", "grad/clipped", "nll", "policy/x", "time/sampling"]
    assert {axis.get_xlabel() for axis in (*first.values(), *rest.values())} == {"step"}


def test_held_out_sets_are_drawn_together(tmp_path):
    """A set that is called as another one and more keeps its own curve, and positions have no panel for each set."""
    rows = training(5)
    for s in (2, 4):
        for i, name in enumerate(("", "math/", "math/hard/")):
            for metric in ("loss", "kl", "nll/0-1k", "nll/1k-2k"):
                rows[s][f"eval/{name}{metric}"] = s + i / 4
    first, rest = axes(write(tmp_path / "run", rows))
    assert list(first) == ["Loss", BY_POSITION, "Learning rate", "Gradient norm"]
    assert list(rest) == ["grad/clipped", "kl"]
    for axis in first["Loss"], rest["kl"]:
        sets = [(2 + i / 4, 4 + i / 4, marker) for i, marker in enumerate("os^")]
        assert [(*line.get_ydata(), line.get_marker()) for line in axis.lines[-5::2]] == sets
    last = [box[0].get_ydata().tolist() for box in first[BY_POSITION].containers[3::2]]
    assert last == [[4 + i / 4] * 2 for i in range(3)]


def test_the_legend_names_runs_and_held_out_sets(tmp_path):
    run = training(70)
    run[-1] |= {"eval/loss": 1.0, "eval/math/loss": 2.0}
    (legend,) = draw_figures({"run": read_run(write(tmp_path / "run", run))})[0].legends
    lines = {line.get_label(): line for line in legend.get_lines()}
    assert list(lines) == [" run", " run eval", " run eval/math"]
    assert [line.get_linestyle() for line in lines.values()] == ["-", ":", ":"]
    said = legend.get_title().get_text()
    assert said == "pale: each step; line: running mean; dots: held out"


def test_samples_are_a_table_for_each_prompt(tmp_path):
    lines = [
        {
            "step": step,
            "by": f"step {step}",
            "prompt": f"<b>{question}\n?",
            "answer": f"{step}\n&",
        }
        for step in (0, 20)
        for question in "xy"
    ]
    folder = write(tmp_path / "run", training(3))
    write_rows(
        folder / "samples.jsonl", [*lines, *lines[2:]]
    )  # as a resumed run adds them again
    assert main([str(folder)]) == 0
    text = (folder / "report.html").read_text()
    for question in "xy":
        table = text.partition(f"<h4>&lt;b&gt;{question}\n?</h4>")[2].partition("</table>")[0]
        cells = re.findall("<td>([^<]*)</td>", table)
        assert cells == ["step 0", "0\n&amp;", "step 20", "20\n&amp;"]


def test_answers_that_a_resumed_run_gave_again_stand_for_those_of_before(tmp_path):
    """As its metrics do; a rollout has several answers to a prompt."""
    of_runs = ("a", 0, "step 0", "A"), ("a", 9, "rollout 1", "B"), ("a", 9, "rollout 1", "C"), \
        ("a", 20, "step 20", "D"), ("b", 9, "rollout 1", "E"), ("b", 9, "rollout 1", "F"), \
        ("b", 20, "step 20", "G")  # fmt: skip
    folder = write(tmp_path / "run", training(3))
    names = "run", "step", "by", "answer"
    lines = [dict(zip(names, values), prompt="?") for values in of_runs]
    write_rows(folder / "samples.jsonl", [{"step": line["step"]} | line for line in lines])
    assert main([str(folder)]) == 0
    cells = re.findall("<td>([^<]*)</td>", (folder / "report.html").read_text())
    shown = cells[cells.index("step 0") :]
    assert shown[1::2] == ["A", "E", "F", "G"]


@pytest.mark.parametrize("rows", [None, '{"step": 1, "lo'])
def test_folders_without_metrics_are_refused(tmp_path, capsys, rows):
    good, bad = write(tmp_path / "good", training(3)), tmp_path / "bad"
    write(bad, rows or [])
    assert main([str(good), str(bad)]) == 2
    sentence = f"error: {bad} holds no metrics.jsonl with a complete line; give the folder (run.output) of a run "
    assert (error := capsys.readouterr().err).startswith(sentence)
    assert error.count("\n") == 1 and not (good / "report.html").exists()
