"""Products of the same rows with several matrices, to each of which an adapter may add a matrix of low rank.

    y = x W^T + bias + scale * (x a^T) b^T        a [r, D] and b [N, r] of an adapter

Matrices that are neighbours in memory (zero/resident.py) are multiplied as one, and so are the a's of all adapters of
the same rows. For backward an adapter keeps the narrow result of its a alone, [S, r].

What all operations have in common stands here too: Operation, of which `recorded` makes a node, and GradientSums.

Shapes: S local tokens, D width, N rows of a matrix, r an adapter's rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.precision import (
    at_least_float32,
    has_wide_products,
    refuse_second_derivative,
    wide_product,
)
from ulysses.parallel.layout import Tensors


class Adapter(NamedTuple):
    """What is added to a matrix, scale * b a; `dropout` is the probability that an input of a is dropped.

    All adapters of the same rows drop the same inputs.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


class Matrix(NamedTuple):
    """A matrix [N, D], what else its product needs, and the numbers of the rows that are used; None stands for all.

    packed: what the bytes of a quantised weight stand for (models/quantized.py).
    """

    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None
    packed: Any = None
    row_index: Tensor | None = None

    @property
    def outputs(self) -> int:
        """How many rows are used, each of which makes one column of the result."""
        if self.row_index is not None:
            return len(self.row_index)
        return len(self.weight) if self.packed is None else self.packed.shape[0]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the rows that are used, dequantised."""
        weight = self.packed.unpack(self.weight, dtype) if self.packed else self.weight
        return self.used_rows(weight)

    def used_rows(self, tensor: Any) -> Any:
        """Return the rows that are used of the weight, or of a bias or b, which have as many rows; None of no bias."""
        return tensor if self.row_index is None or tensor is None else tensor[self.row_index]


@dataclass(eq=False)
class GradientSums:
    """The gradients of trained tensors as sums over tiles, in float32 or better unless one tile is the `whole`."""

    whole: bool
    # one sum for tensors whose gradients lie one below the other
    sums: dict[tuple[Tensor, ...], Tensor] = field(default_factory=dict)

    def add(self, tensor: Tensor | None, grad: Tensor, index: Tensor | None = None) -> None:
        """Add to the gradient of a tensor, if it is trained; `index` numbers the rows that `grad` is of.

        Where there is no tensor, such as a norm's weight without a norm, there need be no gradient.
        """
        if tensor is not None and tensor.requires_grad:
            if index is not None:
                grad = grad.new_zeros(tensor.shape).index_copy_(0, index, grad)
            key = (tensor,)
            if key in self.sums:
                self.sums[key].add_(grad)
            else:
                self.sums[key] = grad if self.whole else at_least_float32(grad)

    def add_product(
        self, tensors: Sequence[Tensor], grad: Tensor, rows: Tensor, index: Tensor | None = None
    ) -> None:
        """Add grad^T rows, which holds the gradients of all these tensors one below the other, if any is trained.

        index: the rows of a single tensor that the product holds the gradients of.
        """
        key = tuple(tensors)
        if not trained(key):
            return
        if index is not None:
            return self.add(key[0], grad.t() @ rows, index)
        wide = rows.dtype if self.whole else torch.promote_types(rows.dtype, torch.float32)
        left = grad.t()
        if not has_wide_products(rows):
            left, rows = left.to(wide), rows.to(wide)
        self.sums[key] = wide_product(left, rows, wide, self.sums.get(key))

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of these tensors, in their dtypes."""
        grads: dict[Tensor, Tensor] = {}
        for tensors, total in self.sums.items():
            grads |= zip(tensors, total.split([len(t) for t in tensors]))
        return [grads[p].to(p.dtype) for p in parameters]


Saved = Sequence[Any]  # what a forward keeps, so that backward does not compute it again


class Operation(Protocol):
    """A computation with its backward; `recorded` makes one node of the graph of it."""

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """The weights that it may train, as modules list them; None for one that there is not."""

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        """Return the results of the inputs, and what `run_back` needs; without a graph."""

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        """Return the gradients of the inputs from those of the results, and add those of what is trained to `sums`."""


def recorded(operation: Operation, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the results of an operation, with a graph."""
    return _Node.apply(operation, len(inputs), *inputs, *trained(operation.tensors))


def trained(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the trained ones among the tensors."""
    return [t for t in tensors if t is not None and t.requires_grad]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Operation, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, saved = operation.run(tensors[:count])
        ctx.save_for_backward(*saved)
        ctx.operation = operation
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        operation, sums = ctx.operation, GradientSums(whole=True)
        to_inputs = operation.run_back(ctx.saved_tensors, grads, sums)
        return None, None, *to_inputs, *sums.of(trained(operation.tensors))


class Products:
    """The products of the same rows with several matrices, forward and back; the results lie side by side.

    tensors: the trained ones among weights, biases and the adapters' a and b.
    adapters: of these matrices; None if there are none. They have an order in which the methods are called.
    """

    def __init__(self, *matrices: Matrix) -> None:
        self.matrices, self.widths = matrices, [m.outputs for m in matrices]
        tensors: list[Tensor | None] = []
        for m in matrices:
            tensors += [m.weight, m.bias]
            if m.adapter:
                tensors += [m.adapter.a, m.adapter.b]
        self.tensors = trained(tensors)
        self.adapters = AdapterProducts(matrices) if any(m.adapter for m in matrices) else None

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the results [S, N]."""
        biases = [m.used_rows(m.bias) for m in self.matrices]
        dense = self._dense(x.dtype)
        if self.adapters is None:
            if len(dense) == len(biases):
                return [F.linear(x, matrix, bias) for matrix, bias in zip(dense, biases)]
            bias = None if biases[0] is None else torch.cat(biases)
            return [*F.linear(x, dense[0], bias).split(self.widths, 1)]
        out = x.new_empty(len(x), sum(self.widths))
        # a single result is no view, which autograd would not let others change in place
        results = [*out.split(self.widths, 1)] if len(self.widths) > 1 else [out]
        # the small products come first, and the large one adds to them as it writes
        self.adapters.forward(x, biases, results)
        for part, matrix in zip(out.split([len(m) for m in dense], 1), dense):
            part.addmm_(x, matrix.t())
        return results

    def back(self, grad: Tensor) -> Tensor:
        """Return the gradient of x from that of the results."""
        total: Any = None
        if self.adapters:
            total = self.adapters.back(grad.split(self.widths, 1))
        dense = self._dense(grad.dtype)
        for part, matrix in zip(grad.split([len(m) for m in dense], 1), dense):
            total = part @ matrix if total is None else total.addmm_(part, matrix)
        return total  # type: ignore[no-any-return]

    def gradients(self, grad: Tensor, x: Tensor, sums: GradientSums) -> None:
        """Add the gradients of the trained tensors to `sums`."""
        uses_all_rows = all(m.row_index is None for m in self.matrices)
        grads = grad.split(self.widths, 1)
        if uses_all_rows:
            sums.add_product([m.weight for m in self.matrices], grad, x)
        for m, part in zip(self.matrices, grads):
            if not uses_all_rows:
                sums.add_product([m.weight], part, x, m.row_index)
            if m.bias is not None and m.bias.requires_grad:
                wide = torch.promote_types(part.dtype, torch.float32)
                sums.add(m.bias, part.sum(0, dtype=wide), m.row_index)
        if self.adapters:
            self.adapters.gradients(grads, x, sums)

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        (x,) = inputs
        return self.forward(x), [x if self.tensors else None]

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        grad = grads[0] if len(grads) == 1 else torch.cat([*grads], 1)
        to_x = self.back(grad)
        if self.tensors:
            self.gradients(grad, saved[0], sums)
        return [to_x]

    def _dense(self, dtype: torch.dtype) -> Tensors:
        """Return the matrices, as one if they are neighbours in memory; several quantised ones are made neighbours."""
        first, *others = self.matrices
        if not others or any(
            m.packed is None or m.row_index is not None for m in self.matrices
        ):
            return stacked([m.dense(dtype) for m in self.matrices])
        size = sum(self.widths), first.packed.shape[1]
        whole = torch.empty(size, dtype=dtype, device=first.weight.device)
        for m, part in zip(self.matrices, whole.split(self.widths)):
            m.packed.unpack(m.weight, dtype, part)
        return [whole]


class AdapterProducts:
    """What adapters add to the products of the same rows x [S, D] with some of several matrices.

    It keeps what a method needs of those before it, so one tile of rows must go through all three before another one
    begins:

        forward, or start if the results are not needed -> back -> gradients

    narrow: scale * x a^T of all adapters, [S, r] of each, side by side.
    mask: of x: 0 where adapters drop an input, and elsewhere what dropout scales it by.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.adapters = [m.adapter for m in matrices if m.adapter]
        self.mask: Tensor | None = None
        self.narrow: Any = None
        self.narrow_grads: Any = None  # scale * grad b of all adapters

    def start(self, rows: Tensor) -> None:
        """Begin a tile: draw which inputs are dropped of rows [S, D]; `forward` does so itself."""
        self.mask = self.narrow = None
        if any(x.dropout for x in self.adapters):
            self.mask = F.dropout(torch.ones_like(rows), self.adapters[0].dropout)

    def forward(self, x: Tensor, biases: list[Any], results: Tensors) -> None:
        """Write what is added to the results [S, N], with the biases, into their memory."""
        self.start(x)
        self._multiply_by_a(x)
        narrow = iter(self.narrow.chunk(len(self.adapters), 1))
        for m, bias, result in zip(self.matrices, biases, results):
            if m.adapter is None:
                result.copy_(x.new_zeros(1) if bias is None else bias)
            elif bias is None:
                torch.mm(next(narrow), m.used_rows(m.adapter.b).t(), out=result)
            else:
                torch.addmm(bias, next(narrow), m.used_rows(m.adapter.b).t(), out=result)

    def back(self, grads: Tensors) -> Tensor:
        """Return the adapters' share of the gradient of x, from the gradients of the results."""
        products = [
            _scaled_product(grad, m.used_rows(m.adapter.b), m.adapter.scale)
            for m, grad in zip(self.matrices, grads)
            if m.adapter
        ]
        self.narrow_grads = torch.cat(products, 1)
        to_x = self.narrow_grads @ self._a
        return to_x if self.mask is None else to_x.mul_(self.mask)

    def gradients(self, grads: Tensors, x: Tensor, sums: GradientSums) -> None:
        """Add the gradients of a and b to `sums`."""
        if self.narrow is None:
            self._multiply_by_a(x)
        narrow = iter(self.narrow.chunk(len(self.adapters), 1))
        for m, grad in zip(self.matrices, grads):
            if m.adapter:
                sums.add_product([m.adapter.b], grad, next(narrow), m.row_index)
        sums.add_product([x.a for x in self.adapters], self.narrow_grads, self._dropped(x))

    @property
    def _a(self) -> Tensor:
        """The a's of all adapters, one below the other."""
        parts = stacked([x.a for x in self.adapters])
        return parts[0] if len(parts) == 1 else torch.cat([*parts])

    def _dropped(self, x: Tensor) -> Tensor:
        """Return the rows after dropout."""
        return x if self.mask is None else x * self.mask

    def _multiply_by_a(self, x: Tensor) -> None:
        """Set `narrow`, scaled before it is rounded, so that b needs no scaling."""
        self.narrow = _scaled_product(self._dropped(x), self._a.t(), self.adapters[0].scale)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


def stacked(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return one view over matrices [N, D] if they lie one after the other in memory, and else the matrices."""
    first = matrices[0]
    end = first.storage_offset()
    for m in matrices:
        same_memory = m.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not m.is_contiguous() or not same_memory or m.storage_offset() != end:
            return matrices
        end += m.numel()
    return [first.as_strided((sum(map(len, matrices)), first.shape[1]), first.stride())]
