"""Try the installed DeepSpeed on a tiny model before a run builds its own.

The engine uses much of DeepSpeed that is not documented (deepspeed_internals.py). A release that changed any of it
could train on with wrong gradients. So a model of a few hundred weights takes one step through the real engine, and
its gradients and new weights are compared with plain torch.
"""

import gc

import torch
import torch.distributed as dist
from deepspeed import __version__ as installed
from torch import Tensor, nn

from ulysses.zero.construct import build_partitioned
from ulysses.zero.deepspeed_internals import TESTED
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive

WIDTH, ROWS, MICRO_BATCHES, LR = 9, 4, 2, 0.5
TOLERANCE = (
    1e-4  # relative, in float32; a missing, doubled or badly scaled gradient is off by far more
)


class _Unit(nn.Module):
    """A leaf module, as decoder layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class _Tiny(nn.Module):
    """Two units and parameters outside of them; 81 elements do not divide into equal slices."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([_Unit(), _Unit()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.head(x).square().sum()


class _Waves:
    """Values that every rank computes alike, on any device."""

    def slice(self, name, shape, start, stop, dtype, device) -> Tensor:  # type: ignore[no-untyped-def]
        return (torch.arange(start, stop, dtype=torch.float64) * 0.7 + len(name)).sin().to(
            device, dtype
        ) / 3


def check_deepspeed(device: torch.device) -> None:
    """Refuse a DeepSpeed whose gradients or updates are wrong in this engine; all ranks call it together.

    Raises:
        RuntimeError: on every rank, naming the installed and the tested version.
    """
    # DeepSpeed collects garbage whenever an engine starts: a third of a second over all that has been imported.
    gc.freeze()
    try:
        error, reason = _worst_error(device), "its gradients or updates are wrong"
    except (
        AttributeError,
        TypeError,
        KeyError,
        AssertionError,
        RuntimeError,
        ValueError,
    ) as failure:
        error, reason = float("inf"), f"{type(failure).__name__}: {failure}"
    finally:
        gc.unfreeze()
    worst = torch.tensor(error, dtype=torch.float64, device=device).nan_to_num(nan=float("inf"))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if float(worst) > TOLERANCE:
        raise RuntimeError(
            f"deepspeed {installed} does not train correctly with this engine ({reason}); install deepspeed {TESTED}"
        )


def _worst_error(device: torch.device) -> float:
    """Take one step and return the largest relative difference to plain torch on this rank's slices."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = _Waves().slice(
        "x", None, 0, world * MICRO_BATCHES * ROWS * WIDTH, torch.float32, device
    )
    inputs = inputs.view(MICRO_BATCHES, world, ROWS, WIDTH)
    plain = _Tiny().to(device)
    for name, p in plain.named_parameters():
        p.data.copy_(_Waves().slice(name, None, 0, p.numel(), p.dtype, device).view(p.shape))
    (plain(inputs) / world).backward()

    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH}
    settings = derive(dtype=torch.float32, raw={"zero_optimization": small})
    model = build_partitioned(_Tiny, settings, _Waves())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = ZeroEngine(model.train(), settings, optimizer, (_Unit,))
    with engine.inference():
        engine(inputs[0, rank])
    for k in range(MICRO_BATCHES):
        loss = engine(inputs[k, rank].requires_grad_())
        engine.backward(loss, last=k == MICRO_BATCHES - 1)
    wanted = {name: p.grad.flatten() for name, p in plain.named_parameters()}
    errors = [_error(e.grad, wanted[e.name], e.start) for e in engine.gradients()]
    engine.step([LR])
    with engine.inference():
        after = engine(inputs[0, rank])
    with torch.no_grad():
        for p in plain.parameters():
            p -= LR * p.grad
        errors.append(_error(after.view(1), plain(inputs[0, rank]).view(1), 0))
    engine.reduction.close(release=True)
    engine.destroy()
    return max(errors)


def _error(found: Tensor, whole: Tensor, start: int) -> float:
    wanted = whole[start : start + found.numel()]
    return float((found - wanted).norm() / whole.norm())
