"""The shapes that the losses take: tensors that belong together have one shape, so that nothing is broadcast."""

from typing import Any

from torch import Tensor

from .precision import at_least_float32


def check_shapes(rule: str, axes: int | None, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors, those of floats as at least float32; None stands for one that is left out.

    Args:
        rule: "names: what they must be", for the error.
        axes: of the shape; None is any number.

    Raises ValueError unless they have one shape.
    """
    shapes = [list(x.shape) for x in tensors if x is not None]
    if any(x != shapes[0] or axes not in (None, len(x)) for x in shapes):
        names, _, must = rule.partition(": ")
        must = must or "they must have one shape"
        raise ValueError(f"{names} with shapes {shapes} will not do: {must}")
    return [
        at_least_float32(x) if x is not None and x.is_floating_point() else x for x in tensors
    ]
