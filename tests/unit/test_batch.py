"""Packing and sharding on the host: targets, weights, columns, tails, laziness, refusals."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests import rows_of
from tests.unit.test_layout import simulated_mesh
from ulysses.parallel import (
    ParallelMesh,
    Sequence,
    pack_shard,
    segment_sums,
    sequence_last,
)

LENGTHS = [5, 1, 37, 1, 1, 60, 13]


def sequences(lengths):
    draw = np.random.default_rng(sum(lengths))
    return [
        Sequence(
            tokens=draw.integers(0, 1000, n).astype(np.uint32),
            loss_weights=(draw.random(n) < 0.6).astype(np.uint8),
            token_columns={"reference_logps": draw.random(n, dtype=np.float32)},
            columns={"margin": i / 2},
        )
        for i, n in enumerate(lengths)
    ]


def test_pack_shifts_targets_inside_each_sequence():
    first = Sequence([7, 8, 9], [9.0, 1.0, 0.5], {"c": [1, 2, 3]})
    given = [first, Sequence([5], [1.0], {"c": [4]}), Sequence([3, 0], [0, 1], {"c": [5, 6]})]
    batch = pack_shard(given, ParallelMesh())
    # token 0 is a word like any other
    expected = json.loads("""{
        "tokens": [7, 8, 9, 5, 3, 0], "targets": [8, 9, -100, -100, 0, -100],
        "loss_weights": [1, 0.5, 0, 0, 1, 0], "positions": [0, 1, 2, 0, 0, 1],
        "sequence_ids": [0, 0, 0, 1, 2, 2], "is_last": [0, 0, 1, 1, 0, 1],
        "cu_seqlens": [0, 3, 4, 6], "valid_index": [0, 1, 4]
    }""")
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.token_columns["c"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (batch.num_sequences, batch.num_tokens, batch.num_valid) == (3, 6, 3)


@pytest.mark.parametrize("num_heads", [8, 14, 1])
@pytest.mark.parametrize("sp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, [1]], ids=["ragged", "ranks with nothing but tail"]
)
def test_pack_shard_equals_shard_of_pack_and_shards_hold_every_token_once(
    lengths, sp, num_heads
):
    given, seen, total, count = sequences(lengths), [], sum(lengths), len(lengths)
    pack = pack_shard(given, ParallelMesh())
    for rank in range(sp):
        one = pack_shard(given, simulated_mesh(sp, rank, num_heads))
        indices = one.cu_seqlens[one.sequence_ids] + one.positions
        real, padded = indices < total, one.attention_plan.total
        assert padded % sp == 0 and padded - total < sp and one.tokens.numel() == padded // sp
        names = "tokens targets loss_weights positions sequence_ids is_last reference_logps"
        for name in names.split():
            here, there = ({**vars(b), **b.token_columns}[name] for b in (one, pack))
            assert_close(here[real], there[indices[real]], rtol=0, atol=0, msg=name)
        assert (one.targets[~real] == -100).all() and (one.loss_weights[~real] == 0).all()
        assert (one.sequence_ids[~real] == count).all() and not one.is_last[~real].any()
        assert one.num_sequences == count and one.num_tokens == total
        assert one.cu_seqlens[-1] == padded
        assert torch.equal(one.cu_seqlens[: count + 1], pack.cu_seqlens)
        assert one.valid_index.tolist() == one.loss_weights.nonzero().flatten().tolist()
        assert one.num_valid == one.valid_index.numel() == (one.targets != -100).sum()
        assert one.sequence_columns["margin"].tolist() == [i / 2 for i in range(count)]
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(seen)))


class Watched(list):
    """An array that remembers which slices were read, as a memory-mapped file would be."""

    read = ()

    def __getitem__(self, at):
        self.read = (*self.read, (at.start, at.stop))
        return super().__getitem__(at)


def test_pack_shard_reads_only_its_own_slices():
    tokens = Watched(range(1000))
    pack_shard([Sequence(tokens, np.ones(1000))], simulated_mesh(4, 1, 4))
    assert tokens.read == ((250, 501),)  # one more for the last target


def test_no_sequences_give_a_batch_without_weight():
    (given,) = sequences([9])
    with pytest.raises(ValueError, match="has no tokens; drop it"):
        pack_shard([given, given.emptied], ParallelMesh())
    for nothing in ([], [given.emptied]):
        batch = pack_shard(nothing, simulated_mesh(4, 1, 14))
        assert (batch.tokens.tolist(), batch.targets.tolist()) == ([0], [-100])
        assert (batch.num_valid, batch.num_sequences, batch.num_tokens) == (0, 0, 0)
        assert batch.cu_seqlens.tolist() == [0, 4]
    one = pack_shard([], ParallelMesh())
    for of_sequences in (segment_sums, sequence_last):
        assert of_sequences(torch.ones(1), one).shape == (0,)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_segment_sums_are_accurate_where_prefix_sums_cancel(shape):
    lengths = [100_000, 3, 1, 5000, 65, 64]
    batch = pack_shard([Sequence([0] * n, np.ones(n)) for n in lengths], ParallelMesh())
    values = torch.rand(sum(lengths), *shape)
    values[:100_000] *= 1e6
    values[100_000:] *= 1e-3
    wanted = torch.stack([x.sum(0) for x in values.double().split(lengths)])
    assert_close(segment_sums(values, batch).double(), wanted, rtol=1e-6, atol=0)
    # what a difference of prefix sums would be
    naive = values.cumsum(0)[batch.cu_seqlens[1:] - 1].diff(dim=0)
    assert not torch.allclose(naive.double(), wanted[1:], rtol=1e-2)


# tokens and weights, and what is said
BAD = """
[] => [] => a sequence has no tokens; drop it
[1, 2, 3] => [0, 1] => loss_weights has 2 entries for 3 tokens
[1, 2] => [0, NaN] => loss_weights has a value that is not finite
"""


@pytest.mark.parametrize("tokens, weights, message", rows_of(BAD))
def test_bad_sequences_and_packs_are_refused(tokens, weights, message):
    with pytest.raises(ValueError, match=message):
        first = Sequence(json.loads(tokens), json.loads(weights))
        pack_shard([first, Sequence([1, 2], [0, 1])], ParallelMesh())


# A tree in depth-first order: each sequence with the number of its first tokens that the one before it has too.
# sequence | in common | its own positions | the packed rows that it leaves out
TREE = """
1 2 3 4 5 | 0 | 0 1 2 3 4 |
1 2 3 6 | 3 | 2 3 | 0:2
1 2 3 6 7 8 | 4 | 3 4 5 | 0:2 5:6
1 2 3 6 7 9 9 | 5 | 4 5 6 | 0:2 5:6 7:8
1 9 | 1 | 0 1 |
"""
# of every prefix call: the packed rows of its documents' keys, and how many rows read each
CALLS = [([[0, 1]], [2 + 3 + 3]), ([[5]], [3 + 3]), ([[7]], [3])]


def test_a_sequence_continues_another_one_that_continues_a_third():
    given = [line.split("|") for line in TREE.strip().splitlines()]
    sequences = [
        Sequence(
            [*map(int, tokens.split())],
            [1.0] * len(tokens.split()),
            prompt=0,
            prompt_length=int(n),
        )
        for tokens, n, *_ in given
    ]
    batch = pack_shard(sequences, ParallelMesh())
    plan = batch.attention_plan
    for i, (tokens, _, positions, prefix) in enumerate(given):
        own = batch.sequence_ids == i
        assert batch.positions[own].tolist() == [*map(int, positions.split())]
        assert batch.tokens[own].tolist() == [*map(int, tokens.split())][-int(own.sum()) :]
        found = plan.prefixes.get(i, [])
        assert " ".join(f"{start}:{end}" for start, end in found) == prefix.strip()
    assert batch.num_tokens_shared == 2 + 3 + 4
    calls = []
    for _, keys, documents, causal in plan.prefix_calls:
        rows = torch.arange(batch.num_tokens)[keys].tolist()
        read, bounds = (pairwise(x) for x in documents.on_host)
        calls.append(([rows[a:b] for a, b in bounds], [b - a for a, b in read]))
        assert not causal
    assert calls == CALLS
