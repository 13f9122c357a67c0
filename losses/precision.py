"""What all losses take, and in which precision: tensors of one shape, and float32, or float64 for float64 inputs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def at_least_float32(value: Tensor) -> Tensor:
    """Return `value` as float32, or unchanged if it is float32 or float64 already."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def has_wide_products(matrix: Tensor) -> bool:
    """Tell whether this is a half-precision matrix on a GPU, where its products can have float32 results."""
    return matrix.is_cuda and matrix.dtype.itemsize == 2


def wide_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """Return left @ right in `dtype`, added to `total` in place if there is one.

    Half-precision matrices on a GPU may have a float32 product, which the kernel also adds to the total; elsewhere both
    matrices must have the `dtype`. torch.autocast changes none of these products.
    """
    if left.dtype == dtype:
        if total is not None:
            return total.addmm_(left, right)
        # in place, because autocast would round the operands of `left @ right`
        return left.new_empty(len(left), right.shape[1]).addmm_(left, right, beta=0)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass whose own derivative is asked for, and would be 0 without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the operation has no second derivative; leave out create_graph=True"
        )


def takes_tensors(*of_any_dtype: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a loss, so that it refuses arguments that its signature calls tensors of floats and that are none.

    Args:
        of_any_dtype: names of arguments that may hold whole numbers or truth values: masks, lengths, indices.

    The loss then raises TypeError for an argument that is no tensor, and ValueError for a tensor that holds no floats.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        tensor_types = {
            name: x.annotation
            for name, x in parameters.items()
            if x.annotation in (Tensor, Tensor | None)
        }
        floats = tensor_types.keys() - {*of_any_dtype}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in [*zip(parameters, args), *kwargs.items()]:
                if not isinstance(value, tensor_types.get(name, object)):
                    raise TypeError(
                        f"{name} is of type {type(value).__name__} but {function.__name__} takes torch tensors; "
                        f"use torch.as_tensor({name})"
                    )
                if name in floats and value is not None and not value.is_floating_point():
                    raise ValueError(
                        f"{name} holds {value.dtype} but {function.__name__} takes floats there; use {name}.float()"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def check_shapes(rule: str, axes: int | None, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors, floats as at least float32; an optional tensor that is left out is None.

    Args:
        rule: "names: what they must be", for the error.
        axes: how many the shape must have; None allows any number.

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
