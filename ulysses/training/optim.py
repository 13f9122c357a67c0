"""AdamW's parameter groups and the learning rate as a pure function of the step."""

import math

import torch
from torch import nn

from ulysses.training.config import OptimizerSection


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split the trainable parameters: matrices decay, norms and biases do not; empty groups are left out."""
    decay, rest = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(
                parameter, "ds_shape", parameter.shape
            )  # a partitioned parameter is empty; ds_shape is its real shape
            (decay if len(shape) >= 2 else rest).append(parameter)
    groups = [
        {"params": decay, "weight_decay": weight_decay, "name": "decay"},
        {"params": rest, "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [g for g in groups if g["params"]]


def scoped_groups(
    model: nn.Module, weight_decay: float, scopes: dict[str, float]
) -> list[dict[str, object]]:
    """Split each submodule in `scopes` by itself; its learning rate is multiplied by the factor given there."""
    found = []
    for scope, factor in scopes.items():
        for group in parameter_groups(model.get_submodule(scope), weight_decay):
            found.append(
                {**group, "name": f"{scope} {group['name']}", "scope": scope, "lr_factor": factor}
            )
    return found


def adamw(
    model: nn.Module,
    config: OptimizerSection,
    *,
    on_gpu: bool,
    groups: list[dict[str, object]] | None = None,
) -> torch.optim.AdamW:
    """Create AdamW (Loshchilov & Hutter 2019) over `parameter_groups` or `groups`, fused if its state is on a GPU."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay) if groups is None else groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=on_gpu,
        foreach=False if not on_gpu else None,
    )


def learning_rate(step: int, total: int, config: OptimizerSection) -> float:
    """Return the learning rate of step `step` (0-based) out of `total`.

    Warm-up rises linearly and reaches the peak on its last step; then linear or cosine decay to min_lr * lr,
    constant, or WSD (constant, then linear decay over the last decay_fraction of all steps).
    """
    warmup = int(config.warmup) if config.warmup >= 1 else math.ceil(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    left = max(1, total - warmup)
    progress = min(1.0, (step - warmup) / left)
    floor = config.min_lr
    if config.schedule == "constant":
        factor = 1.0
    elif config.schedule == "linear":
        factor = 1 - (1 - floor) * progress
    elif config.schedule == "cosine":
        factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay = max(1, round(config.decay_fraction * total))
        factor = 1 - (1 - floor) * max(0.0, (step - (total - decay)) / decay)
    return config.lr * factor
