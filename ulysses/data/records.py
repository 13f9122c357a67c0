"""What every data format becomes: messages, records, and the report of what was read, dropped and truncated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("text", "sequence", "pair", "unpaired", "prompt")
EXAMPLES_PER_REASON = 5


class DataError(ValueError):
    """Data that cannot be used: one sentence naming the file and the row."""


class BadRowError(ValueError):
    """A row that breaks its format (a missing key, a wrong type); the reader adds file and row."""


class DropRowError(ValueError):
    """A well-formed row that cannot be trained on (an empty answer, equal answers); counted and left out."""


@dataclass(frozen=True)
class Message:
    """One turn; `weight` is its weight in the loss (None: 1 for the assistant, 0 for everyone else)."""

    role: str  # system, user, assistant or tool
    content: str
    weight: float | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.content.strip() and not self.tool_calls


@dataclass(frozen=True)
class Record:
    """One training example before tokenisation.

    `answers` holds one list of messages (sequence, unpaired), two (pair: chosen, rejected) or none (prompt); only their
    assistant messages are trained. A text record is a document, or a part of one: parts share file and row.
    """

    file: str
    row: int
    prompt: tuple[Message, ...] = ()
    answers: tuple[tuple[Message, ...], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    columns: Mapping[str, float] = field(default_factory=dict)
    raw: Mapping[str, Any] | None = None
    source: int = 0

    @property
    def where(self) -> str:
        return f"{self.file} row {self.row}"


@dataclass
class Report:
    """Counts of what happened to the rows, with examples that name file and row; vars() of it is JSON data."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    duplicates: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dropped, self.notes = Counter(self.dropped), Counter(self.notes)

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self._example(reason, where)

    def truncate(self, where: str) -> None:
        self.truncated += 1
        self._example("truncated", where)

    def note(self, what: str, where: str) -> None:
        self.notes[what] += 1
        self._example(what, where)

    def _example(self, reason: str, where: str) -> None:
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            shown.append(where)

    def __str__(self) -> str:
        lines = [
            f"read {self.read} rows, kept {self.kept} examples ({self.duplicates} of them duplicates), "
            f"truncated {self.truncated}, dropped {sum(self.dropped.values())}"
        ]
        counts = [
            (f"dropped, {reason}", reason, count) for reason, count in self.dropped.most_common()
        ]
        counts += [("truncated", "truncated", self.truncated)] if self.truncated else []
        counts += [(what, what, count) for what, count in self.notes.most_common()]
        for title, key, count in counts:
            shown = self.examples.get(key, [])
            more = ", ..." if count > len(shown) else ""
            files: dict[str, list[str]] = {}
            for where in shown:
                file, row = where.rsplit(" row ", 1)
                files.setdefault(file, []).append(row)
            places = "; ".join(f"{file} row {', '.join(rows)}" for file, rows in files.items())
            lines.append(f"  {title}: {count} ({places}{more})")
        return "\n".join(lines)
