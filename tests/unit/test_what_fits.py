"""The table of what fits is the planner's own."""

from pathlib import Path

from benchmarks.what_fits import page

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/what-fits.md"


def test_the_document_is_what_the_program_prints() -> None:
    assert DOCUMENT.read_text() == page(), "the planner changed: python benchmarks/what_fits.py > docs/what-fits.md"
