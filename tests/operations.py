"""Tensor operations, as they are called."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Note every operation that is called while this is entered, and the shapes of the tensors that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.called.append(function)
        self.shapes += [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out
