"""Stream the rows of all sources, and count how many were read, kept and dropped, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

from ulysses.data import DataError
from ulysses.data.read.sources import Source, read_rows, source_files

# its multiples are spread evenly modulo 1: the same share is held out of any long run of rows, and of every second one
GOLDEN_RATIO = (1 + 5**0.5) / 2
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
        dropped = sum(self.dropped.values())
        lines = [f"read {self.read} rows, kept {self.kept} examples, dropped {dropped} rows"]
        if self.shared:
            lines.append(
                f"  {self.shared / self.tokens:.1%} of the tokens are prompts that another answer has"
            )
        for title, counts in (("dropped, ", self.dropped), ("", self.notes)):
            for reason, number in Counter(counts).most_common():
                examples = ", ".join(self.examples[reason])
                more = ", ..." if number > EXAMPLES_PER_REASON else ""
                lines.append(f"  {title}{reason}: {number} ({examples}{more})")
        return "\n".join(lines)


class FoundRow(NamedTuple):
    """A row, or a part of a long document, as it was found: bytes, an object, or the error in its place.

    source: the index of its source. where: its file and number. continues: the document of the one before.
    """

    source: int
    where: str
    continues: bool
    found: Any


def locate_rows(
    sources: Sequence[Source], report: Report, share: float = 0.0, held_out: bool = False
) -> Iterator[FoundRow | None]:
    """Stream the rows of all sources in order, and count them; None stands for one that is left to the other part.

    A file that cannot be read comes as a DataError in the place of its next row.

    Args:
        share, held_out: of the rows this share is held out; whether those are wanted, or the others.
    """
    number = count()
    for index, source in enumerate(sources):
        where = source.path
        try:
            documents = groupby(read_rows(source), key=itemgetter(0))
            for where, parts in islice(documents, source.max_examples or None):
                report.read += 1
                if (next(number) * GOLDEN_RATIO % 1 < share) == held_out:
                    for place, (_, row) in enumerate(parts):
                        yield FoundRow(index, where, place > 0, row)
                else:
                    report.count("notes", "in the other part of data.eval_fraction", where)
                    yield None
        except DataError as error:
            yield FoundRow(index, where, False, error)


def note_sources(sources: Iterable[Source], report: Report) -> None:
    """Count in `report` what is not a matter of rows, so that it is told of cached tokens too."""
    for source in sources:
        if source.is_on_hub:
            note = f"data of the hub's commit {source.revision}"
            report.count("notes", note, source.path)
        for file in source_files(source)[1]:
            note = f"files left out, not data of split {source.split}"
            report.count("notes", note, str(file))
