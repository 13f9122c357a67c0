"""Gradients of all ranks add up to each rank's slice: exactly, whatever the nodes, buckets and micro-batches."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import full, run_distributed
from tests.zero_case import in_nodes_of
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.deepspeed_internals import ParameterSlice
from ulysses.zero.reduce import GradientReduction, ranks_of_a_node

WORLD, MICRO_BATCHES, STEPS = 4, 3, 2


class Odd(nn.Module):
    """A unit and a parameter outside of it; the ranks divide no size, and one has fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(13, 7, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x)[:, :3] * self.scale


def slices_of(
    model: nn.Module, where: torch.device, on_host: bool = False
) -> dict[str, ParameterSlice]:
    """Cut every parameter as ZeRO-3 does; the gradients hold no number yet."""
    slices = {}
    for name, p in model.named_parameters():
        size = -(-p.numel() // dist.get_world_size())
        start = min(dist.get_rank() * size, p.numel())
        memory = {
            "device": "cpu" if on_host else where,
            "pin_memory": on_host and where.type == "cuda",
        }
        grad = torch.full((min(size, p.numel() - start),), float("nan"), **memory)
        slices[name] = ParameterSlice(
            name, p.shape, p.numel(), grad, start, parameter=p, size=size, master=grad, offset=0
        )
    return slices


def reduced(
    node_size: int, bucket: int, on_host: bool
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return this rank's slices after each step, beside what they should be."""
    where, rank = initialize_distributed(), dist.get_rank()
    torch.manual_seed(0)
    model = Odd().to(where)
    plain, slices = copy.deepcopy(model), slices_of(model, where, on_host)
    in_nodes_of(node_size)
    reduction = GradientReduction(slices.values(), [model.unit], where, bucket=bucket)
    found = []
    for step in range(STEPS):
        wanted: dict[str, Tensor] = {}
        for micro in range(MICRO_BATCHES):
            torch.manual_seed(1000 * step + 10 * micro + rank)
            x = torch.randn(11, 13, device=where, dtype=torch.bfloat16, requires_grad=True)
            model(x).float().square().sum().backward()
            reduction.finish()
            plain.zero_grad()
            plain(x).float().square().sum().backward()
            for name, p in plain.named_parameters():
                total = p.grad.flatten().double()
                dist.all_reduce(total)
                wanted[name] = wanted.get(name, 0) + total.cpu() / WORLD
        reduction.wait()
        assert all(p.grad is None for p in model.parameters())
        found.append(
            {
                n: (s.grad.cpu().clone(), wanted[n][s.start :][: len(s.grad)])
                for n, s in slices.items()
            }
        )
        reduction.forget()
    reduction.close()
    return found


@pytest.mark.parametrize(
    ("node_size", "bucket", "on_host"),
    [(4, 50, True), (2, 1, False), (1, 50, True), *full((4, 1, False), (2, 10**6, False))],
)
def test_every_slice_is_the_mean_of_all_ranks(node_size, bucket, on_host):
    ranks = run_distributed(reduced, WORLD, node_size, bucket, on_host)
    for steps in ranks:
        for pairs in steps:
            for name, (slice_, wanted) in pairs.items():
                torch.testing.assert_close(
                    slice_.double(), wanted, rtol=1e-6, atol=1e-6, msg=name
                )
    assert sum(pairs[0]["unit.weight"][0].numel() for pairs in ranks) == 7 * 13


def without_one_gradient() -> str:
    """Back-propagate through the unit alone, as if something else had taken the other parameter's gradient."""
    where = initialize_distributed()
    model = Odd().to(where)
    reduction = GradientReduction(
        slices_of(model, where).values(), [model.unit], where, bucket=1
    )
    model.unit(
        torch.ones(2, 13, device=where, dtype=torch.bfloat16, requires_grad=True)
    ).sum().backward()
    reduction.finish()
    with pytest.raises(RuntimeError) as refusal:
        reduction.wait()
    return str(refusal.value)


def test_a_gradient_that_never_came_is_an_error_with_the_parameters_name():
    """Zeros in its place would go unnoticed: the other parameters would go on learning."""
    for text in run_distributed(without_one_gradient, 2):
        assert text.startswith(
            "1 of 3 trained parameters received no gradient in this step, the first is scale"
        )


def nodes(local_size: str | None, place: int | None) -> tuple[str, int]:
    """Start as deepspeed's launcher does (LOCAL_SIZE) or as one that sets nothing; `place` replaces LOCAL_RANK."""
    del os.environ["LOCAL_WORLD_SIZE"]
    if local_size is not None:
        os.environ["LOCAL_SIZE"] = local_size
    if place is not None:
        os.environ["LOCAL_RANK"] = str((int(os.environ["RANK"]) + place) % 2)
    initialize_distributed()
    return os.environ["LOCAL_WORLD_SIZE"], ranks_of_a_node()


@pytest.mark.parametrize(
    ("local_size", "place", "said", "used"),
    [("2", 0, "2", 2), (None, None, "4", 4), ("3", None, "3", 4), ("2", 1, "2", 4)],
)
def test_nodes_are_what_the_launcher_says_if_ranks_lie_in_their_order(
    local_size, place, said, used
):
    assert run_distributed(nodes, WORLD, local_size, place, cpu=True) == [(said, used)] * WORLD
