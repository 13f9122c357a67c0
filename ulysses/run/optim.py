"""What changes the weights: AdamW and its parameter groups, gradient policies, and the learning rate of each step."""

import math
from typing import Any

import torch
from torch import nn

from ulysses.config.schema import OptimizerSection


def parameter_groups(
    model: nn.Module, weight_decay: float, scopes: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices decay, norms and biases do not; empty groups are left out.

    Args:
        scopes: "policy" and "value" with factors of their learning rates, which are split by themselves; none is all as
            one.
    """
    groups = []
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for scope, factor in (scopes or {"default": 1.0}).items():
        members = [p for n, p in trained if n.startswith("value.") == (scope == "value")]
        for decays in (True, False):
            # a partitioned parameter is empty; ds_shape is its real shape
            chosen = [
                p for p in members if (len(getattr(p, "ds_shape", p.shape)) > 1) == decays
            ]
            if chosen:
                groups.append(
                    {
                        "params": chosen,
                        "weight_decay": weight_decay * decays,
                        "scope": scope,
                        "lr_factor": factor,
                    }
                )
    return groups


def adamw(groups: list[dict[str, Any]], config: OptimizerSection) -> torch.optim.AdamW:
    """Create AdamW (Loshchilov & Hutter 2019) over parameter groups; on a GPU zero/update.py does its work."""
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False
    )


def learning_rate(step: int, total: int, config: OptimizerSection) -> float:
    """Return the learning rate of step `step` (0-based) out of `total`.

    Warm-up rises linearly and reaches the peak on its last step; then linear or cosine decay to min_lr * lr,
    constant, or WSD (constant, then linear decay over the last decay_fraction of all steps).
    """
    warmup = int(config.warmup) if config.warmup >= 1 else math.ceil(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    decay = max(1, round(config.decay_fraction * total))
    gone = {  # of the way from the peak to the floor
        "constant": 0.0,
        "linear": progress,
        "cosine": 0.5 - 0.5 * math.cos(math.pi * progress),
        "wsd": max(0.0, (step - (total - decay)) / decay),
    }
    return config.lr * (1 - (1 - config.min_lr) * gone[config.schedule])
