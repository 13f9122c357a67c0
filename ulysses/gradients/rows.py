"""Rows of matrices that are stored as flat slices.

A slice may begin and end inside a row:

    row 3            row 4            row 5            row 6
    ......[ head ][ whole row ][ whole row ][ tail ]......       one rank's slice: head + body + tail

`values` [R] hold one number per row of all parameters, laid end to end. A vector counts as a single row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientSlice:
    """Hold this rank's piece of one parameter's gradient.

    shape and numel describe the whole parameter, `grad` is the flat local slice (no padding) that edits write into,
    `start` its offset in the flattened parameter, `group` the parameter group's name, `weight` the parameter's own
    values in the same slice, or None where nobody needs them.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    grad: Tensor
    start: int = 0
    group: str = "default"
    weight: Tensor | None = None


def rows_of(entry: GradientSlice) -> int:
    return entry.shape[0] if len(entry.shape) > 1 else 1


def row_starts(entries: Sequence[GradientSlice]) -> list[int]:
    """Return [P + 1] offsets of the parameters' rows in [R]."""
    starts = [0]
    for entry in entries:
        starts.append(starts[-1] + rows_of(entry))
    return starts


def row_counts(entries: Sequence[GradientSlice], device: torch.device) -> Tensor:
    return torch.tensor([rows_of(e) for e in entries], device=device)


def _parts(entry: GradientSlice, first: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield (elements, rows in [R], row length) for the head, body and tail that exist in this slice."""
    size = entry.grad.numel()
    if not size:
        return
    length = max(entry.numel // rows_of(entry), 1)
    head = min(size, -entry.start % length)
    row = first + entry.start // length
    if head:
        yield slice(0, head), slice(row, row + 1), head
        row += 1
    whole = (size - head) // length
    if whole:
        yield slice(head, head + whole * length), slice(row, row + whole), length
        row += whole
    done = head + whole * length
    if done < size:
        yield slice(done, size), slice(row, row + 1), size - done


def row_sums(
    tensors: Sequence[Tensor], entries: Sequence[GradientSlice], *, squares: bool = False
) -> Tensor:
    """Return this rank's share of every row's sum (of squares), float64 [R], for flat tensors sliced like `entries`."""
    starts = row_starts(entries)
    device = tensors[0].device if tensors else torch.device("cpu")
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    sums = torch.zeros(starts[-1], dtype=wide, device=device)
    for tensor, entry, first in zip(tensors, entries, starts):
        for elements, rows, length in _parts(
            entry, first
        ):  # a slice has at most one part of each row
            part = tensor[elements].view(-1, length)
            if squares:
                torch.linalg.vector_norm(part, dim=1, dtype=wide, out=sums[rows])
            else:
                torch.sum(part, dim=1, dtype=wide, out=sums[rows])
    return sums.double().square_() if squares else sums.double()


def subtract_rows(entries: Sequence[GradientSlice], values: Tensor) -> None:
    """Subtract each row's value from its elements, in place."""
    for part, numbers in _with_values(entries, values):
        part.sub_(numbers)


def scale_rows(entries: Sequence[GradientSlice], values: Tensor) -> None:
    """Multiply each row's elements by its value, in place."""
    for part, numbers in _with_values(entries, values):
        part.mul_(numbers)


def _with_values(
    entries: Sequence[GradientSlice], values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every part as [rows, length] with its rows' values [rows, 1]."""
    cast = {dtype: values.to(dtype) for dtype in {e.grad.dtype for e in entries}}
    for entry, first in zip(entries, row_starts(entries)):
        for elements, rows, length in _parts(entry, first):
            yield entry.grad[elements].view(-1, length), cast[entry.grad.dtype][rows, None]
