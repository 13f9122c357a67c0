"""Packing inside a step and the order of steps: LAW of one order for every topology."""

import random
from copy import copy

import numpy as np
import pytest

from tests.engine_case import ListDataset
from tests.shuffled_loader import ShuffledLoader
from ulysses.check.input_files import check_examples
from ulysses.config.command_line import check
from ulysses.data.serve.steps import StepLoader, pack_step, sequence_cost, shuffled
from ulysses.options import stage_of
from ulysses.parallel.batch import Sequence


def packed_lengths(lengths, budget, groups, attention_length=50_000.0):
    return pack_step(
        lengths, [sequence_cost(n, 0, attention_length) for n in lengths], budget, groups
    )


def random_lengths(generator, count, longest):
    return [min(longest, max(2, int(generator.paretovariate(1.1) * 20))) for _ in range(count)]


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_every_example_once_within_budget_and_equal_counts(dp):
    generator = random.Random(dp)
    for count in (0, 1, 2, 5, 17, 64, 200):
        lengths = random_lengths(generator, count, 1000)
        packed = packed_lengths(lengths, 1000, dp)
        assert len(packed) == dp and len({len(group) for group in packed}) == 1
        micro_batches = sum(packed, [])
        assert sorted(sum(micro_batches, [])) == list(range(count))
        assert all(sum(lengths[i] for i in micro) <= 1000 for micro in micro_batches)
        least = -(-sum(lengths) // (1000 * dp))
        assert len(packed[0]) <= max(1, 1.3 * least + 1)
        assert packed == packed_lengths(lengths, 1000, dp)


def test_micro_batches_run_at_the_same_time_with_similar_cost():
    lengths = [1000, *[10] * 100]  # equal tokens, but attention makes the work unequal
    assert [0] in [group[0] for group in packed_lengths(lengths, 2000, 2, 100.0)]
    generator = random.Random(0)
    lengths = random_lengths(generator, 512, 4000)
    packed = packed_lengths(lengths, 8000, 4)
    costs = np.array(
        [[sum(sequence_cost(lengths[i]) for i in micro) for micro in group] for group in packed]
    )
    assert (costs.max(axis=0).sum() / costs.mean(axis=0).sum()) < 1.05
    assert costs.sum(axis=1).max() / costs.sum(axis=1).mean() < 1.03


def test_a_long_document_costs_less_under_windows():
    """It is alone where every layer sees all of it; with windows its cost grows with its length."""
    lengths, windows = [1000, *[10] * 140], (20,) * 5
    assert sequence_cost(1000, 0, 100.0, windows) == 1000 + (2 * 1000 * 20 - 20**2) / 100
    dataset = dataset_of(*zip(lengths))
    more = {"tokens_per_microbatch": 2000, "data_parallel_size": 2, "attention_length": 100.0}
    for how, others in (((), 0), (windows, 7)):
        loader = StepLoader(dataset, 141, windows=how, **more)
        (found,) = loader.micro_batches(dataset, list(range(141)))
        assert len(found) == 1 + others


def dataset_of(*lengths):
    """A dataset of examples whose sequences have these lengths."""
    return ListDataset(
        "any", [tuple(Sequence(range(n), [1] * n) for n in own) for own in lengths]
    )


def test_steps_hold_the_same_examples_on_every_topology():
    dataset = dataset_of(*zip(random_lengths(random.Random(2), 53, 400)))
    reference = StepLoader(dataset, 8, tokens_per_microbatch=500, seed=3)
    assert reference.steps_per_epoch == 7
    for dp in (1, 2, 4):
        for packing_seed in (None, 5):
            options = {"data_parallel_size": dp, "packing_seed": packing_seed, "seed": 3}
            group = [
                ShuffledLoader(dataset, 8, tokens_per_microbatch=500, dp_rank=r, **options)
                for r in range(dp)
            ]
            for epoch, k in ((0, 0), (0, 6), (2, 3)):
                steps = [loader.step(epoch, k) for loader in group]
                assert len({len(step) for step in steps}) == 1
                micro_batches = sum(steps, [])
                assert all(micro_batches)  # one without examples knows their columns
                examples = sum(micro_batches, [])
                served = [e.index for e in examples if len(e.sequences[0].tokens)]
                assert sorted(served) == sorted(reference.indices(epoch, k))
    assert len(reference.indices(0, 6)) == 5  # the last, smaller step is kept


def test_order_depends_on_seed_and_epoch_alone():
    dataset = dataset_of(*[[10]] * 100)

    def order(epoch=0, examples=8, budget=500, seed=1, **options):
        options |= {"tokens_per_microbatch": budget, "seed": seed}
        return StepLoader(dataset, examples, **options).order(epoch).tolist()

    assert sorted(order()) == list(range(100)) == order(3, shuffle=False) != order()
    assert order() == order(examples=16, budget=50, data_parallel_size=2)
    assert order() != order(seed=2) and order() != order(epoch=1)
    # written down: no library may change it
    assert [*shuffled(8, 1, 2)] == [4, 3, 5, 0, 1, 7, 6, 2]


def test_source_weights_repeat_and_sample():
    dataset, given = dataset_of(*[[10]] * 30), {"tokens_per_microbatch": 500}
    dataset.sources, dataset.source_weights = np.arange(30) // 10 > 0, [2.0, 0.5]
    loader = StepLoader(dataset, 7, **given)
    counts = [np.bincount(loader.order(epoch), minlength=30) for epoch in range(8)]
    assert loader.examples_per_epoch == 30 and loader.steps_per_epoch == 5
    for count in counts:
        assert (count[:10] == 2).all() and count[10:].max() == 1 and count[10:].sum() == 10
    assert (sum(counts)[10:] > 0).all()  # another half each epoch
    odd = copy(dataset)
    odd.sources = np.arange(30) >= 25  # of which half are two and a half
    orders = [StepLoader(odd, 7, **given).order(epoch) for epoch in (0, 1)]
    assert {*range(25, 30)} <= {*np.concatenate(orders)}
    assert StepLoader(dataset, 7, **given, shuffle=False).examples_per_epoch == 30
    dataset.source_weights = [0.01, 0.01]
    with pytest.raises(ValueError, match=r"leave no example of rows in an epoch, which has 10"):
        check_examples(stage_of(check({"stage": "sft"})), dataset, None)


def test_a_long_example_is_refused_before_any_step_with_the_number_to_raise():
    sentence = r"longest example has 30 tokens but .*tokens_per_microbatch is 20; raise it to at least 30"
    config = check({"stage": "sft", "batch": {"tokens_per_microbatch": 20}})
    with pytest.raises(ValueError, match=sentence):
        check_examples(stage_of(config), dataset_of([10, 20], [4, 5]), None)
