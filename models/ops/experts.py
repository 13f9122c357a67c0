"""A layer's second half with experts: every row goes through a few of many MLPs, those that a router chooses for it.

    x [S, D] -router-> k experts and weights of each row
    x -copies, sorted by expert-> [M, D] -gate, up-> -activation * weight-> -down-> [M, D] -sum of a row's k-> [S, D]

Products with all experts are one call, which takes the bounds of their rows on the device: the host does not wait.

Shapes: S rows, k experts of a row, M = S k sorted copies, N experts, D width, F an expert's width.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.precision import at_least_float32
from models.ops.gated_mlp import ACTIVATIONS
from models.ops.linear import Adapter, GradientSums, Saved, trained
from models.ops.norm import in_plain_torch, triton_kernels
from ulysses.parallel.layout import Tensors, copy_strided


def weighted(both: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Return the activation of rows [M, 2F] times their weights [M]; with a graph.

    "clamped" is gpt-oss's (up + 1) * gate * sigmoid(1.702 * gate), of rows in which gate and up alternate.
    """
    if kind == "clamped":
        gate, up = both.unflatten(1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        gate, up = both.chunk(2, 1)
        active = ACTIVATIONS[kind](gate) * up
    return active * weights[:, None]


def activate_weighted(
    both: Tensor,
    weights: Tensor,
    kind: str,
    room: Sequence[int],
    grad: Tensor | None = None,
) -> tuple[Tensor, Any, Any]:
    """Return `weighted` without a graph, and for its `grad` those of `both` and of the weights.

    kind: one of ACTIVATIONS, or "clamped". room: how many columns are added to the first and to the second result, to
    be written later. The gradient of the weights is in float32 or better.
    """
    if kernels := triton_kernels(both):
        return kernels.weighted(both, weights, kind, room, grad)
    active, grads = in_plain_torch(lambda x, w: weighted(x, w, kind), grad, both, weights)
    active = F.pad(active.to(both.dtype), (0, room[0]))
    if grad is None:
        return active, None, None
    to_both, to_weights = grads
    return active, F.pad(to_both.to(both.dtype), (0, room[1])), to_weights


def router_logits(x: Tensor, router: Tensors) -> Tensor:
    """Return the logits [S, N] of rows [S, D] in float32 or better, without a graph.

    router: its matrix, and its bias if it has one.
    """
    matrix, *bias = router
    if x.is_cuda and x.dtype == matrix.dtype == torch.bfloat16:
        # products of these numbers are exact in float32, in which tensor cores add them
        logits = torch.mm(x, matrix.t(), out_dtype=torch.float32)
        return logits.add_(*bias) if bias else logits
    return F.linear(*map(at_least_float32, (x, matrix, *bias)))


def route(
    logits: Tensor, top_k: int, normalise: bool, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights and the numbers of every row's experts [S, k], and all probabilities [S, N]; with a graph.

    chosen: the numbers, if an earlier call has found them; a tie could fall otherwise.

    Probabilities are a softmax; `normalise` makes the weights sum to 1, which is the same as a softmax of the chosen
    ones alone.
    """
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices if chosen is None else chosen
    weights = probabilities.gather(-1, chosen)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen, probabilities


class Order(NamedTuple):
    """How the k copies of every row are sorted by expert.

    experts [M]: the expert of each sorted copy. source [M]: which of the unsorted copies it is; those of a row are
    neighbours. places [M]: where each unsorted copy stands among the sorted ones. ends [N] int32: the place after the
    last copy of each expert. top_k: k.
    """

    experts: Tensor
    source: Tensor
    places: Tensor
    ends: Tensor
    top_k: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "Order":
        """Sort the copies of rows by the experts chosen for them [S, k]."""
        experts, source = chosen.flatten().sort(stable=True)
        places = torch.empty_like(source)
        places.scatter_(0, source, torch.arange(len(source), device=source.device))
        numbers = torch.arange(num_experts, device=source.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        return cls(experts, source, places, ends, chosen.shape[1])

    def copies(self, rows: Tensor, room: int) -> Tensor:
        """Return rows [S, D] as sorted copies [M, D + room]; the columns of `room` are to be written later."""
        if kernels := triton_kernels(rows):
            return kernels.spread(rows, self.places, self.top_k, room)
        width = rows.shape[1]
        out = rows.new_empty(len(self.source), width + room)
        torch.index_select(rows, 0, self.source // self.top_k, out=out[:, :width])
        return out

    def shares(self, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
        """Return [M, N]: each copy's weight, or 1, at its expert and 0 elsewhere."""
        numbers = torch.arange(len(self.ends), device=self.experts.device)
        shares = (self.experts[:, None] == numbers).to(dtype)
        return shares if weights is None else shares.mul_(weights[:, None])

    def sums(self, parts: Tensor) -> Tensor:
        """Return the sums [S, D] over each row's sorted copies [M, D], taken in float32 or better and rounded once."""
        if kernels := triton_kernels(parts):
            return kernels.sum_parts(parts, self.places, self.top_k)
        by_row = parts.index_select(0, self.places).unflatten(0, (-1, self.top_k))
        return at_least_float32(by_row).sum(1).to(parts.dtype)


def is_grouped(*tensors: Tensor) -> bool:
    """Tell whether torch multiplies all groups in one call without waiting for their sizes."""
    aligned = all(t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)
    return aligned and tensors[0].dtype == torch.bfloat16 and not tensors[0].is_cpu


def _groups(ends: Tensor) -> Sequence[tuple[int, int, int]]:
    """Return each group's number and the bounds of its rows."""
    bounds = [0, *ends.tolist()]
    return [(i, a, b) for i, (a, b) in enumerate(pairwise(bounds))]


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows [M, K] times the matrices [N, K, O] of their groups."""
    if is_grouped(rows, matrices if matrices.stride(-1) == 1 else matrices.mT):
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(len(rows), matrices.shape[2])
    for i, first, last in _groups(ends):
        torch.mm(rows[first:last], matrices[i], out=out[first:last])
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left^T right [N, O, K] of every group's rows [M, O] and [M, K]; zeros for a group without rows."""
    if is_grouped(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for i, first, last in _groups(ends):
        torch.mm(left[first:last].t(), right[first:last], out=out[i])
    return out


class Stack(NamedTuple):
    """A matrix [O, K] of every expert, all in one tensor [N, O, K], and perhaps biases [N, O] or an adapter.

    packed: what the bytes of quantised matrices stand for (models/quantized.py). adapter: a [N, r, K] and b [N, O, r],
    which are trained. transposed: the tensor is [N, K, O].

    With an adapter, rows and the gradients of results have `room` columns at their end: the narrow ones, which hold
    scale * x a^T, or scale * grad b. For every product the matrices are copied, or dequantised, beside b (or above a),
    so that one product does both: that costs less than a second product whose results are added to all rows.
    """

    matrices: Tensor
    packed: Any = None
    adapter: Adapter | None = None
    bias: Tensor | None = None
    transposed: bool = False

    @property
    def room(self) -> int:
        """How many columns an adapter adds: its rank, rounded up to what one call for all groups can multiply."""
        return 0 if self.adapter is None else -(-self.adapter.a.shape[1] // 8) * 8

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the columns of rows, or of gradients, and the narrow ones after them."""
        return rows.split([rows.shape[1] - self.room, self.room], 1)

    def _padded_a(self, adapter: Adapter) -> Tensor:
        """Return a [N, room, K], with zeros behind the rank."""
        return F.pad(adapter.a, (0, 0, 0, self.room - adapter.a.shape[1]))

    def _padded_b(self, adapter: Adapter) -> Tensor:
        """Return b [N, O, room], with zeros behind the rank."""
        return F.pad(adapter.b, (0, self.room - adapter.b.shape[2]))

    def write_narrow(self, rows: Tensor, ends: Tensor, *, back: bool = False) -> None:
        """Write the narrow columns of rows, or of a gradient if `back`, where there is an adapter."""
        if (adapter := self.adapter) is not None:
            to_narrow = self._padded_b(adapter) if back else self._padded_a(adapter).mT
            wide, narrow = self._split(rows)
            torch.mul(grouped_product(wide, to_narrow, ends), adapter.scale, out=narrow)

    def _through(self, rows: Tensor, ends: Tensor, *, back: bool) -> Tensor:
        """Multiply rows by the matrices, or gradients by their transposes."""
        self.write_narrow(rows, ends, back=back)
        matrices = self.matrices
        # grouped products take [N, columns of the rows, columns of the results]
        is_turned = back == self.transposed
        if self.packed is not None or self.adapter is not None:
            size = list(matrices.shape if self.packed is None else self.packed.shape)
            axis = 2 if is_turned else 1
            without_room = size[axis]
            size[axis] += self.room
            matrices = rows.new_empty(size)
            whole = matrices.narrow(axis, 0, without_room)
            if self.packed is None:
                copy_strided(whole, self.matrices)
            else:
                self.packed.unpack(self.matrices, rows.dtype, whole)
        if is_turned:
            matrices = matrices.mT
        if (adapter := self.adapter) is not None:
            from_narrow = self._padded_a(adapter) if back else self._padded_b(adapter).mT
            matrices[:, -self.room :] = from_narrow
        return grouped_product(rows, matrices, ends)

    def product(self, rows: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
        """Return the product [M, O] of sorted rows [M, K]; `weights` [M] multiply the biases."""
        out = self._through(rows, order.ends, back=False)
        if self.bias is not None:
            out.addmm_(order.shares(out.dtype, weights), self.bias)
        return out

    def back(self, grad: Tensor, ends: Tensor) -> Tensor:
        """Return the gradient of the rows of `product`."""
        return self._through(grad, ends, back=True)

    def gradients(
        self,
        grad: Tensor,
        rows: Tensor,
        order: Order,
        sums: GradientSums,
        weights: Tensor | None = None,
    ) -> None:
        """Add the gradients of what is trained, after `back` for grad and `product` or `write_narrow` for rows."""
        ends = order.ends
        if self.adapter is not None:
            a, b = self.adapter[:2]
            (grad, narrow_grad), (rows, narrow) = self._split(grad), self._split(rows)
            sums.add(a, grouped_outer(narrow_grad, rows, ends)[:, : a.shape[1]])
            sums.add(b, grouped_outer(grad, narrow, ends)[..., : b.shape[2]])
        if self.matrices.requires_grad:
            sides = (rows, grad) if self.transposed else (grad, rows)
            sums.add(self.matrices, grouped_outer(*sides, ends))
        if self.bias is not None and self.bias.requires_grad:
            sums.add(self.bias, order.shares(grad.dtype, weights).t() @ grad)


class ExpertStacks(NamedTuple):
    """The experts' matrices, and the activation."""

    gate_up: Stack
    down: Stack
    activation: str = "silu"

    def forward(self, x: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        """Return gate and up [M, 2F] of the sorted copies of x [S, D], and the experts' weighted sum [S, D]."""
        both = self.gate_up.product(order.copies(x, self.gate_up.room), order)
        weights = weights.flatten()[order.source]
        room = self.down.room, self.gate_up.room
        active, *_ = activate_weighted(both, weights, self.activation, room)
        return both, order.sums(self.down.product(active, order, weights))

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weights: Tensor,
        order: Order,
        sums: GradientSums,
        both: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weights, and add those of what is trained.

        `both` is gate and up if forward has saved them.
        """
        copies, ends = order.copies(x, self.gate_up.room), order.ends
        if both is None:
            both = self.gate_up.product(copies, order)
        else:
            self.gate_up.write_narrow(copies, ends)
        to_out = order.copies(grad, self.down.room)
        sorted_weights = weights.flatten()[order.source]
        room = self.down.room, self.gate_up.room
        to_active = self.down.back(to_out, ends)
        active, to_both, to_weights = activate_weighted(
            both, sorted_weights, self.activation, room, to_active
        )
        del both, to_active
        if self.down.bias is not None:
            # a copy's weight multiplies its expert's bias too
            by_expert = to_out[:, : x.shape[1]] @ self.down.bias.t()
            to_weights += by_expert.gather(1, order.experts[:, None])[:, 0]
        self.down.write_narrow(active, ends)
        self.down.gradients(to_out, active, order, sums, sorted_weights)
        del to_out, active
        to_copies = self.gate_up.back(to_both, ends)
        self.gate_up.gradients(to_both, copies, order, sums)
        del copies, to_both
        return order.sums(to_copies), to_weights[order.places].view_as(weights)


class SparseMLP(NamedTuple):
    """The weights of a router and of its experts, and what they compute.

    router: its matrix [N, D], and its bias if it has one. record: notes which experts were chosen, as a
    models.moe.RouterRecord does. layer_number: among the layers with experts. shared: what is added to the experts'
    sum, from x; `of_shared` are its trained tensors. It runs again in backward, and must draw nothing (adapters of it
    have no dropout).
    """

    router: Tensors
    experts: ExpertStacks
    top_k: int
    normalise: bool
    record: Any
    layer_number: int
    shared: Callable[[Tensor], Tensor] | None = None
    of_shared: Sequence[Tensor] = ()

    def forward(self, x: Tensor, part: slice) -> tuple[Tensor, Saved]:
        logits = router_logits(x, self.router)
        weights, chosen, probabilities = route(logits, self.top_k, self.normalise)
        self.record.note(self.layer_number, chosen, probabilities, part)
        both, out = self.experts.forward(x, weights, Order.of(chosen, len(self.router[0])))
        return out if self.shared is None else out.add_(self.shared(x)), (both, chosen)

    def backward(
        self, x: Tensor, grad: Tensor, part: slice, saved: Saved, sums: GradientSums
    ) -> Tensor:
        both, chosen = saved or (None, None)
        logits = router_logits(x, self.router).requires_grad_()
        with torch.enable_grad():
            weights, chosen, probabilities = route(logits, self.top_k, self.normalise, chosen)
            self.record.note(self.layer_number, chosen, probabilities, part)
        order = Order.of(chosen, len(self.router[0]))
        to_x, to_weights = self.experts.backward(grad, x, weights.detach(), order, sums, both)
        (to_logits,) = torch.autograd.grad(weights, logits, to_weights)
        matrix, *bias = self.router
        if matrix.requires_grad:
            sums.add(matrix, to_logits.t() @ at_least_float32(x))
        for vector in trained(bias):
            sums.add(vector, to_logits.sum(0))
        to_x = torch.addmm(at_least_float32(to_x), to_logits, at_least_float32(matrix)).to(
            x.dtype
        )
        if self.shared is not None:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                out = self.shared(leaf)
            through_shared, *grads = torch.autograd.grad(out, (leaf, *self.of_shared), grad)
            to_x.add_(through_shared)
            for tensor, tensor_grad in zip(self.of_shared, grads):
                sums.add(tensor, tensor_grad)
        return to_x
