"""The tests; tests/README.md says what each folder proves."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rows_of(table: str) -> list[list[str]]:
    """Cut a table into its rows and their columns, which => divides; a backslash joins a line and the next one."""
    lines = table.replace("\\\n", "").strip("\n").splitlines()
    return [[*map(str.strip, line.split("=>"))] for line in lines]
