"""Compare the ranks' copies of weights that stay whole.

A bit that flips in the memory of one of them would be trained on, and saved.
"""

from statistics import mode

import torch
from torch import Tensor

from ulysses.environment import NODE
from ulysses.parallel.mesh import gather
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.partition import shard_of

HASHED = 1 << 18  # numbers of eight bytes at a time
FACTOR = 0x5DEECE66D  # odd


@torch.no_grad()
def check_copies(engine: ZeroEngine) -> None:
    """Compare the ranks' copies of every parameter, if they have any; all ranks call it together.

    Raises FloatingPointError naming a rank and the parameter of which it holds another copy than most.
    """
    names, parameters = zip(*engine.module.named_parameters())
    if shard_of(parameters[0]).whole is None:
        return
    engine.weights.wait(parameters)
    own = torch.stack([bits_hash(p.data) for p in parameters])
    nodes, copies = zip(*gather((NODE, own.tolist())))
    for name, of_ranks in zip(names, zip(*copies)):
        usual = mode(of_ranks)
        for rank, copy in enumerate(of_ranks):
            if copy != usual:
                other = of_ranks.index(usual)
                raise FloatingPointError(
                    f"{name} of rank {rank} on {nodes[rank]} is not that of rank {other} on {nodes[other]}, though "
                    "each holds a copy: the memory or the processor of one of them has made an error, and nothing is "
                    "saved of this step; leave that machine out and continue with --run.resume auto"
                )


def bits_hash(tensor: Tensor) -> Tensor:
    """Return a sum over the tensor's bytes that knows their places, int64: any single change of a number shows."""
    data = tensor.reshape(-1).view(torch.uint8)
    rest = len(data) % 8
    # odd factors, all different: none loses a bit
    places = torch.arange(1, 2 * HASHED, 2, device=tensor.device)
    found = (data[len(data) - rest :] * places[:rest]).sum()
    for part in data[: len(data) - rest].view(torch.int64).split(HASHED):
        found = found * FACTOR + (part * places[: len(part)]).sum()
    return found
