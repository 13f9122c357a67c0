"""Pack sequences end to end and give each sequence-parallel rank its shard.

    sequences        a a a a a | b b b | c c c c c c            N = 3
    packed           a a a a a   b b b   c c c c c c  . .       T tokens, with a tail that makes T divisible by sp
    cu_seqlens       0           5       8            14  16    global: it describes the pack, never a shard
    sp rank 0, 1     a a a a a   b b b | c c c c c c  . .       S = T / sp tokens each

Targets are shifted before the pack is cut, so no label is lost at the edge of a shard; the last token of a sequence
has no target. The tail has its own cu_seqlens entry and weight 0. Where ranks split query rows the shards are not
contiguous (layout.py); positions, targets and columns travel with their tokens.

A sequence may continue the one before it (`Sequence.prompt`), which may continue another one itself. It leaves out all
but the last token that the two have in common, so that it predicts its own next token and no row has two targets. In
depth-first order, which sorting the token arrays gives, a tree's tokens are held once. `shared_prompts` alone decides
this.

    first     p p p p a a a a       all of its rows
    second            a b b b       positions 5 6 7 8; attends to rows 0 .. 4 of the first one, and to its own
    third           p c c           positions 3 4 5; attends to rows 0 .. 2 of the first one, and to its own

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
    packed_plan,
    row_sets,
    sequence_parts,
    shard_ranges,
    squares,
    to_device,
)
from .mesh import ParallelMesh
from .ranges import Range, rows_between, rows_of

IGNORE = -100
Array = np.ndarray | Tensor | list[float]


@dataclass(frozen=True)
class Sequence:
    """One tokenised sequence; its arrays may be memory-mapped and are read slice by slice.

    tokens [L] integers. loss_weights [L] numbers: entry t is the weight of token t as a target; entry 0 never counts.
    token_columns {name: [L]}: row i belongs to the prediction that position i makes of token i + 1.
    columns {name: number}: values of the whole sequence.
    prompt: a number. A sequence begins with the same `prompt_length` tokens as the one before it in the pack that has
    the same number, or with all tokens of that one if it has fewer, and trains none of them that it leaves out. None:
    the sequence shares nothing.
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
        """This sequence without its tokens: a batch that has no sequences learns its columns from it."""
        per_token = {name: values[:0] for name, values in self.token_columns.items()}
        return Sequence(self.tokens[:0], self.loss_weights[:0], per_token, self.columns)


def shared_prompts(
    sequences: list[Sequence] | tuple[Sequence, ...],
) -> list[tuple[int, int]]:
    """Return for each sequence of a pack the place of the one that it continues, and how many tokens it leaves out."""
    newest: dict[int, int] = {}
    shared = []
    for i, sequence in enumerate(sequences):
        before = i
        if sequence.prompt is not None:
            before = newest.get(sequence.prompt, i)
            newest[sequence.prompt] = i
        length = min(sequence.prompt_length, len(sequences[before].tokens))
        shared.append((before, max(0, length - 1) if before < i else 0))
    return shared


@dataclass
class ShardedBatch:
    """What one sequence-parallel rank works on; all tensors are on its device.

    tokens, targets, positions, sequence_ids [S] int64; the tail has the sequence id N. loss_weights [S] float32; a
    target is -100 exactly where its weight is 0. is_last [S] marks the last token of each sequence.
    cu_seqlens [N + 1] int32 describes the whole pack, with one more entry if there is a tail.
    num_sequences is N. num_tokens counts the tokens of the whole pack without its tail, num_tokens_shared the shared
    tokens that were left out of it, and num_squares twice the pairs of a query and a key in its attention, the mean
    over the layers. num_valid counts this rank's targets of nonzero weight, which are at valid_index [num_valid].
    attention_plan says how attention is computed (layout.py). This rank's rows of sequence i are
    sequence_starts[i] .. sequence_starts[i + 1] - 1, of sequence_starts [N + 1]; the rows after them are the tail.
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
) -> ShardedBatch:
    """Pack the sequences and return this rank's shard, reading only its own slices of their arrays.

    There is no communication: every rank of the group is given the same sequences, which all have the same columns.
    For a rank that has run out of data, no sequences, or those that `emptied` returns, become a batch of sp tokens with
    weight 0. Raises ValueError if only some sequences have tokens or a column, or if a weight is not finite.
    """
    # an empty pack reads no token, but learns its columns and their types
    column_source = sequences or [Sequence([], [])]
    sequences = [s for s in sequences if len(s.tokens)]
    if sequences and len(sequences) < len(column_source):
        raise ValueError("a sequence has no tokens; drop it before packing")
    wanted = [{*column_source[0].token_columns}, {*column_source[0].columns}]
    for sequence in sequences:
        names = [{*sequence.token_columns}, {*sequence.columns}]
        if names != wanted:
            raise ValueError(
                f"the sequences of a pack have the token_columns and columns {wanted} and {names}; give all the same"
            )
    shared = shared_prompts(sequences)
    left_out = [count for _, count in shared]
    lengths = [len(sequence.tokens) - count for sequence, count in zip(sequences, left_out)]
    sp, num_sequences, num_tokens = mesh.sequence_parallel_size, len(lengths), sum(lengths)
    total = max(1, -(-num_tokens // sp)) * sp
    tail = [total - num_tokens] if total > num_tokens else []
    cu = torch.tensor([0, *lengths, *tail]).cumsum(0)
    starts = cu.tolist()
    prefixes: dict[int, list[Range]] = {}
    for i, (before, count) in enumerate(shared):
        if count:
            whole = [*prefixes.get(before, ()), (starts[before], starts[before + 1])]
            prefixes[i] = rows_between(whole, 0, count)
    prefix_lengths = torch.tensor([*left_out, *[0] * len(tail)])
    sets = row_sets(cu, mesh.row_parallel_size, prefix_lengths, mesh.windows)
    ranges = shard_ranges(sets, mesh.sp_rank, mesh.head_parallel_size)
    indices = rows_of(ranges)
    ids = torch.bucketize(indices, cu[1:], right=True)
    is_last = (indices + 1 == cu[ids + 1]) & (ids < num_sequences)
    tokens, targets, loss_weights, token_columns = _read_rows(
        column_source, left_out, num_tokens, starts, ranges, is_last
    )
    valid = torch.nonzero(loss_weights).squeeze(1)
    per_sequence = {
        name: torch.tensor([s.columns[name] for s in column_source])[:num_sequences]
        for name in sorted(column_source[0].columns)
    }
    tensors = {
        "tokens": tokens,
        "targets": targets,
        "loss_weights": loss_weights,
        "positions": indices - cu[ids] + prefix_lengths[ids],
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
        sequence_columns=moved(per_sequence),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_tokens_shared=sum(left_out),
        num_squares=squares(np.array(lengths), np.array(left_out), mesh.windows).sum().item(),
        num_valid=valid.numel(),
        mesh=mesh,
        attention_plan=packed_plan(cu, sets, mesh, device, prefixes, tail=len(tail) > 0),
    )


def _read_rows(
    sequences: list[Sequence],
    left_out: list[int],
    num_tokens: int,
    cu_seqlens: list[int],
    ranges: list[Range],
    is_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Read tokens, targets, weights and columns of packed ranges; the rows after the sequences are the tail."""
    # what is read lies end to end; of it the rows that this rank holds, as ranges
    slices, held, begin = [], [], 0
    for part in chain(*sequence_parts(cu_seqlens, ranges)):
        if part.start < num_tokens:
            # one row more, whose token the last row predicts, unless the sequence ends there
            stop = min(part.end + 1, part.whole[1])
            first = left_out[part.sequence] - part.whole[0]
            slices.append((sequences[part.sequence], slice(first + part.start, first + stop)))
            held.append((begin, begin + part.end - part.start))
            begin += stop - part.start
    # a rank that holds nothing but tail learns the dtypes
    slices = slices or [(sequences[0], slice(0))]
    held_rows = rows_of(held or [(0, 0)])

    def of_shard(rows: Tensor) -> Tensor:
        return F.pad(rows[held_rows], (0, len(is_last) - len(held_rows)))

    def following(rows: Tensor) -> Tensor:
        return of_shard(rows.roll(-1)).masked_fill_(is_last, 0)

    tokens = _concatenate([s.tokens[rows] for s, rows in slices]).long()
    loss_weights = following(_concatenate([s.loss_weights[rows] for s, rows in slices]).float())
    if not bool(torch.isfinite(loss_weights).all()):
        raise ValueError(
            "loss_weights has a value that is not finite; give a number, or 0 to ignore a target"
        )
    return (
        of_shard(tokens),
        following(tokens).masked_fill_(loss_weights == 0, IGNORE),
        loss_weights,
        {
            name: of_shard(_concatenate([s.token_columns[name][rows] for s, rows in slices]))
            for name in sequences[0].token_columns
        },
    )


def _concatenate(arrays: list[Array]) -> Tensor:
    """Copy arrays end to end; numpy does it for memory-mapped ones, which are read-only and make torch warn."""
    if isinstance(arrays[0], np.ndarray):
        return torch.from_numpy(np.concatenate(arrays))
    return torch.cat([torch.as_tensor(array) for array in arrays])
