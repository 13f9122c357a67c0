"""Pack sequences end to end and give each sequence-parallel rank its shard.

    sequences        a a a a a | b b b | c c c c c c            N = 3
    packed           a a a a a   b b b   c c c c c c  . .       T tokens, with a tail that makes T divisible by sp
    cu_seqlens       0           5       8            14  16    global: it describes the pack, never a shard
    sp rank 0, 1     a a a a a   b b b | c c c c c c  . .       S = T / sp tokens each

Targets are shifted before the pack is cut, so no label is lost at the edge of a shard; the last token of a sequence
has no target. The tail has its own cu_seqlens entry and weight 0. Where ranks split query rows the shards are not
contiguous (layout.py); positions, targets and columns travel with their tokens.

Letters: T packed tokens, S tokens on this rank, N sequences, L tokens of one sequence.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import (
    AttentionPlan,
    Range,
    packed_plan,
    row_sets,
    shard_ranges,
    sum_levels,
    to_device,
)
from .mesh import ParallelMesh

IGNORE = -100


@dataclass(frozen=True)
class Sequence:
    """One tokenised sequence; its arrays may be memory-mapped and are read slice by slice.

    tokens [L] integers. loss_weights [L] numbers: entry t is the weight of token t as a target; entry 0 never counts.
    token_columns {name: [L]}: row i belongs to the prediction that position i makes of token i + 1.
    columns {name: number}: values of the whole sequence. Raises ValueError if lengths differ.
    """

    tokens: Any
    loss_weights: Any
    token_columns: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) == 0:
            raise ValueError("a sequence has no tokens; drop it before packing")
        for name, values in {"loss_weights": self.loss_weights, **self.token_columns}.items():
            if len(values) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(self.tokens)} tokens; give one per token"
                )


@dataclass
class ShardedBatch:
    """What one sequence-parallel rank works on; all tensors are on its device.

    tokens, targets, positions, sequence_ids [S] int64; the tail has the sequence id N. loss_weights [S] float32; a
    target is -100 exactly where its weight is 0. is_last [S] marks the last token of each sequence.
    cu_seqlens [N + 1] int32 describes the whole pack, with one more entry if there is a tail.
    num_sequences is N; num_tokens counts the whole pack without its tail; num_valid counts this rank's targets of
    nonzero weight, which are at valid_index [num_valid].
    attention_plan and sum_levels are the index plans of attention and of sums over sequences (layout.py).
    """

    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    positions: Tensor
    sequence_ids: Tensor
    is_last: Tensor
    cu_seqlens: Tensor
    token_columns: dict[str, Tensor]
    sequence_columns: dict[str, Tensor]
    num_sequences: int
    num_tokens: int
    num_valid: int
    valid_index: Tensor
    mesh: ParallelMesh
    attention_plan: AttentionPlan
    sum_levels: tuple[Tensor, ...]


def pack_shard(
    sequences: list[Sequence], mesh: ParallelMesh, device: torch.device | str = "cpu"
) -> ShardedBatch:
    """Pack the sequences and return this rank's shard, reading only its own slices of their arrays.

    There is no communication: every rank of the group is given the same sequences. An empty list gives a batch of sp
    tokens with weight 0, for a rank that has run out of data. Raises ValueError if sequences have different columns,
    weights that are not finite, or too many tokens for int32.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    sp, num_sequences, num_tokens = mesh.sequence_parallel_size, len(lengths), sum(lengths)
    total = max(1, -(-num_tokens // sp)) * sp
    if total >= 2**31:
        raise ValueError(
            f"a pack of {total} tokens does not fit int32 cu_seqlens; pack fewer tokens"
        )
    tail = [total - num_tokens] if total > num_tokens else []
    cu = torch.tensor([0, *lengths, *tail]).cumsum(0)
    sets = row_sets(cu, mesh.row_parallel_size, mesh.head_parallel_size)
    ranges = shard_ranges(sets, mesh.sp_rank, mesh.head_parallel_size)
    rows = _read_rows(sequences, cu, ranges)
    indices = torch.cat([torch.arange(a, b) for a, b in ranges])
    ids = torch.bucketize(indices, cu[1:], right=True)
    positions = indices - cu[ids]
    is_last = (positions + 1 == cu.diff()[ids]) & (ids < num_sequences)
    valid = torch.nonzero(rows.loss_weights).squeeze(1)
    columns = {
        name: torch.tensor([sequence.columns[name] for sequence in sequences])
        for name in (sorted(sequences[0].columns) if sequences else ())
    }
    return ShardedBatch(
        tokens=to_device(rows.tokens, device),
        targets=to_device(rows.targets, device),
        loss_weights=to_device(rows.loss_weights, device),
        positions=to_device(positions, device),
        sequence_ids=to_device(ids, device),
        is_last=to_device(is_last, device),
        cu_seqlens=to_device(cu.int(), device),
        token_columns={name: to_device(column, device) for name, column in rows.columns.items()},
        sequence_columns={name: to_device(column, device) for name, column in columns.items()},
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_valid=valid.numel(),
        valid_index=to_device(valid, device),
        mesh=mesh,
        attention_plan=packed_plan(cu, sets, mesh, device),
        sum_levels=sum_levels(ids, num_sequences, device),
    )


class _Rows(NamedTuple):
    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    columns: dict[str, Tensor]


def _read_rows(sequences: list[Sequence], cu: Tensor, ranges: list[Range]) -> _Rows:
    """Read packed ranges out of the sequences; what comes after the sequences is the tail."""
    _check_columns(sequences)
    pieces = _pieces(len(sequences), cu, ranges)
    tokens, targets = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    weights = [torch.zeros(0)]
    columns: dict[str, list[Tensor]] = {name: [] for s in sequences[:1] for name in s.token_columns}
    # A rank that holds nothing but tail reads no row, but learns the columns' dtypes.
    for i, low, high in pieces or [(0, 0, 0)] * bool(sequences):
        sequence = sequences[i]
        # one token more than the piece: the target of its last position, unless the sequence ends there
        piece = _read(sequence.tokens, low, high + 1).long()
        weight = _read(sequence.loss_weights, low + 1, high + 1).float()
        missing = (0, high - low - weight.numel())
        tokens.append(piece[: high - low])
        targets.append(F.pad(piece[1:], missing))
        weights.append(F.pad(weight, missing))
        for name, parts in columns.items():
            values = sequence.token_columns[name]
            parts.append(_read(values, low, max(high, low + 1))[: high - low])
    tail = (0, sum(b - a for a, b in ranges) - sum(high - low for _, low, high in pieces))
    weights_read = F.pad(torch.cat(weights), tail)
    if not bool(torch.isfinite(weights_read).all()):
        raise ValueError(
            "loss_weights has a value that is not finite; give a number, or 0 to ignore a target"
        )
    return _Rows(
        tokens=F.pad(torch.cat(tokens), tail),
        targets=F.pad(torch.cat(targets), tail).masked_fill_(weights_read == 0, IGNORE),
        loss_weights=weights_read,
        columns={name: F.pad(torch.cat(parts), tail) for name, parts in columns.items()},
    )


def _pieces(num_sequences: int, cu: Tensor, ranges: list[Range]) -> list[tuple[int, int, int]]:
    """Cut packed ranges at the sequences' ends: (sequence, first token in it, token after the last) for each piece."""
    starts, pieces = cu.tolist(), []
    for a, b in ranges:
        index = int(torch.searchsorted(cu, a, right=True)) - 1
        while index < num_sequences and starts[index] < b:
            start, stop = starts[index : index + 2]
            pieces.append((index, max(a, start) - start, min(b, stop) - start))
            index += 1
    return pieces


def _read(values: Any, start: int, stop: int) -> Tensor:
    piece = values[start:stop]
    # memory-mapped arrays are read-only, so their values are copied
    return piece if isinstance(piece, Tensor) else torch.tensor(piece)


def _check_columns(sequences: list[Sequence]) -> None:
    for index, sequence in enumerate(sequences):
        for kind in ("columns", "token_columns"):
            found, first = (sorted(getattr(s, kind)) for s in (sequence, sequences[0]))
            if found != first:
                raise ValueError(
                    f"sequence {index} has {kind} {found} and the first one {first}; "
                    "give all sequences the same columns"
                )
