"""Count what happens to the rows: how many were read, kept and dropped, and why."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ulysses.data.read.sources import Source, source_files

Event = tuple[str, str, str]  # the arguments of Report.count
EXAMPLES_PER_REASON = 5


@dataclass
class Report:
    """Counts of what happened to the rows, with examples that name file and row; vars() of it is JSON data."""

    read: int = 0
    kept: int = 0
    tokens: int = 0
    shared: int = 0  # of the tokens: prompts that a further answer does not repeat
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, what: str, where: str) -> None:
        """Count a row in `dropped` or `notes`."""
        counts: dict[str, int] = getattr(self, name)
        counts[what] = counts.get(what, 0) + 1
        if counts[what] <= EXAMPLES_PER_REASON:
            self.examples.setdefault(what, []).append(where)

    def __str__(self) -> str:
        lines = [
            f"read {self.read} rows, kept {self.kept} examples, dropped {sum(self.dropped.values())} rows"
        ]
        if self.shared:
            lines.append(
                f"  {self.shared / self.tokens:.1%} of the tokens are prompts that another answer has"
            )
        for title, counts in (("dropped, ", self.dropped), ("", self.notes)):
            for reason, count in Counter(counts).most_common():
                examples = ", ".join(self.examples[reason])
                more = ", ..." if count > EXAMPLES_PER_REASON else ""
                lines.append(f"  {title}{reason}: {count} ({examples}{more})")
        return "\n".join(lines)


def note_sources(sources: Iterable[Source], report: Report) -> None:
    """Count in `report` what is not a matter of rows, so that it is told of cached tokens too."""
    for source in sources:
        if source.is_on_hub:
            note = f"data of the hub's commit {source.revision}"
            report.count("notes", note, source.path)
        else:
            note = f"files left out, not data of split {source.split}"
            for file in source_files(source)[1]:
                report.count("notes", note, str(file))
