"""Move small host tensors to the device without making the host wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to the device; towards a GPU through pinned memory, without blocking."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
