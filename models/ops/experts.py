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
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.gated_mlp import ACTIVATIONS, value_and_slope
from models.ops.linear import Adapter
from models.ops.norm import NormRule, rms_norm, rms_norm_backward, triton_kernels
from ulysses.memory.layer_node import sum_tiles, tile_gradients
from ulysses.memory.tiling import add_by_tiles
from ulysses.parallel.layout import Context


def clamped(both: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate), as gpt-oss has it, of rows [M, 2F] with gate and up in turns."""
    gate, up = both.unflatten(1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def activate_weighted(
    both: Tensor, weights: Tensor, kind: str = "silu", room: int = 0
) -> Tensor:
    """Return the activation times the weights [M] of rows [M, 2F], gate and up side by side, without a graph.

    kind: of the activation, or "clamped". room: so many columns more, to be written later.
    """
    if kind in ("silu", "clamped") and (kernels := triton_kernels(both)):
        how = {"clamped": kind == "clamped", "room": (room, 0)}
        return kernels.weighted_swiglu(both, weights, **how)[0]
    wide = at_least_float32(both)
    if kind == "clamped":
        active = clamped(wide)
    else:
        gate, up = wide.chunk(2, 1)
        active = ACTIVATIONS[kind](gate) * up
    return F.pad((active * weights[:, None]).to(both.dtype), (0, room))


def activate_weighted_backward(
    grad: Tensor,
    both: Tensor,
    weights: Tensor,
    kind: str = "silu",
    room: Sequence[int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted activation, and the gradients of `both` and of the weights; those in float32 or better.

    The first two have so many columns more, to be written later.
    """
    if kind in ("silu", "clamped") and (kernels := triton_kernels(both)):
        given = both, weights, grad.contiguous()
        return kernels.weighted_swiglu(*given, clamped=kind == "clamped", room=room)
    d = at_least_float32(grad)
    wide = d * weights[:, None]
    if kind == "clamped":
        x = at_least_float32(both).detach().requires_grad_()
        with torch.enable_grad():
            active = clamped(x)
        (to_both,) = torch.autograd.grad(active, x, wide)
        active = active.detach()
    else:
        gate, up = at_least_float32(both).chunk(2, 1)
        value, slope = value_and_slope(gate, kind)
        active, to_both = value * up, torch.cat((wide * up * slope, wide * value), -1)
    to_weights = (d * active).sum(1)
    active = F.pad((active * weights[:, None]).to(both.dtype), (0, room[0]))
    return active, F.pad(to_both.to(both.dtype), (0, room[1])), to_weights


def route(
    x: Tensor, router: Tensor, count: int, normalise: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [S, k] and the numbers of every row's experts, and all probabilities [S, N]; with a graph.

    Probabilities are a softmax in float32 or better; `normalise` makes the weights sum to 1, which is the same as a
    softmax of the chosen ones alone.
    """
    wide = bias if bias is None else at_least_float32(bias)
    probabilities = F.linear(at_least_float32(x), at_least_float32(router), wide).softmax(-1)
    weights, chosen = probabilities.topk(count, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen, probabilities


class Order(NamedTuple):
    """How copies of the rows are sorted by expert.

    numbers [M]: the expert of each copy. source [M]: the row that a copy is of, k times over. places [M]: where the
    copies of each row stand, the first row's first. ends [N] int32: the copies of each expert end before. each: k.
    """

    numbers: Tensor
    source: Tensor
    places: Tensor
    ends: Tensor
    each: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "Order":
        """Sort the copies of rows whose experts are chosen [S, k]."""
        numbers, source = chosen.flatten().sort(stable=True)
        places = torch.empty_like(source)
        places.scatter_(0, source, torch.arange(len(source), device=source.device))
        every = torch.arange(experts, device=source.device)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        return cls(numbers, source, places, ends, chosen.shape[1])

    def copies(self, rows: Tensor, room: int = 0) -> Tensor:
        """Return rows [S, D] as sorted copies [M, D], with so many columns more, to be written later."""
        width = rows.shape[1]
        out = rows.new_empty(len(self.source), width + room)
        torch.index_select(rows, 0, self.source // self.each, out=out[:, :width])
        return out

    def shares(self, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
        """Return [M, N]: each copy's weight, or 1, at its expert and 0 elsewhere."""
        experts = torch.arange(len(self.ends), device=self.numbers.device)
        ours = (self.numbers[:, None] == experts).to(dtype)
        return ours if weights is None else ours.mul_(weights[:, None])

    def sums(self, parts: Tensor) -> Tensor:
        """Return the sums [S, D] of the rows' sorted parts [M, D], in float32 or better and rounded once."""
        if kernels := triton_kernels(parts):
            return kernels.sum_parts(parts, self.places, self.each)
        found = parts.index_select(0, self.places).unflatten(0, (-1, self.each))
        return at_least_float32(found).sum(1).to(parts.dtype)


def is_grouped(*tensors: Tensor) -> bool:
    """Tell whether torch multiplies all groups in one call without waiting for their sizes."""
    aligned = all(t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)
    return aligned and tensors[0].dtype == torch.bfloat16 and not tensors[0].is_cpu


def _groups(ends: Tensor) -> Sequence[tuple[int, int, int]]:
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


# of tensors, those that are trained among them: their gradients; None stands for no norm
Found = dict[Tensor | None, Tensor]


class Stack(NamedTuple):
    """A matrix [O, K] of every expert, all in one tensor [N, O, K], and perhaps biases [N, O] or an adapter.

    packed: what bytes stand for (models/quantized.py). adapter: a [N, r, K] and b [N, O, r], which are trained.
    transposed: the tensor is [N, K, O]. Where copies have weights [M], the biases are multiplied by them.

    With an adapter, rows and the gradients of results have `room` columns more, for scale * x a^T and scale * grad b.
    Bytes, which are unpacked for every product, are unpacked beside b, or above a, so that one product does all.
    """

    matrices: Tensor
    packed: Any = None
    adapter: Adapter | None = None
    bias: Tensor | None = None
    transposed: bool = False

    @property
    def room(self) -> int:
        """The adapter's rank, made one that a call for all groups can multiply."""
        return 0 if self.adapter is None else -(-self.adapter.a.shape[1] // 8) * 8

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the columns of rows, or of gradients, and those after them."""
        return rows.split([rows.shape[1] - self.room, self.room], 1)

    def narrow(self, rows: Tensor, ends: Tensor, *, back: bool = False) -> Tensor | None:
        """Write the last columns of rows, or of a gradient if `back`; return what they are multiplied by."""
        if self.adapter is None:
            return None
        a, b, scale, _ = self.adapter
        more = self.room - a.shape[1]
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        first, last = (b, a) if back else (a.mT, b.mT)
        own, narrow = self._split(rows)
        torch.mul(grouped_product(own, first, ends), scale, out=narrow)
        return last

    def _through(self, rows: Tensor, ends: Tensor, *, back: bool) -> Tensor:
        """Multiply rows by the matrices, or gradients by their transposes."""
        last, is_turned = self.narrow(rows, ends, back=back), back == self.transposed
        if self.packed is None:
            matrices = self.matrices.mT if is_turned else self.matrices
            if last is None:
                return grouped_product(rows, matrices, ends)
            own, narrow = self._split(rows)
            return grouped_product(own, matrices, ends).add_(
                grouped_product(narrow, last, ends)
            )
        size, axis = list(self.packed.shape), 2 if is_turned else 1
        size[axis] += self.room
        wide = torch.empty(size, dtype=rows.dtype, device=rows.device)
        inside = wide.narrow(axis, 0, size[axis] - self.room)
        self.packed.unpack(self.matrices, rows.dtype, inside)
        matrices = wide.mT if is_turned else wide
        if last is not None:
            matrices[:, -self.room :] = last
        return grouped_product(rows, matrices, ends)

    def product(self, rows: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
        """Return the product [M, O] of sorted rows [M, K]."""
        out = self._through(rows, order.ends, back=False)
        if self.bias is not None:
            out.addmm_(order.shares(out.dtype, weights), self.bias)
        return out

    def back(self, grad: Tensor, ends: Tensor) -> Tensor:
        """Return the gradient of `product`'s rows."""
        return self._through(grad, ends, back=True)

    def gradients(
        self, grad: Tensor, rows: Tensor, order: Order, weights: Tensor | None = None
    ) -> Found:
        """Return the gradients of what is trained; `grad` went through `back`, and rows through `narrow`."""
        found: Found = {}
        ends = order.ends
        if self.adapter is not None:
            a, b = self.adapter[:2]
            (grad, to_narrow), (rows, narrow) = self._split(grad), self._split(rows)
            found[a] = grouped_outer(to_narrow, rows, ends)[:, : a.shape[1]]
            found[b] = grouped_outer(grad, narrow, ends)[..., : b.shape[2]]
        if self.matrices.requires_grad:
            sides = (rows, grad) if self.transposed else (grad, rows)
            found[self.matrices] = grouped_outer(*sides, ends)
        if self.bias is not None and self.bias.requires_grad:
            found[self.bias] = order.shares(grad.dtype, weights).t() @ grad
        return found


class ExpertStacks(NamedTuple):
    """The matrices of so many experts, their activation, and what of them is trained, in the module's order."""

    gate_up: Stack
    down: Stack
    number: int
    trained: Sequence[Tensor]
    activation: str = "silu"

    def forward(self, x: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        """Return gate and up [M, 2F] of the sorted copies of x [S, D], and the experts' weighted sum [S, D]."""
        both = self.gate_up.product(order.copies(x, self.gate_up.room), order)
        weights = weights.flatten()[order.source]
        active = activate_weighted(both, weights, self.activation, self.down.room)
        return both, order.sums(self.down.product(active, order, weights))

    def backward(
        self, grad: Tensor, x: Tensor, weights: Tensor, order: Order, both: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Found]:
        """Return the gradients of x, of the weights and of what is trained; `both` is gate and up if they were kept."""
        copies, ends = order.copies(x, self.gate_up.room), order.ends
        if both is None:
            both = self.gate_up.product(copies, order)
        else:
            self.gate_up.narrow(copies, ends)
        to_out, sorted_weights = (
            order.copies(grad, self.down.room),
            weights.flatten()[order.source],
        )
        room = self.down.room, self.gate_up.room
        active, to_both, to_weights = activate_weighted_backward(
            self.down.back(to_out, ends), both, sorted_weights, self.activation, room
        )
        del both
        if self.down.bias is not None:
            own = to_out[:, : x.shape[1]]
            to_weights += (own @ self.down.bias.t()).gather(1, order.numbers[:, None])[:, 0]
        self.down.narrow(active, ends)
        found = self.down.gradients(to_out, active, order, sorted_weights)
        del to_out, active
        to_copies = self.gate_up.back(to_both, ends)
        found |= self.gate_up.gradients(to_both, copies, order)
        del copies, to_both
        return order.sums(to_copies), to_weights[order.places].view_as(weights), found


class ExpertsNode(torch.autograd.Function):
    """Return the weighted sum of the experts that are chosen [S, k] for x; `trained` are theirs."""

    @staticmethod
    def forward(
        ctx: Context[ExpertStacks],
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        experts: ExpertStacks,
        *trained: Tensor,
    ) -> Tensor:
        order = Order.of(chosen, experts.number)
        both, out = experts.forward(x, weights, order)
        ctx.save_for_backward(x, weights, chosen, both)
        ctx.rest = experts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[ExpertStacks], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, chosen, both = ctx.saved_tensors
        experts = ctx.rest
        order = Order.of(chosen, experts.number)
        to_x, to_weights, found = experts.backward(grad, x, weights, order, both)
        return to_x, to_weights, None, None, *(found[p] for p in experts.trained)


class SparseMLP(NamedTuple):
    """The weights of a norm, of a router and of its experts, and what they compute; norm and bias may be None.

    It runs in tiles; without them, where everything is kept, the modules run one by one. record: notes which experts
    were chosen, as a models.moe.RouterRecord does. place: of the layer among those with experts. beside: is added to
    the experts' sum of normalised rows; `of_beside` is what is trained of it.
    """

    norm: Tensor | None
    router: Tensor
    experts: ExpertStacks
    rule: NormRule
    each: int
    normalise: bool
    record: Any
    place: int
    bias: Tensor | None = None
    beside: Callable[[Tensor], Tensor] | None = None
    of_beside: Sequence[Tensor] = ()

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained, as modules list them."""
        own = self.norm, self.router, self.bias
        trained = [t for t in own if t is not None and t.requires_grad]
        return [*trained, *self.experts.trained, *self.of_beside]

    def _product(self, rows: Tensor, part: slice) -> Tensor:
        x = rms_norm(rows, self.norm, self.rule)
        weights, chosen, p = route(x, self.router, self.each, self.normalise, self.bias)
        self.record.note(self.place, chosen, p, part)
        out = self.experts.forward(x, weights, Order.of(chosen, len(self.router)))[-1]
        return out if self.beside is None else out.add_(self.beside(x))

    def add_tiles(self, rows: Tensor, tile: int) -> Tensor:
        """Return rows + the experts' sum, in tiles and without a graph."""
        return add_by_tiles(lambda part: self._product(rows[part], part), rows, tile)

    @torch.no_grad()
    def gradients(self, rows: Tensor, grad: Tensor, tile: int) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile; return the gradients of rows and of the trained tensors."""
        grad, trained = grad.contiguous(), self.trained

        def of_tile(part: slice) -> Sequence[Tensor]:
            to_rows, found = self._gradients(rows[part], grad[part], part)
            return to_rows, *(found[p] for p in trained)

        return sum_tiles(of_tile, rows, trained, tile)

    def _gradients(self, rows: Tensor, grad: Tensor, part: slice) -> tuple[Tensor, Found]:
        x = rms_norm(rows, self.norm, self.rule)
        own = [t for t in (self.router, self.bias) if t is not None]
        row, *wide = (at_least_float32(t).detach().requires_grad_() for t in (x, *own))
        with torch.enable_grad():
            weights, chosen, p = route(row, wide[0], self.each, self.normalise, *wide[1:])
            self.record.note(self.place, chosen, p, part)
        order = Order.of(chosen, len(self.router))
        to_x, to_weights, found = self.experts.backward(grad, x, weights.detach(), order)
        through_router, *to_own = torch.autograd.grad(
            weights, (row, *wide), to_weights.to(weights.dtype)
        )
        to_x = through_router.add_(to_x).to(x.dtype)
        if self.beside is not None:
            more, grads = tile_gradients(self.beside, x, grad, self.of_beside, len(x))
            to_x, found = to_x.add_(more), found | dict(zip(self.of_beside, grads))
        to_x, to_norm = rms_norm_backward(to_x, rows, self.norm, self.rule, grad)
        found |= zip((*own, self.norm), (*to_own, to_norm))
        return to_x, found
