"""MFU's numerator against torch's own count of what matrix products do."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.engine_case import Case, build_trainer, dataset
from tests.harness import run_distributed
from ulysses.parallel import ParallelMesh, Sequence, pack_shard
from ulysses.plan.model_size import Model
from ulysses.plan.planner import Machine, Workload, step_flops
from ulysses.run.metrics import model_flops

LAYERS, D, V, T, RANK, TRAINED = 3, 16, 40, 24, 2, 7


def shape(vocabulary, layers, parameters, trained):
    return Model(D, 0, 1, 1, D, vocabulary, layers, parameters, trained)


@pytest.mark.parametrize("rank", [0, RANK], ids=["all weights", "adapters"])
def test_equals_what_torch_counts(rank):
    matrices = torch.randn(LAYERS, D, D, requires_grad=not rank)
    head = torch.randn(D, V, requires_grad=not rank)
    adapters = torch.randn(LAYERS, 2 * D * rank, requires_grad=True)
    x = torch.randn(T, D, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        y = x
        for matrix, adapter in zip(matrices, adapters):
            a, b = adapter.view(2, D, rank)
            y = y @ matrix + (y @ a @ b.mT if rank else 0)
        (y[:TRAINED] @ head).sum().backward()
    parameters = LAYERS * D * D + D * V + adapters.numel()
    model = shape(V, 0, parameters, adapters.numel() or parameters)
    assert model_flops(model, T, 0.0, TRAINED) == counted.get_total_flops()


def test_causal_attention_counts_half_of_the_square():
    q, k, v = (torch.randn(1, 1, T, D, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counted:
        ((q @ k.mT).softmax(-1) @ v).sum().backward()
    assert model_flops(shape(0, 1, 0, 0), T, float(T * T), 0) == counted.get_total_flops() / 2


@pytest.mark.parametrize("windows", [(4, None, None), (4, 10, 4), (24, 25, 99)])
def test_windows_are_counted_by_metrics_and_planner_alike(windows):
    """Of a pack with a shared prompt the metrics take the batch's count, and the planner its own of equal documents."""
    pairs = sum(24**2 - max(0, 24 - (w or 24)) ** 2 for w in windows)
    mesh = ParallelMesh(windows=windows)
    batch = pack_shard([Sequence(range(24), [1] * 24)] * 2, mesh)
    model = shape(0, 3, 0, 0)._replace(windows=windows)
    counted = model_flops(model, 0, batch.num_squares, 0)
    assert counted == pytest.approx(6 * D * 2 * pairs)
    case = Workload(model, Machine(1, 1e9), 48, documents=2, levels=("none",) * 3)
    assert step_flops(case)[1] == pytest.approx(3.5 * 2 * D * 2 * pairs)
    whole = Sequence(range(20), [1] * 20)
    branch = Sequence(range(4), [1] * 4, prefix_length=20, prefix_owner=1)
    shared = pack_shard([whole, branch], mesh).num_squares
    assert shared == pytest.approx(pairs / 3)


def counted_amounts():
    data = dataset("sft")
    trainer, _ = build_trainer(Case("sft"))
    seen = []

    def flops(*amounts):
        seen.append(amounts)
        return 0.0

    trainer.flops, trainer.peak_flops = flops, 1.0
    examples = [data[i] for i in trainer.loader.indices(0, 0)]
    trainer.train_step()
    trainer.engine.destroy()
    lengths = [len(e.sequences[0].tokens) for e in examples]
    trained = [
        int((torch.as_tensor(e.sequences[0].loss_weights)[1:] != 0).sum()) for e in examples
    ]
    return seen, lengths, trained


def test_the_vocabulary_projection_counts_trained_tokens_only():
    [(seen, lengths, trained)] = run_distributed(counted_amounts, 1)
    assert seen == [(sum(lengths), sum(n * n for n in lengths), sum(trained))]
    assert 0 < sum(trained) < sum(lengths)
