"""Gradients of all ranks add up to each rank's slice: exactly, whatever the nodes, buckets and micro-batches."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import rows_of
from tests.engine_case import SHAPE, Case, sequences, zero_engine
from tests.harness import device, full, run_distributed
from tests.memory_case import assert_same_gradients
from tests.zero_case import filled, whole_gradients
from ulysses.gradients.policy import StepContext
from ulysses.gradients.ulysses_pro import GradientNoise
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.run.build import parameter_groups
from ulysses.zero.across_ranks import ranks_of_a_node
from ulysses.zero.construct import initialize_distributed

WORLD = 4
# the ranks divide no size
ODD = replace(SHAPE, hidden_size=27, intermediate_size=45, head_dim=6)
CASE = Case("sft", shape=ODD, dtype=torch.bfloat16, attention="reference")


def batch(seed):
    return pack_shard(sequences(2, seed), ParallelMesh(1), device())


def reduced(node_size, bucket):
    """Take two steps of three micro-batches, and compare the gradients with the sum of all ranks' own."""
    engine, _ = zero_engine(CASE, node_size=node_size, raw={"reduce_bucket_size": bucket})
    plain = filled(CASE.model(None), CASE.weights()).to(device(), CASE.dtype)
    for step in range(2):
        wanted = {
            name: torch.zeros_like(p.data).double() for name, p in plain.named_parameters()
        }
        for micro in range(3):
            given = batch(100 * step + 10 * micro + dist.get_rank())
            ours, theirs = (
                (model(given).logps * given.loss_weights).sum() for model in (engine, plain)
            )
            engine.backward(ours)
            plain.zero_grad()
            theirs.backward()
            for name, p in plain.named_parameters():
                total = p.grad.double()
                dist.all_reduce(total)
                wanted[name] += total / WORLD
        exact = {name: total.cpu() for name, total in wanted.items()}
        assert_same_gradients(whole_gradients(engine.gradients()), exact, 1e-6)
        engine.skip_step()


@pytest.mark.parametrize(
    "node_size, bucket", [(4, 50), (2, 1), (1, 50), *full((4, 1), (2, 10**6))]
)
def test_every_slice_is_the_mean_of_all_ranks(node_size, bucket):
    run_distributed(reduced, WORLD, node_size, bucket, deterministic=True)


def of_one_micro_batch(eight_bit):
    """Take steps with and without sums, and compare the master weights bit by bit.

    The third step has two micro-batches, the fourth one again, and a policy writes to the slices of the second.
    """
    groups = partial(parameter_groups, weight_decay=0.1, eight_bit=eight_bit)
    engines = [zero_engine(CASE, groups=groups)[0] for _ in range(2)]
    noise = GradientNoise(ratio=0.1)
    for step, micro_batches in enumerate((1, 1, 2, 1)):
        for engine, keeps in zip(engines, (True, False)):
            for micro in range(micro_batches):
                given = batch(10 * step + micro)
                loss = (engine(given).logps * given.loss_weights).sum()
                engine.backward(loss, only_microbatch=keeps and micro_batches == 1)
            gradients = engine.gradients()
            # several micro-batches make sums, which stay
            apart = keeps and step < 2
            own = {e.grad.dtype for e in gradients.entries}
            assert own == {torch.bfloat16 if apart else torch.float32}
            assert all((one.master.grad is None) == apart for one in engine.sub_groups)
            gradients.scale(0.5)
            if step == 1:
                noise.apply(gradients, StepContext(step=step, total_steps=4))
                assert {e.grad.dtype for e in gradients.entries} == {torch.float32}
            engine.step(gradients, 1e-2)
        for s, t in zip(engines[0].slices, engines[1].slices, strict=True):
            assert torch.equal(s.state("master"), t.state("master")), (step, s.name)
            assert torch.equal(s.parameter, t.parameter), (step, s.name)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_gradients_of_a_single_micro_batch_need_no_sums(eight_bit):
    run_distributed(of_one_micro_batch, 1, eight_bit, deterministic=True)


def without_one_gradient():
    """Back-propagate through all but the last norm and the head, as if something else had taken their gradients."""
    engine, _ = zero_engine(CASE)
    engine.backward(engine.module.model(batch(0)).sum())
    with pytest.raises(RuntimeError) as refusal:
        engine.gradients()
    return str(refusal.value)


def test_a_gradient_that_never_came_is_an_error_with_the_parameters_name():
    """Zeros in its place would go unnoticed: the other parameters would go on learning."""
    told = "2 of 21 trained parameters received no gradient in this step, the first is lm_head.weight"
    for text in run_distributed(without_one_gradient, 2):
        assert text.startswith(told), text


def asks_no_driver(weights):
    """Step where a question about pinned memory is an error, as after a fork from a process with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: 1 / 0)
        engine, _ = zero_engine(CASE, resident=weights == "resident")
        engine.backward(engine(batch(0)).logps.sum())
        engine.step(engine.gradients(), 1e-3)


@pytest.mark.parametrize("weights", ["resident", "sharded"])
def test_a_process_without_a_gpu_asks_for_no_pinned_memory(weights):
    run_distributed(asks_no_driver, 2, weights, cpu=True)


def nodes(local_size, place):
    """Start as deepspeed's launcher does (LOCAL_SIZE) or as one that sets nothing; `place` replaces LOCAL_RANK."""
    del os.environ["LOCAL_WORLD_SIZE"]
    if local_size is not None:
        os.environ["LOCAL_SIZE"] = local_size
    if place is not None:
        os.environ["LOCAL_RANK"] = str((int(os.environ["RANK"]) + place) % 2)
    initialize_distributed()
    return os.environ["LOCAL_WORLD_SIZE"], ranks_of_a_node()


# what the launcher says, the ranks of a node that it comes to, and the ranks of a node that are reduced together
NODES = """
"2" => 0 => "2" => 2
null => null => "4" => 4
"3" => null => "3" => 4
"2" => 1 => "2" => 4
"""


@pytest.mark.parametrize("row", rows_of(NODES))
def test_nodes_are_what_the_launcher_says_if_ranks_lie_in_their_order(row):
    local_size, place, *wanted = map(json.loads, row)
    found = run_distributed(nodes, WORLD, local_size, place, cpu=True)
    assert found == [(*wanted,)] * WORLD
