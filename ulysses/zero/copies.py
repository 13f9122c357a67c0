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

HASHED = 1 << 22  # elements at a time


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
    """Return a sum over the tensor's bits that knows their places, int64: any single change of an element shows."""
    kind = getattr(torch, f"int{8 * tensor.element_size()}")
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, part in enumerate(tensor.reshape(-1).view(kind).split(HASHED)):
        # odd factors, all different: none loses a bit
        first = 2 * i * HASHED + 1
        places = torch.arange(first, first + 2 * len(part), 2, device=tensor.device)
        found += (part.long() * places).sum()
    return found
