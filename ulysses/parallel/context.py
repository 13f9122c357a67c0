"""The type of `ctx`, through which an autograd function's forward hands to its backward what that needs."""

from typing import Protocol, TypeVar

from torch import Tensor

Rest = TypeVar("Rest")


class Context(Protocol[Rest]):
    """Tensors go through save_for_backward, and None stays None in saved_tensors; everything else is `rest`."""

    rest: Rest
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
