"""Packing and sharding on the host: targets, weights, columns, tails, laziness, refusals."""

import numpy as np
import pytest
import torch

from tests.unit.test_layout import simulated_mesh
from ulysses.parallel import (
    PackedBatch,
    ParallelMesh,
    Sequence,
    pack_shard,
    segment_sums,
    sequence_last,
    shard,
)


def sequences(lengths, columns=True):
    draw = np.random.default_rng(sum(lengths))
    result = []
    for i, n in enumerate(lengths):
        result.append(
            Sequence(
                tokens=draw.integers(0, 1000, n).astype(np.uint32),
                loss_weights=(draw.random(n) < 0.6).astype(np.uint8),
                token_columns={"reference_logps": draw.random(n, dtype=np.float32)} if columns else {},
                columns={"label": i, "margin": i / 2} if columns else {},
            )
        )
    return result


def test_pack_shifts_targets_inside_each_sequence():
    first = Sequence([7, 8, 9], [9.0, 1.0, 0.5], {"c": [1, 2, 3]})
    batch = PackedBatch.pack([first, Sequence([5], [1.0], {"c": [4]}), Sequence([3, 0], [0, 1], {"c": [5, 6]})])
    assert batch.tokens.tolist() == [7, 8, 9, 5, 3, 0]
    assert batch.targets.tolist() == [8, 9, -100, -100, 0, -100]  # token 0 is a word like any other
    assert batch.loss_weights.tolist() == [1, 0.5, 0, 0, 1, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.token_columns["c"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (batch.num_sequences, batch.total) == (3, 6)


@pytest.mark.parametrize("num_heads", [8, 14, 1])
@pytest.mark.parametrize("sp", [1, 2, 3, 4, 8])
def test_pack_shard_equals_shard_of_pack_and_shards_hold_every_token_once(sp, num_heads):
    given = sequences([5, 1, 37, 1, 1, 60, 13])
    packed = PackedBatch.pack(given)
    seen = []
    for rank in range(sp):
        mesh = simulated_mesh(sp, rank, num_heads)
        one, two = shard(packed, mesh), pack_shard(given, mesh)
        for name in vars(one):
            a, b = getattr(one, name), getattr(two, name)
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a.dtype == b.dtype, name
            elif isinstance(a, dict):
                assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
            elif isinstance(a, int):
                assert a == b
        assert one.total % sp == 0 and one.total - packed.total < sp and one.tokens.numel() == one.total // sp
        real = one.indices < packed.total
        for name in ("tokens", "targets", "loss_weights", "positions"):
            assert torch.equal(getattr(one, name)[real], getattr(packed, name)[one.indices[real]])
        column = packed.token_columns["reference_logps"]
        assert torch.equal(one.token_columns["reference_logps"][real], column[one.indices[real]])
        assert (one.targets[~real] == -100).all() and (one.loss_weights[~real] == 0).all()
        assert (one.sequence_ids[~real] == 7).all() and (one.sequence_ids[real] < 7).all()
        assert one.num_sequences == 7 and one.num_tokens == packed.total
        assert one.cu_seqlens[-1] == one.total and one.cu_seqlens.dtype == torch.int32
        assert one.valid_index.tolist() == one.loss_weights.nonzero().flatten().tolist()
        assert one.num_valid == one.valid_index.numel() == (one.targets != -100).sum()
        assert one.sequence_columns["label"].tolist() == list(range(7))
        seen += one.indices.tolist()
    assert sorted(seen) == list(range(len(seen)))


class Watched:
    """An array that remembers which slices were read, as a memory-mapped file would be."""

    def __init__(self, values):
        self.values, self.read = values, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, at):
        self.read.append((at.start, at.stop))
        return self.values[at]


def test_pack_shard_reads_only_its_own_slices():
    tokens = Watched(np.arange(1000))
    pack_shard([Sequence(tokens, np.ones(1000))], simulated_mesh(4, 1, 4))
    assert tokens.read == [(250, 501)]  # one more for the last target


def test_no_sequences_give_a_batch_without_weight():
    batch = pack_shard([], simulated_mesh(4, 1, 14))
    assert batch.tokens.tolist() == [0] and batch.num_valid == 0 and batch.total == 4
    assert batch.num_sequences == 0 and batch.cu_seqlens.tolist() == [0, 4] and batch.num_tokens == 0
    one = pack_shard([], ParallelMesh())
    assert segment_sums(torch.ones(1), one).shape == (0,) and sequence_last(torch.ones(1), one).shape == (0,)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_segment_sums_are_accurate_where_prefix_sums_cancel(shape):
    lengths = [100_000, 3, 1, 5000, 65, 64]
    batch = pack_shard([Sequence(np.zeros(n, np.uint8), np.ones(n)) for n in lengths], ParallelMesh())
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(batch.total, *shape, generator=draw)
    values[:100_000] *= 1e6
    values[100_000:] *= 1e-3
    wanted = torch.stack([x.sum(0) for x in values.double().split(lengths)])
    torch.testing.assert_close(segment_sums(values, batch).double(), wanted, rtol=1e-6, atol=0)
    naive = values.cumsum(0)[batch.cu_seqlens[1:] - 1].diff(dim=0)
    assert not torch.allclose(naive.double(), wanted[1:], rtol=1e-2)  # what the tree avoids


def test_segment_gradients_reach_every_token_once():
    batch = pack_shard(sequences([4, 1, 3]), ParallelMesh())
    values = torch.rand(8, dtype=torch.float64, requires_grad=True)
    (segment_sums(values, batch) * torch.tensor([1.0, 10, 100])).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 1, 10, 100, 100, 100]
    values.grad = None
    (sequence_last(values, batch) * torch.tensor([1.0, 10, 100])).sum().backward()
    assert values.grad.tolist() == [0, 0, 0, 1, 10, 0, 0, 100]
    assert torch.equal(sequence_last(values, batch), values[[3, 4, 7]])


def test_bad_batches_are_refused():
    good = PackedBatch.pack(sequences([4, 2]))
    with pytest.raises(ValueError, match=r"position 1 has target -100 and loss weight 1\.0"):
        targets, weights = good.targets.clone(), good.loss_weights.clone()
        targets[1], weights[1] = -100, 1
        PackedBatch(good.tokens, targets, weights, good.positions, good.cu_seqlens)
    with pytest.raises(ValueError, match="loss_weights holds a value that is not finite"):
        PackedBatch.pack([Sequence([1, 2], [0.0, float("nan")])])
    with pytest.raises(ValueError, match=r"targets has shape \(5,\).* it must be \[6\] and torch\.int64"):
        PackedBatch(good.tokens, good.targets[1:], good.loss_weights, good.positions, good.cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens must be int32 and run from 0 to the 6 tokens"):
        PackedBatch(good.tokens, good.targets, good.loss_weights, good.positions, good.cu_seqlens.long())
    with pytest.raises(ValueError, match="a sequence has no tokens; drop it"):
        Sequence([], [])
    with pytest.raises(ValueError, match="loss_weights has 2 entries for 3 tokens"):
        Sequence([1, 2, 3], [0, 1])
    with pytest.raises(ValueError, match=r"sequence 1 has columns \[\], the first one \['label'\]"):
        PackedBatch.pack([Sequence([1, 2], [0, 1], columns={"label": 1}), Sequence([1, 2], [0, 1])])
    with pytest.raises(ValueError, match=r"sequence 1 has token columns \[\], the first one \['c'\]"):
        PackedBatch.pack([Sequence([1, 2], [0, 1], {"c": [0, 0]}), Sequence([1, 2], [0, 1])])


def test_a_pack_past_int32_is_refused_before_anything_is_read():
    huge = type("Huge", (), {"__len__": lambda self: 2**30})()
    with pytest.raises(ValueError, match="does not fit int32 cu_seqlens"):
        pack_shard([Sequence(huge, huge), Sequence(huge, huge)], ParallelMesh())
