"""The shapes that the losses take: tensors that belong together have one shape, so that nothing is broadcast."""

from torch import Tensor


def check_shapes(rule: str, axes: int | None, *tensors: Tensor | None) -> None:
    """Raise ValueError unless the tensors have one shape; None stands for one that is left out.

    Args:
        rule: "names: what they must be", for the error.
        axes: of the shape; None is any number.
    """
    shapes = [list(x.shape) for x in tensors if x is not None]
    if any(x != shapes[0] or axes not in (None, len(x)) for x in shapes):
        names, _, must = rule.partition(": ")
        must = must or "they must have one shape"
        raise ValueError(f"{names} with shapes {shapes} will not do: {must}")
