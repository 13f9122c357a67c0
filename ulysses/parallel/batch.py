"""Pack sequences end to end and give each sequence-parallel rank its shard.

    sequences        a a a a a | b b b | c c c c c c            N = 3
    packed           a a a a a   b b b   c c c c c c  . .       T tokens, with a tail that makes T divisible by sp
    cu_seqlens       0           5       8            14  16    global: it describes the pack, never a shard
    sp rank 0, 1     a a a a a   b b b | c c c c c c  . .       S = T / sp tokens each

Targets are shifted before the pack is cut, so no label is lost at the edge of a shard; the last token of a sequence
has no target. The tail has its own cu_seqlens entry and weight 0. Where ranks split query rows the shards are not
contiguous (layout.py); positions, targets and columns travel with their tokens.

Sequences that begin with the same prompt (`Sequence.prompt`) hold it once: later ones leave it out, but for its last
token, so that every one predicts its own first token and no row has two targets. `shared_prompts` alone decides that.

    first     p p p p a a a       all of its rows
    later           p b b b       positions 3 4 5 6; attends to rows 0 .. 2 of the first one, and to its own

Letters: T packed tokens, S tokens on this rank, N sequences, L tokens of one sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import (
    AttentionPlan,
    Device,
    Range,
    packed_plan,
    row_sets,
    rows_of,
    sequence_parts,
    shard_ranges,
    squares,
    to_device,
)
from .mesh import ParallelMesh

IGNORE = -100
Array = np.ndarray | Tensor | list[float]


@dataclass(frozen=True)
class Sequence:
    """One tokenised sequence; its arrays may be memory-mapped and are read slice by slice.

    tokens [L] integers. loss_weights [L] numbers: entry t is the weight of token t as a target; entry 0 never counts.
    token_columns {name: [L]}: row i belongs to the prediction that position i makes of token i + 1.
    columns {name: number}: values of the whole sequence.
    prompt: sequences of a pack with the same number here begin with the same tokens, which are not trained: as many as
    the smaller one of their `prompt_length` says. None: it shares nothing.
    Raises ValueError if lengths differ.
    """

    tokens: Array
    loss_weights: Array
    token_columns: Mapping[str, Array] = field(default_factory=dict)
    columns: dict[str, float] = field(default_factory=dict)
    prompt: int | None = None
    prompt_length: int = 0

    def __post_init__(self) -> None:
        for name, values in {"loss_weights": self.loss_weights, **self.token_columns}.items():
            if len(values) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(self.tokens)} tokens; give one per token"
                )

        if self.prompt_length > len(self.tokens):
            raise ValueError(
                f"prompt_length is {self.prompt_length} but the sequence has {len(self.tokens)} tokens; give its own"
            )

    @property
    def emptied(self) -> "Sequence":
        """The same without tokens: from it a batch without sequences learns its columns."""
        columns = {name: values[:0] for name, values in self.token_columns.items()}
        return Sequence(self.tokens[:0], self.loss_weights[:0], columns, self.columns)


def shared_prompts(
    sequences: list[Sequence] | tuple[Sequence, ...],
) -> list[tuple[int, int]]:
    """Return for each sequence of a pack the place of the one that holds its prompt, and the tokens it leaves out."""
    first: dict[int, int] = {}
    found = []
    for place, sequence in enumerate(sequences):
        owner = place
        if sequence.prompt is not None:
            owner = first.setdefault(sequence.prompt, place)
        length = min(sequence.prompt_length, sequences[owner].prompt_length)
        found.append((owner, max(0, length - 1) if owner < place else 0))
    return found


@dataclass
class ShardedBatch:
    """What one sequence-parallel rank works on; all tensors are on its device.

    tokens, targets, positions, sequence_ids [S] int64; the tail has the sequence id N. loss_weights [S] float32; a
    target is -100 exactly where its weight is 0. is_last [S] marks the last token of each sequence.
    cu_seqlens [N + 1] int32 describes the whole pack, with one more entry if there is a tail.
    num_sequences is N; num_tokens counts the whole pack without its tail, num_tokens_shared what was left out of it,
    and num_squares twice the pairs of a query and a key that it sees, in the mean of the layers; num_valid counts this
    rank's targets of nonzero weight, which are at valid_index [num_valid].
    attention_plan says how attention is computed (layout.py). Row i of this rank is of the sequence whose
    sequence_starts [N + 1] are at most i and then above it, or of the tail.
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
    num_tokens_shared: int
    num_squares: float
    num_valid: int
    valid_index: Tensor
    mesh: ParallelMesh
    attention_plan: AttentionPlan
    sequence_starts: Tensor


def pack_shard(
    sequences: list[Sequence],
    mesh: ParallelMesh,
    device: Device = "cpu",
    *,
    may_be_empty: bool = False,
) -> ShardedBatch:
    """Pack the sequences and return this rank's shard, reading only its own slices of their arrays.

    There is no communication: every rank of the group is given the same sequences, which all have the same columns.
    For a rank that has run out of data `may_be_empty` turns no sequences, or those that `emptied` returns, into a batch
    of sp tokens with weight 0. Raises ValueError if there are no sequences, or if a weight is not finite.
    """
    given, sequences = sequences, [s for s in sequences if len(s.tokens)]
    if not sequences and not may_be_empty:
        raise ValueError(
            "there are no sequences to pack; leave the step out on all ranks together, or set may_be_empty=True for a "
            "batch without weight"
        )
    if sequences and len(sequences) < len(given):
        raise ValueError("a sequence has no tokens; drop it before packing")
    shared = shared_prompts(sequences)
    left_out = [count for _, count in shared]
    lengths = [len(sequence.tokens) - count for sequence, count in zip(sequences, left_out)]
    sp, num_sequences, num_tokens = mesh.sequence_parallel_size, len(lengths), sum(lengths)
    total = max(1, -(-num_tokens // sp)) * sp
    tail = [total - num_tokens] if total > num_tokens else []
    cu = torch.tensor([0, *lengths, *tail]).cumsum(0)
    starts = cu.tolist()
    before = torch.tensor([*left_out, *[0] * len(tail)])
    sets = row_sets(cu, mesh.row_parallel_size, before, mesh.windows)
    ranges = shard_ranges(sets, mesh.sp_rank, mesh.head_parallel_size)
    indices = rows_of(ranges)
    ids = torch.bucketize(indices, cu[1:], right=True)
    is_last = (indices + 1 == cu[ids + 1]) & (ids < num_sequences)
    # an empty pack reads no token, but learns its columns and their types
    known = given or [Sequence([], [])]
    tokens, targets, loss_weights, token_columns = _read_rows(
        known, left_out, num_tokens, starts, ranges, is_last
    )
    valid = torch.nonzero(loss_weights).squeeze(1)
    columns = {
        name: torch.tensor([s.columns[name] for s in known])[:num_sequences]
        for name in sorted(known[0].columns)
    }
    tensors = {
        "tokens": tokens,
        "targets": targets,
        "loss_weights": loss_weights,
        "positions": indices - cu[ids] + before[ids],
        "sequence_ids": ids,
        "is_last": is_last,
        "cu_seqlens": cu.int(),
        "valid_index": valid,
        "sequence_starts": torch.searchsorted(ids, torch.arange(num_sequences + 1)),
    }

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: to_device(tensor, device) for name, tensor in tensors.items()}

    return ShardedBatch(
        **moved(tensors),
        token_columns=moved(token_columns),
        sequence_columns=moved(columns),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_tokens_shared=sum(left_out),
        num_squares=squares(np.array(lengths), np.array(left_out), mesh.windows).sum().item(),
        num_valid=valid.numel(),
        mesh=mesh,
        attention_plan=packed_plan(
            cu,
            sets,
            mesh,
            device,
            {
                place: (starts[owner], starts[owner] + count)
                for place, (owner, count) in enumerate(shared)
                if count
            },
            tail=len(tail) > 0,
        ),
    )


def _read_rows(
    sequences: list[Sequence],
    left_out: list[int],
    num_tokens: int,
    cu_seqlens: list[int],
    ranges: list[Range],
    is_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Read tokens, targets, weights and columns of packed ranges; what comes after the sequences is the tail."""
    pieces, counts = [], []
    for part in chain(*sequence_parts(cu_seqlens, ranges)):
        if part.start < num_tokens:
            first = left_out[part.sequence] - part.whole[0]
            # one row more, which is what the last one predicts, unless the sequence ends there
            rows = slice(first + part.start, first + part.end + 1)
            pieces.append((sequences[part.sequence], rows))
            counts += [part.end - part.start, part.end < part.whole[1]]
    # a rank that holds nothing but tail learns the dtypes
    pieces = pieces or [(sequences[0], slice(0))]
    own = np.flatnonzero(np.repeat(np.arange(len(counts)) % 2 == 0, counts))

    def fit(rows: Tensor) -> Tensor:
        return F.pad(rows[own], (0, len(is_last) - len(own)))

    def following(rows: Tensor) -> Tensor:
        return fit(rows.roll(-1)).masked_fill_(is_last, 0)

    tokens = _join([s.tokens[rows] for s, rows in pieces]).long()
    loss_weights = following(_join([s.loss_weights[rows] for s, rows in pieces]).float())
    if not bool(torch.isfinite(loss_weights).all()):
        raise ValueError(
            "loss_weights has a value that is not finite; give a number, or 0 to ignore a target"
        )
    return (
        fit(tokens),
        following(tokens).masked_fill_(loss_weights == 0, IGNORE),
        loss_weights,
        {
            name: fit(_join([s.token_columns[name][rows] for s, rows in pieces]))
            for name in sequences[0].token_columns
        },
    )


def _join(pieces: list[Array]) -> Tensor:
    """Copy pieces of arrays end to end; memory-mapped ones are read-only, and torch warns of those."""
    if isinstance(pieces[0], np.ndarray):
        return torch.from_numpy(np.concatenate(pieces))
    return torch.cat([torch.as_tensor(piece) for piece in pieces])
