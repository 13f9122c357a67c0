"""Save a ZeRO-3 engine's state as flat slices with an index, on any number of ranks.

    rank-00003.master.safetensors   {"data": float32 [sum of lengths]}     also .exp_avg and .exp_avg_sq
    rank-00003.json                 run, step                              which run wrote them, and when
                                    digests: {file: digest}                of what was written
                                    pieces: [[name, start, length, offset], ...]   which part of each parameter is where

Element i of parameter `name` is found by its position in the flattened parameter, so any other partition of
the same parameters can read exactly what it needs (saved_slices.py); padding is never stored.
"""

import json
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ulysses.disk import write_digested

KINDS = ("master", "exp_avg", "exp_avg_sq")


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
