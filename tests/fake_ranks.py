"""Ranks as threads: gradient slices and collectives without processes; and the parameters that the tests use."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ulysses.gradients import Gradients, GradientSlice, StepContext, TorchGradients, build_chain

# rows of 7, 13 and 300 straddle any even split; one matrix is longer than two noise blocks; one vector has one element
SHAPES = {
    "embed.weight": (11, 7), "mlp.weight": (5, 13), "norm.weight": (9,), "conv": (3, 2, 5), "scalar": (1,)
}  # fmt: skip
LARGE = {"wide.weight": (450, 300)}


def parameters(shapes=SHAPES, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = nn.Parameter(torch.randn(shape, generator=g))
        made[name].grad = scale * torch.randn(shape, generator=g)
    return made


def of_norm(norm):
    """One parameter whose gradient has the norm."""
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), norm / 2)
    return {"p": p}


def context(step=0, loss=1.0):
    return StepContext(step, 100, loss=loss, lr=1e-3, seed=3)


def act(policy, named, *step):
    """Apply a gradient policy, or a chain, to whole gradients; return its report and the step's context."""
    told = context(*step)
    return policy.apply(TorchGradients(named.items()), told), told


def grads_of(named):
    return {n: p.grad.clone() for n, p in named.items()}


class FakeWorld:
    """Threads that meet at a barrier: every rank sees only its slices, and reduces through here."""

    def __init__(self, size: int) -> None:
        self.size, self.board, self.calls = size, [None] * size, 0
        self.barrier = threading.Barrier(size, timeout=600)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, which it no longer changes; all ranks call this together."""
        self.board[rank] = value
        self.barrier.wait()
        found = [*self.board]
        self.calls += rank == 0
        self.barrier.wait()
        return found

    def view(
        self, named: dict[str, nn.Parameter], rank: int, groups: dict[str, str] | None = None
    ) -> Gradients:
        """This rank's slices: the gradients themselves, not copies."""

        def all_reduce(tensor: Tensor) -> Tensor:
            return torch.stack(self.gather(rank, tensor.clone())).sum(0)

        entries = []
        for name, p in named.items():
            share = -(-p.numel() // self.size)
            start = min(rank * share, p.numel())
            grad = p.grad.view(-1)[start : start + share]
            scope = (groups or {}).get(name, "default")
            entries.append(GradientSlice(name, tuple(p.shape), grad, start, scope))
        return Gradients(entries, all_reduce)

    def act(self, *chain: Any, named: dict[str, nn.Parameter], scopes: dict[str, str]) -> Any:
        """Apply the chain of these gradient policies on every rank, and return its report."""

        def on_rank(rank: int) -> dict[str, float]:
            view = self.view(named, rank, scopes)
            report = build_chain(*chain).apply(view, context())
            view.apply_factors()  # an optimizer would multiply while it reads
            return report

        report, *others = self.run(on_rank)
        assert all(other == report for other in others)
        return report

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(function, range(self.size)))
