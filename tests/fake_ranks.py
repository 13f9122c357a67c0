"""Ranks as threads: gradient slices and collectives without processes; and the parameters that the tests use."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ulysses.gradients import Gradients, GradientSlice, StepContext

# rows of 7, 13 and 300 straddle any even split; one matrix is longer than two noise blocks; one vector has one element
SHAPES = {"embed.weight": (11, 7), "mlp.weight": (5, 13), "norm.weight": (9,), "conv": (3, 2, 5), "scalar": (1,)}
LARGE = {"wide.weight": (450, 300)}


def parameters(shapes, seed=0, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = nn.Parameter(torch.randn(shape, generator=g).to(dtype))
        made[name].grad = (scale * torch.randn(shape, generator=g)).to(dtype)
    return made


def context(step=0, total=100, **kwargs):
    return StepContext(step=step, total_steps=total, **({"loss": 1.0, "lr": 1e-3, "seed": 3} | kwargs))


def grads_of(named):
    return {n: p.grad.clone() for n, p in named.items()}


def assert_same_gradients(got, want, rtol=1e-6):
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=1e-6 * float(want[name].abs().max()) + 1e-12)


class FakeWorld:
    """Threads that meet at a barrier: every rank sees only its slices, and reduces through here."""

    def __init__(self, size: int) -> None:
        self.size, self.slots, self.calls = size, [None] * size, 0
        self.barrier = threading.Barrier(size, timeout=20)

    def all_reduce(self, rank: int) -> Callable[[Tensor, str], Tensor]:
        def reduce(tensor, op):
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            stacked = torch.stack(self.slots)
            self.calls += rank == 0
            self.barrier.wait()
            return stacked.sum(0) if op == "sum" else stacked.amax(0)

        return reduce

    def view(self, named: dict[str, nn.Parameter], rank: int, groups: dict[str, str] | None = None) -> Gradients:
        entries = []
        for name, p in named.items():
            size = -(-p.numel() // self.size)
            low, high = min(rank * size, p.numel()), min((rank + 1) * size, p.numel())
            entries.append(
                GradientSlice(
                    name, tuple(p.shape), p.numel(), p.grad.view(-1)[low:high], low,
                    (groups or {}).get(name, "default"), p.detach().view(-1)[low:high],
                )
            )  # fmt: skip
        return Gradients(entries, self.all_reduce(rank))

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        results, errors = [None] * self.size, []

        def work(rank):
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise errors[0]
        return results
