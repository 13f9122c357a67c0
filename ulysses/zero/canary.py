"""Try the installed DeepSpeed on a tiny model before a run builds its own.

The engine uses much of DeepSpeed that is not documented (deepspeed_internals.py). A release that changed any of it
could train on with wrong gradients. So a model of a few hundred weights takes one step through the real engine, and
the outputs of its new weights are compared with those of plain torch.
"""

import gc
import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import __version__ as installed
from torch import Tensor, nn

from ulysses.parallel.mesh import gather
from ulysses.zero.construct import build_partitioned
from ulysses.zero.deepspeed_internals import TESTED
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive

WIDTH, ROWS, MICRO_BATCHES = 9, 4, 2  # 81 elements do not divide into equal slices
# So large an eps makes AdamW's first update proportional to the gradient, which it would only take the sign of.
ADAMW: dict[str, Any] = {"lr": 50.0, "eps": 100.0, "weight_decay": 0.0, "foreach": False}
# relative, in float32; after a missing, doubled or badly scaled gradient the outputs are off by far more
TOLERANCE = 1e-4


class _Unit(nn.Linear):
    """A leaf module, as decoder layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


def _tiny() -> nn.Sequential:
    return nn.Sequential(_Unit(WIDTH, WIDTH), _Unit(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _waves(*shape: int) -> Tensor:
    """Return values that every rank computes alike."""
    return torch.arange(math.prod(shape), dtype=torch.float32).mul(0.7).sin().div(3).view(shape)


def check_deepspeed(device: torch.device) -> None:
    """Refuse a DeepSpeed whose gradients or updates are wrong in this engine; all ranks call it together.

    Raises:
        RuntimeError: on every rank, naming the installed and the tested version.
    """
    # DeepSpeed collects garbage whenever an engine starts: a third of a second over all that has been imported.
    gc.freeze()
    try:
        right, reason = _trains_correctly(device), "its gradients or updates are wrong"
    except Exception as failure:
        right, reason = False, f"{type(failure).__name__}: {failure}"
    finally:
        gc.unfreeze()
    if not all(gather(right)):
        raise RuntimeError(
            f"deepspeed {installed} does not train correctly with this engine ({reason}); install deepspeed {TESTED}"
        )


def _trains_correctly(device: torch.device) -> bool:
    """Take one step and compare the outputs of the new weights with those of plain torch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = _waves(MICRO_BATCHES, world, ROWS, WIDTH).to(device)
    plain = _tiny()
    for p in plain.parameters():
        p.data = _waves(*p.shape).to(device)

    def fill(_: str, shape: torch.Size, start: int, out: Tensor) -> None:
        out.copy_(_waves(*shape).flatten()[start : start + len(out)])

    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH}
    settings = derive(dtype=torch.float32, raw=small)
    model = build_partitioned(_tiny, settings, fill)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = ZeroEngine(model.train(), settings, optimizer, (_Unit,))
    for k, micro_batch in enumerate(inputs, 1):
        loss = engine(micro_batch[rank].requires_grad_()).square().sum()
        engine.backward(loss, last=k == MICRO_BATCHES)
    engine.gradients()  # refuses to go on without all of them
    engine.step([ADAMW["lr"]])
    (plain(inputs).square().sum() / world).backward()
    torch.optim.AdamW(plain.parameters(), **ADAMW).step()
    with engine.inference():
        found, wanted = engine(inputs[0, rank]), plain(inputs[0, rank])
    engine.reduction.close(release=True)
    engine.destroy()
    return float((found - wanted).norm() / wanted.norm()) <= TOLERANCE
