"""The groups of parameters that AdamW treats alike, and the learning rate of each step."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ulysses.config.schema import OptimizerSection
from ulysses.zero.update import ParameterGroup


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    scopes: dict[str, float] | None = None,
    **adamw: Any,
) -> list[ParameterGroup]:
    """Split the trainable parameters into groups: matrices decay, norms and biases do not. A group has one dtype.

    Args:
        scopes: submodules with a factor for their learning rate; each has groups of its own, and the first one takes
            all parameters that are in no other. None is one scope for all.
        adamw: further fields of every group: betas, eps and eight_bit.
    """
    rates = scopes or {"default": 1.0}
    members: dict[tuple[str, bool, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            first = name.partition(".")[0]
            scope = first if first in rates else next(iter(rates))
            # a sharded parameter is itself empty between its uses
            shape = getattr(p, "shard", p).shape
            # the biases of experts have two dimensions
            decays = len(shape) > 1 and "_bias" not in name
            members[scope, decays, p.dtype].append(p)
    return [
        ParameterGroup(
            parameters, weight_decay if decays else 0.0, scope, rates[scope], **adamw
        )
        for (scope, decays, _), parameters in members.items()
    ]


def learning_rate(step: int, total: int, config: OptimizerSection) -> float:
    """Return the learning rate of step `step` (0-based) out of `total`.

    Warm-up rises linearly and reaches the peak on its last step; then linear or cosine decay to min_lr * lr,
    constant, or WSD (constant, then linear decay over the last decay_fraction of all steps).
    """
    warmup = int(config.warmup) if config.warmup >= 1 else math.ceil(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    decay = max(1, round(config.decay_fraction * total))  # steps of WSD's decay
    decayed = {  # the share of the way from the peak to the floor
        "constant": 0.0,
        "linear": progress,
        "cosine": 0.5 - 0.5 * math.cos(math.pi * progress),
        "wsd": max(0.0, (step - (total - decay)) / decay),
    }
    return config.lr * (1 - (1 - config.min_lr) * decayed[config.schedule])
