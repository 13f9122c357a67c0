"""The one precision rule of the losses: float32 inside, float64 stays; gradients take the input's dtype."""

import torch
from torch import Tensor


def at_least_float32(value: Tensor) -> Tensor:
    """Return `value` as float32, or unchanged if it is float32 or float64 already."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
