"""Tiny models under real ZeRO-3, built as a run builds them; tests that need an engine take it from here."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ulysses.zero.deepspeed_internals  # noqa: F401 - which forked ranks then share
from models.initial_weights import InitialWeights
from tests.harness import AS_LARGE, device
from ulysses.gradients.gradients import Gradients, GradientSlice
from ulysses.run.build import parameter_groups
from ulysses.zero.construct import build_partitioned
from ulysses.zero.engine import TrainedEngine, ZeroEngine
from ulysses.zero.settings import derive
from ulysses.zero.update import ParameterGroup, ParameterSlice


class HostWeights(InitialWeights):
    """The values that the formula's model has on the CPU, whatever device the shards lie on."""

    def fill(self, name: str, shape: torch.Size, start: int, out: torch.Tensor) -> None:
        host = torch.empty_like(out, device="cpu")
        super().fill(name, shape, start, host)
        out.copy_(host)


@torch.no_grad()
def filled(model: nn.Module, source: Any) -> nn.Module:
    """Give a whole model the weights of a source, and return it."""
    for name, p in model.named_parameters():
        source.fill(name, p.shape, 0, p.view(-1))
    return model


def trained_engine(
    create: Callable[[], nn.Module],
    source: Any,
    *,
    eps: float = 1e-8,
    groups: Callable[[nn.Module], Sequence[ParameterGroup]] | None = None,
    scopes: dict[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    raw: dict[str, Any] | None = None,
    reduce_between: torch.dtype = torch.float32,
    node_size: int | None = None,
    resident: bool = False,
    offload_optimizer: bool = False,
    **settings: Any,
) -> TrainedEngine:
    """Build a model and its AdamW, partitioned like a large one; `raw`: keys of ZeRO, `settings`: for `derive`."""
    config = derive(dtype=dtype, raw=AS_LARGE | (raw or {}), **settings)
    model = build_partitioned(create, config, source.fill, resident=resident)
    if node_size is not None:  # as a launcher says it
        place = str(dist.get_rank() % node_size)
        os.environ |= {"LOCAL_WORLD_SIZE": str(node_size), "LOCAL_RANK": place}
    chosen = groups(model) if groups else parameter_groups(model, 0.0, scopes)
    return TrainedEngine(
        model.train(),
        config,
        [replace(group, eps=eps) for group in chosen],
        reduce_between=reduce_between,
        offload_optimizer=offload_optimizer,
    )


def frozen_engine(create: Callable[[], nn.Module], source: Any) -> ZeroEngine:
    """Build a model that is not trained."""
    config = derive(dtype=torch.float32, raw=AS_LARGE)
    model = build_partitioned(create, config, source.fill).requires_grad_(False)
    return ZeroEngine(model.eval(), config)


def whole(entry: GradientSlice | ParameterSlice, piece: torch.Tensor) -> torch.Tensor:
    """Put all ranks' pieces of one flattened parameter together, on every rank; all ranks call it together."""
    place = entry.shard if isinstance(entry, ParameterSlice) else entry
    flat = torch.zeros(place.numel, device=device())
    flat[place.start : place.start + len(piece)] = piece
    dist.all_reduce(flat)
    return flat.to(piece.device)


def whole_gradients(gradients: Gradients) -> dict[str, torch.Tensor]:
    """Return every parameter's gradient in host memory; all ranks call it together."""
    sizes = [e.numel for e in gradients.entries]
    flat = torch.zeros(sum(sizes), device=device())
    for e, own in zip(gradients.entries, flat.split(sizes)):
        own[e.start : e.start + len(e.grad)] = e.grad
    dist.all_reduce(
        flat
    )  # one collective: in a test of a tiny model each takes longer than what it sums
    found = zip(gradients.entries, flat.cpu().split(sizes))
    return {e.name: own.view(e.shape) for e, own in found}
