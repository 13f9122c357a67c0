"""Save and restore a ZeRO-3 engine's state as flat slices with an index, on any number of ranks.

    rank-00003.json                 [[name, start, length, offset], ...]   which part of each parameter lies where
    rank-00003.master.safetensors   {"data": float32 [sum of lengths]}     also .exp_avg and .exp_avg_sq

Element i of parameter `name` is found by its position in the flattened parameter, so any other partition of
the same parameters can read exactly what it needs; padding is never stored.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ulysses.zero.engine import ZeroEngine
from ulysses.zero.host_memory import streaming_memory
from ulysses.zero.slices import KINDS, SavedSlices


class Piece(NamedTuple):
    """A run of one parameter's elements: [start, start + length) of the flattened parameter."""

    name: str
    start: int
    length: int
    group: int  # DeepSpeed sub-group
    offset: int  # in that sub-group's flat partition


def pieces(engine: ZeroEngine) -> list[Piece]:
    """List this rank's real (unpadded) elements in the order of its flat partitions."""
    zero, rank, found = engine.zero, dist.get_rank(), []
    for group, parameters in enumerate(zero.fp16_groups):
        offset = 0
        for p in parameters:
            size = p.partition_numel()
            start = min(rank * size, p.ds_numel)
            length = min(size, p.ds_numel - start)
            if length > 0:
                found.append(Piece(engine.names[id(p)], start, length, group, offset))
            offset += size
    return found


def save_state(engine: ZeroEngine, folder: Path) -> None:
    """Write this rank's master weights and AdamW moments into `folder`; every rank calls it."""
    rank = dist.get_rank()
    mine = pieces(engine)
    index, offset = [], 0
    for piece in mine:
        index.append([piece.name, piece.start, piece.length, offset])
        offset += piece.length
    for kind in KINDS:  # one kind at a time: the copy in host memory is a third of the state
        flats = [_flat(engine, group, kind) for group in range(len(engine.zero.fp16_groups))]
        data = torch.empty(offset)  # filled in place: never a second copy
        for piece, (_, _, length, at) in zip(mine, index, strict=True):
            data[at : at + length] = flats[piece.group].narrow(0, piece.offset, length).detach()
        save_file({"data": data}, folder / f"rank-{rank:05d}.{kind}.safetensors")
    (folder / f"rank-{rank:05d}.json").write_text(
        json.dumps({"step": _optimizer_step(engine), "pieces": index})
    )


@torch.no_grad()
def load_state(engine: ZeroEngine, folder: Path) -> None:
    """Restore this rank's slices from a folder written by any number of ranks; every rank calls it.

    Raises:
        ValueError: if the folder holds other parameters than this model's, naming the first that differs.
    """
    saved = SavedSlices(folder)
    _check_same_parameters(engine, saved)
    for kind in KINDS:
        for piece in pieces(engine):
            saved.read_into(
                _flat(engine, piece.group, kind).narrow(0, piece.offset, piece.length),
                piece.name,
                kind,
                piece.start,
            )
    _set_optimizer_step(engine, saved.step)
    zero = engine.zero
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    zero._post_step(set())  # gathers the small persistent parameters again


def _check_same_parameters(engine: ZeroEngine, saved: SavedSlices) -> None:
    ours = {engine.names[id(p)]: p.ds_numel for group in engine.zero.fp16_groups for p in group}
    for name in [*ours, *saved.places]:
        if saved.numel(name) != ours.get(name, 0):
            raise ValueError(
                f"the checkpoint {saved.folder} belongs to another model: it holds {saved.numel(name)} elements of {name}, "
                f"this model has {ours.get(name, 0)}; resume with the same model and adapters"
            )


def _flat(engine: ZeroEngine, group: int, kind: str) -> torch.Tensor:
    """The flat float32 partition of one sub-group; moments are created (zero) if no update has happened yet."""
    master = engine.zero.fp32_partitioned_groups_flat[group]
    if kind == "master":
        return master
    state = engine.zero.optimizer.state[master]
    if kind not in state:
        fused = any(g.get("fused") for g in engine.zero.optimizer.param_groups)
        state["step"] = torch.zeros(
            (), dtype=torch.float32, device=master.device if fused else "cpu"
        )
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(master, memory_format=torch.preserve_format)
    return state[kind]


def _optimizer_step(engine: ZeroEngine) -> int:
    state = engine.zero.optimizer.state[engine.zero.fp32_partitioned_groups_flat[0]]
    return int(state["step"].item()) if "step" in state else 0


def _set_optimizer_step(engine: ZeroEngine, step: int) -> None:
    for master in engine.zero.fp32_partitioned_groups_flat:
        engine.zero.optimizer.state[master]["step"].fill_(step)


def full_parameters(
    engine: ZeroEngine, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every parameter (whose name is wanted) whole, in the model's order, a module at a time; the tensor only on rank 0 (host copy).

    All ranks must iterate it together; no rank ever holds more than one module's parameters.
    """
    main = dist.get_rank() == 0
    seen: set[int] = set()
    with streaming_memory():
        for module in engine.module.modules():
            own = [
                p
                for p in module.parameters(recurse=False)
                if id(p) not in seen and wanted(engine.names[id(p)])
            ]
            if not own:
                continue
            seen |= {id(p) for p in own}
            with deepspeed.zero.GatheredParameters(own), torch.no_grad():
                copies = [
                    (engine.names[id(p)], p.detach().to("cpu", copy=True) if main else None)
                    for p in own
                ]
            yield from copies
