"""Save a ZeRO-3 engine's state as flat slices with an index, on any number of ranks.

    rank-00003.master.safetensors   {"data": float32 [sum of lengths]}     also .exp_avg and .exp_avg_sq
    rank-00003.json                 run, step                              which run wrote them, and when
                                    digests: {file: digest}                of what was written
                                    pieces: [[name, start, length, offset], ...]   which part of each parameter is where

Element i of parameter `name` is found by its position in the flattened parameter, so any other partition of
the same parameters can read exactly what it needs (saved_slices.py); padding is never stored. Copies of weights that
stay whole on every rank are compared before.
"""

import json
from itertools import accumulate, chain
from pathlib import Path
from statistics import mode
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.disk import write_digested
from ulysses.environment import NODE
from ulysses.parallel.mesh import gather
from ulysses.zero.partition import shard_of

KINDS = ("master", "exp_avg", "exp_avg_sq")
HASHED = 1 << 18  # numbers of eight bytes at a time
FACTOR = 0x5DEECE66D  # odd


def save_state(engine: Any, folder: Path, record: dict[str, Any]) -> dict[str, str]:
    """Write this rank's master weights and AdamW moments into `folder`; every rank calls it.

    Return the names of its files with the digests of what was written. The index holds them too, with `record`: the id
    of the run, and the step.
    """
    stem = f"rank-{dist.get_rank():05d}"
    slices = [s for s in engine.slices if s.length]
    *starts, count = accumulate((s.length for s in slices), initial=0)
    digests: dict[str, str] = {}
    data = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    header = json.dumps({"data": data}).encode()
    header += b" " * (-len(header) % 8)
    start = [len(header).to_bytes(8, "little"), header]
    for kind in KINDS:  # slice by slice: never more than one of them is copied to host memory
        states = (s.state(kind) for s in slices)
        # a copy in any case: torch would never give back memory that numpy has shared
        parts = (state.to("cpu", copy=True).numpy() for state in states)
        name = f"{stem}.{kind}.safetensors"
        digests[name] = write_digested(folder / name, chain(start, parts))
    record |= {
        "updates": engine.sub_groups[0].updates,
        "digests": digests,
        "pieces": [[s.name, s.start, s.length, at] for s, at in zip(slices, starts)],
    }
    name = f"{stem}.json"
    return digests | {name: write_digested(folder / name, [json.dumps(record).encode()])}


@torch.no_grad()
def check_copies(engine: Any) -> None:
    """Compare the ranks' copies of every parameter, if they have any; all ranks call it together.

    A bit that flips in the memory of one of them would be trained on, and saved.
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
