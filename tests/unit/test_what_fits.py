"""The table of what fits is the planner's own, and README's are its columns without host memory."""

from pathlib import Path

import pytest

from benchmarks.what_fits import page

ROOT = Path(__file__).resolve().parents[2]


def rows(text: str) -> dict[str, list[str]]:
    """Cells by first cell, of all Markdown tables; of equal names the cells lie end to end."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(name.lower().replace(" ", "-"), []).extend(cells)
    return found


def test_the_document_is_what_the_program_prints() -> None:
    assert (ROOT / "docs/what-fits.md").read_text() == page(), "the planner changed: python benchmarks/what_fits.py > docs/what-fits.md"


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readmes_repeat_the_document(name: str) -> None:
    text = (ROOT / name).read_text()
    start = text.index("1 x 24 GiB |")
    table = rows(text[start : text.index("\n\n", start)])
    document = rows((ROOT / "docs/what-fits.md").read_text())
    assert len(table) == 8
    for model, cells in table.items():
        alone = document[model.replace("llama-", "llama")][::2]  # full fine-tuning, then adapters
        assert cells == [f"{a} / {b}" for a, b in zip(alone[:5], alone[5:])], model
