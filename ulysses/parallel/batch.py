"""Pack sequences, and give each sequence-parallel rank its shard.

    sequences        a a a a a | b b b | c c c c c c            N = 3
    packed           a a a a a   b b b   c c c c c c  . .       T tokens, then a tail that makes T divisible by sp
    cu_seqlens       0           5       8            14  16    global: it describes the pack, never a shard
    sp rank 0, 1     a a a a a   b b b | c c c c c c  . .       S = T / sp tokens each

Targets are shifted before the pack is cut, so no label is lost at a shard's edge; the last token of a sequence has no
target. The tail has its own cu_seqlens entry and weight 0. With row-parallel ranks the shards are not contiguous
(layout.py); positions, targets and columns travel with their tokens.

Letters: T packed tokens, S tokens on this rank, N sequences, L tokens of one sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .device import to_device
from .layout import Range, padded_total, row_sets, shard_ranges
from .mesh import ParallelMesh
from .plan import AttentionPlan, packed_plan
from .sums import SegmentIndex, segment_index

IGNORE = -100


@dataclass(frozen=True)
class Sequence:
    """Describe one tokenised sequence; arrays may be memory-mapped and are read slice by slice.

    tokens [L] integers. loss_weights [L], float or uint8, in token coordinates: the weight of token t as a target;
    element 0 never counts. token_columns {name: [L]} in prediction coordinates: row i belongs to the prediction that
    position i makes of token i + 1. columns {name: number} of the whole sequence. Raises ValueError if lengths differ.
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


@dataclass(frozen=True)
class PackedBatch:
    """Hold sequences end to end, with targets shifted (host tensors).

    tokens, targets, positions [T] int64; loss_weights [T] float32; cu_seqlens [N + 1] int32; token_columns {name: [T]};
    sequence_columns {name: [N]}. A target is -100 exactly where its weight is 0; violations raise ValueError.
    """

    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    sequence_columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = self.tokens.numel()
        for name in ("tokens", "targets", "loss_weights", "positions"):
            value, dtype = (
                getattr(self, name),
                torch.float32 if name == "loss_weights" else torch.int64,
            )
            if value.shape != (total,) or value.dtype != dtype:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)} and {value.dtype}; it must be [{total}] and {dtype}"
                )
        cu = self.cu_seqlens
        if (
            cu.dtype != torch.int32
            or cu.dim() != 1
            or cu.numel() < 1
            or int(cu[0]) != 0
            or int(cu[-1]) != total
        ):
            raise ValueError(f"cu_seqlens must be int32 and run from 0 to the {total} tokens")
        if cu.numel() > 1 and int((cu[1:] - cu[:-1]).min()) < 1:
            raise ValueError(
                "cu_seqlens must increase: a sequence has no tokens; drop it before packing"
            )
        _check_weights(self.targets, self.loss_weights)
        for name, column in self.token_columns.items():
            if column.shape[:1] != (total,):
                raise ValueError(
                    f"token column {name!r} has {column.shape[0]} rows; give one per token, {total}"
                )
        for name, column in self.sequence_columns.items():
            if column.shape[:1] != (self.num_sequences,):
                raise ValueError(
                    f"sequence column {name!r} has {column.shape[0]} rows; it must have one per sequence, "
                    f"{self.num_sequences}"
                )

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def total(self) -> int:
        return self.tokens.numel()

    @classmethod
    def pack(cls, sequences: list[Sequence]) -> "PackedBatch":
        """Lay sequences end to end and shift their targets."""
        cu = _cumulative(len(s.tokens) for s in sequences)
        rows = _read_rows(sequences, cu, [(0, int(cu[-1]))])
        return cls(
            tokens=rows.tokens,
            targets=rows.targets,
            loss_weights=rows.loss_weights,
            positions=_positions(torch.arange(int(cu[-1])), cu),
            cu_seqlens=cu.int(),
            token_columns=rows.columns,
            sequence_columns=_sequence_columns(sequences),
        )


@dataclass
class ShardedBatch:
    """Hold what one sequence-parallel rank works on (tensors on its device).

    tokens, targets, positions [S] int64, loss_weights [S] float32; sequence_ids [S] int64, num_sequences for the tail;
    cu_seqlens int32 of the whole pack, tail included; indices [S] int64, the packed index of each local token;
    num_valid local targets of nonzero weight, at valid_index [num_valid]; num_tokens counts the pack without its tail,
    total with it.
    """

    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    positions: Tensor
    sequence_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    token_columns: dict[str, Tensor]
    sequence_columns: dict[str, Tensor]
    num_sequences: int
    num_tokens: int
    num_valid: int
    valid_index: Tensor
    indices: Tensor
    total: int
    mesh: ParallelMesh
    attention_plan: AttentionPlan
    segments: SegmentIndex


@dataclass
class _Rows:
    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    columns: dict[str, Tensor]


def shard(
    batch: PackedBatch, mesh: ParallelMesh, device: torch.device | str = "cpu"
) -> ShardedBatch:
    """Take this rank's tokens of a packed batch and move them to its device. No communication."""
    cu = batch.cu_seqlens.long()

    def read(ranges: list[Range]) -> _Rows:
        tail = sum(b - a for a, b in ranges) - sum(
            max(0, min(b, batch.total) - a) for a, b in ranges
        )

        def take(values: Tensor, fill: float) -> Tensor:
            parts = [values[a : min(b, batch.total)] for a, b in ranges if a < batch.total]
            return torch.cat([*parts, values.new_full((tail, *values.shape[1:]), fill)])

        return _Rows(
            tokens=take(batch.tokens, 0),
            targets=take(batch.targets, IGNORE),
            loss_weights=take(batch.loss_weights, 0),
            columns={name: take(column, 0) for name, column in batch.token_columns.items()},
        )

    return _assemble(cu, read, batch.sequence_columns, mesh, device)


def pack_shard(
    sequences: list[Sequence], mesh: ParallelMesh, device: torch.device | str = "cpu"
) -> ShardedBatch:
    """Equal `shard(PackedBatch.pack(sequences), mesh, device)`, but read only this rank's slices of the arrays.

    No sequences give a batch of sp tokens with weight 0, for a rank short of data.
    """
    cu = _cumulative(len(s.tokens) for s in sequences)
    return _assemble(
        cu,
        lambda ranges: _read_rows(sequences, cu, ranges),
        _sequence_columns(sequences),
        mesh,
        device,
    )


def _assemble(
    cu: Tensor, read: Any, columns: dict[str, Tensor], mesh: ParallelMesh, device: Any
) -> ShardedBatch:
    num_sequences, num_tokens = cu.numel() - 1, int(cu[-1])
    total = padded_total(num_tokens, mesh.sequence_parallel_size)
    if total >= 2**31:
        raise ValueError(
            f"a pack of {total} tokens does not fit int32 cu_seqlens; pack fewer tokens"
        )
    if total > num_tokens:
        cu = torch.cat([cu, cu.new_tensor([total])])
    sets = row_sets(cu, mesh.row_parallel_size, mesh.head_parallel_size)
    ranges = shard_ranges(sets, mesh.sp_rank, mesh.head_parallel_size)
    rows = read(ranges)
    indices = torch.cat([torch.arange(a, b) for a, b in ranges])
    ids = torch.bucketize(indices, cu[1:], right=True)
    valid = torch.nonzero(rows.loss_weights).squeeze(1)
    plan = packed_plan(cu, sets, mesh, device)
    return ShardedBatch(
        tokens=to_device(rows.tokens, device),
        targets=to_device(rows.targets, device),
        loss_weights=to_device(rows.loss_weights, device),
        positions=to_device(indices - cu[ids], device),
        sequence_ids=to_device(ids, device),
        cu_seqlens=plan.cu_seqlens,
        max_seqlen=plan.max_seqlen,
        token_columns={name: to_device(column, device) for name, column in rows.columns.items()},
        sequence_columns={name: to_device(column, device) for name, column in columns.items()},
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_valid=valid.numel(),
        valid_index=to_device(valid, device),
        indices=to_device(indices, device),
        total=total,
        mesh=mesh,
        attention_plan=plan,
        segments=segment_index(cu, ranges, num_sequences, device),
    )


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _positions(indices: Tensor, cu: Tensor) -> Tensor:
    if indices.numel() == 0:
        return indices
    return indices - cu[torch.bucketize(indices, cu[1:], right=True)]


def _slice(values: Any, start: int, stop: int) -> Tensor:
    piece = values[start:stop]
    return (
        piece if isinstance(piece, Tensor) else torch.tensor(piece)
    )  # a copy: memory-mapped arrays are read-only


def _read_rows(sequences: list[Sequence], cu: Tensor, ranges: list[Range]) -> _Rows:
    """Read packed ranges out of the sequences; what lies past them is tail."""
    count = sum(b - a for a, b in ranges)
    rows = _Rows(
        tokens=torch.zeros(count, dtype=torch.int64),
        targets=torch.full((count,), IGNORE, dtype=torch.int64),
        loss_weights=torch.zeros(count),
        columns={},
    )
    names = set(sequences[0].token_columns) if sequences else set()
    starts, offset = cu.tolist(), 0
    for a, b in ranges:
        index = int(torch.searchsorted(cu, a, right=True)) - 1
        while index < len(sequences) and starts[index] < b:
            sequence, start, length = (
                sequences[index],
                starts[index],
                starts[index + 1] - starts[index],
            )
            if set(sequence.token_columns) != names:
                raise ValueError(
                    f"sequence {index} has token columns {sorted(sequence.token_columns)}, the first one "
                    f"{sorted(names)}; give all sequences the same columns"
                )
            low, high = max(a - start, 0), min(b - start, length)
            at = slice(offset + start + low - a, offset + start + high - a)
            tokens = _slice(sequence.tokens, low, min(high + 1, length)).long()
            weights = _slice(sequence.loss_weights, low + 1, min(high + 1, length)).float()
            rows.tokens[at] = tokens[: high - low]
            predicted = slice(at.start, at.start + weights.numel())
            rows.targets[predicted] = tokens[1:]
            rows.loss_weights[predicted] = weights
            for name, values in sequence.token_columns.items():
                piece = _slice(values, low, high)
                if name not in rows.columns:
                    rows.columns[name] = piece.new_zeros((count, *piece.shape[1:]))
                rows.columns[name][at] = piece
            index += 1
        offset += b - a
    for name in names - set(rows.columns):  # a rank that holds nothing but tail
        example = _slice(sequences[0].token_columns[name], 0, 1)
        rows.columns[name] = example.new_zeros((count, *example.shape[1:]))
    rows.targets.masked_fill_(rows.loss_weights == 0, IGNORE)
    _check_weights(rows.targets, rows.loss_weights)
    return rows


def _check_weights(targets: Tensor, weights: Tensor) -> None:
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(
            "loss_weights holds a value that is not finite; weights must be numbers, 0 to ignore a target"
        )
    wrong = torch.nonzero((targets == IGNORE) != (weights == 0)).flatten()
    if wrong.numel():
        i = int(wrong[0])
        raise ValueError(
            f"position {i} has target {int(targets[i])} and loss weight {float(weights[i])}; "
            "a target must be -100 exactly where its weight is 0"
        )


def _sequence_columns(sequences: list[Sequence]) -> dict[str, Tensor]:
    names = set(sequences[0].columns) if sequences else set()
    for index, sequence in enumerate(sequences):
        if set(sequence.columns) != names:
            raise ValueError(
                f"sequence {index} has columns {sorted(sequence.columns)}, the first one {sorted(names)}; "
                "give all sequences the same columns"
            )
    return {name: torch.tensor([s.columns[name] for s in sequences]) for name in sorted(names)}
