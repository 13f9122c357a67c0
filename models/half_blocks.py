"""The two halves of a layer as single graph nodes that keep little: what is cheap is computed again.

    linear        x -> W x + b                               keeps x
    project       hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
    feed_forward  hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                  in tiles: keeps hidden only, backward runs norm, gate and up again, never down

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a view
would keep the gathered weights alive. The halves read plain weights, so they stand in for the modules only where these
are plain (`is_plain`): adapters, hooks and partitioned parameters go through the modules' own forward, that is `linear`.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.fused import activate, activate_backward, rms_norm, rms_norm_backward, rotate_pair
from ulysses.memory.tiling import tiles

Rope = tuple[Tensor, Tensor]


def is_plain(*modules: nn.Module) -> bool:
    """Say whether the modules' weights may be read directly: own classes, no hooks, not partitioned."""
    return all(
        type(m).__module__.startswith("models.") and not m._forward_hooks and not m._forward_pre_hooks
        and cast(Tensor, m.weight).numel() > 0
        for m in modules
    )  # fmt: skip


class ProjectWeights(NamedTuple):
    """Hold the norm and the three projections; a bias is None where the model has none."""

    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None


class FeedForwardWeights(NamedTuple):
    """Hold the norm and the three matrices of the MLP."""

    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do torch's linear for rows x [S, D]; torch's own keeps a view of the weight, this keeps the weight."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            grad @ weight if for_x else None,
            grad.t() @ x if for_weight else None,
            _column_sums(grad) if for_bias else None,
        )


def project(
    hidden: Tensor, weights: ProjectWeights, rope: Rope, eps: float, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in."""
    return _Project.apply(hidden, *weights, *rope, eps, head_dim)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *weights, cos, sin, eps, head_dim = rest
        w = ProjectWeights(*weights)
        x = rms_norm(hidden, w.norm, eps)
        query, key, value = (
            F.linear(x, matrix, bias).unflatten(1, (-1, head_dim))
            for matrix, bias in (
                (w.query, w.query_bias),
                (w.key, w.key_bias),
                (w.value, w.value_bias),
            )
        )
        query, key = rotate_pair(query, key, cos, sin, in_place=True)
        ctx.save_for_backward(hidden, *weights, cos, sin)
        ctx.eps = eps
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights, cos, sin = ctx.saved_tensors
        w, wanted = ProjectWeights(*weights), ctx.needs_input_grad[1:8]
        return (
            *_project_backward(hidden, grads, w, (cos, sin), ctx.eps, wanted),
            None,
            None,
            None,
            None,
        )


class HeadGroups:
    """Project equal groups of heads one at a time, and add up what their gradients say of hidden and weights.

    Nothing of all heads exists at once; the norm runs again for each group. Without a graph.
    """

    def __init__(
        self,
        hidden: Tensor,
        weights: ProjectWeights,
        rope: Rope,
        eps: float,
        head_dim: int,
        count: int,
    ) -> None:
        self._hidden, self._weights, self._rope, self._eps, self._head_dim = (
            hidden,
            weights,
            rope,
            eps,
            head_dim,
        )
        norm, *matrices = weights
        rows = [(None,) * count if m is None else m.chunk(count) for m in matrices]
        self._groups = [ProjectWeights(norm, *part) for part in zip(*rows)]
        self._wanted = [w is not None and w.requires_grad for w in weights]
        self._grad_x: Tensor | None = None
        self._found: list[Any] = [None] * count

    @torch.no_grad()
    def project(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a group's query, key and value, positions rotated in."""
        return project(self._hidden, self._groups[index], self._rope, self._eps, self._head_dim)

    @torch.no_grad()
    def add(self, index: int, grads: Sequence[Tensor]) -> None:
        """Take the gradients of a group's query, key and value."""
        self._grad_x, self._found[index] = _projection_backward(
            rms_norm(self._hidden, self._weights.norm, self._eps),
            grads,
            self._groups[index],
            self._rope,
            self._wanted[1:],
            self._grad_x,
        )

    @torch.no_grad()
    def gradients(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the gradients of hidden and, by id, of the trainable weights; all groups have been added."""
        assert self._grad_x is not None
        grad_hidden, grad_norm = rms_norm_backward(
            self._grad_x, self._hidden, self._weights.norm, self._eps
        )
        self._grad_x = None
        rows = [
            None if parts[0] is None else parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*self._found)
        ]
        found = [grad_norm.to(self._weights.norm.dtype), *rows]
        return grad_hidden, {
            id(w): g
            for w, g, want in zip(self._weights, found, self._wanted)
            if want and g is not None
        }


class OutputGroups:
    """Add the projected attention output to hidden; its gradient is computed for one group of heads at a time. Without a graph."""

    def __init__(self, weight: Tensor, head_dim: int, count: int) -> None:
        self._weight, self._head_dim, self._columns = weight, head_dim, weight.shape[1] // count
        self._attended: Tensor | None = None
        self._grad: Tensor | None = None

    @torch.no_grad()
    def run(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return hidden [S, D] + the projection of attended [S, H, E]."""
        self._attended = attended.flatten(1)
        return F.linear(self._attended, self._weight).add_(hidden)

    @torch.no_grad()
    def gradients(self, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Take the gradient of the sum [S, D]; return hidden's, which is the same, and the weight's if it is trained."""
        assert self._attended is not None
        found = [grad.t() @ self._attended] if self._weight.requires_grad else []
        self._grad, self._attended = grad, None
        return grad, found

    @torch.no_grad()
    def part(self, index: int) -> Tensor:
        """Return the gradient [S, H/count, E] of a group's attention output."""
        assert self._grad is not None
        columns = self._weight[:, index * self._columns : (index + 1) * self._columns]
        return (self._grad @ columns).unflatten(1, (-1, self._head_dim))


def _project_backward(
    hidden: Tensor,
    grads: Sequence[Tensor],
    w: ProjectWeights,
    rope: Rope,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Any, ...]:
    grad_x, found = _projection_backward(rms_norm(hidden, w.norm, eps), grads, w, rope, wanted[1:])
    grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, w.norm, eps)
    return grad_hidden, grad_norm.to(w.norm.dtype), *found


def _projection_backward(
    x: Tensor,
    grads: Sequence[Tensor],
    w: ProjectWeights,
    rope: Rope,
    wanted: Sequence[bool],
    total: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradient of the normalised rows x, added to `total`, and those of the matrices and biases."""
    grad_query, grad_key = rotate_pair(grads[0], grads[1], *rope, back=True)
    flat = [g.flatten(1) for g in (grad_query, grad_key, grads[2])]
    found: list[Tensor | None] = [g.t() @ x if want else None for g, want in zip(flat, wanted[:3])]
    del x
    found += [_column_sums(g) if want else None for g, want in zip(flat, wanted[3:6])]
    total = flat[0] @ w.query if total is None else total.addmm_(flat[0], w.query)
    total.addmm_(flat[1], w.key).addmm_(flat[2], w.value)
    return total, found


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def feed_forward(hidden: Tensor, weights: FeedForwardWeights, eps: float) -> Tensor:
    """Return hidden + MLP(norm(hidden)) for rows [S, D]; backward keeps hidden, gate and up."""
    return _FeedForward.apply(hidden, *weights, eps)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> Tensor:
        *weights, eps = rest
        w = FeedForwardWeights(*weights)
        gate, up = _gate_up(rms_norm(hidden, w.norm, eps), w)
        out = F.linear(activate(gate, up), w.down).add_(hidden)
        ctx.save_for_backward(hidden, gate, up, *weights)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, *weights = ctx.saved_tensors
        w = FeedForwardWeights(*weights)
        sums = _Sums(w, ctx.needs_input_grad[1:5])
        x = rms_norm(hidden, w.norm, ctx.eps)
        grad_hidden = _rows_backward(hidden, x, gate, up, grad.contiguous(), w, ctx.eps, sums)
        return grad_hidden, *sums.gradients(), None


@torch.no_grad()
def feed_forward_tiles(
    hidden: Tensor, weights: FeedForwardWeights, eps: float, tile_rows: int
) -> Tensor:
    """Do `feed_forward` in tiles of rows, without a graph."""
    out = torch.empty_like(hidden)
    for part in tiles(hidden.shape[0], tile_rows):
        rows = hidden[part]
        torch.add(
            rows,
            F.linear(activate(*_gate_up(rms_norm(rows, weights.norm, eps), weights)), weights.down),
            out=out[part],
        )
    return out


@torch.no_grad()
def feed_forward_gradients(
    hidden: Tensor, grad: Tensor, weights: FeedForwardWeights, eps: float, tile_rows: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of hidden and of the trainable weights, in order; several tiles' sums are float32."""
    whole = tile_rows >= hidden.shape[0]
    sums = _Sums(weights, [w.requires_grad for w in weights], wide=not whole)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    for part in tiles(hidden.shape[0], tile_rows):
        rows = hidden[part]
        x = rms_norm(rows, weights.norm, eps)
        gate, up = _gate_up(x, weights)
        done = _rows_backward(rows, x, gate, up, grad[part], weights, eps, sums)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
        del x, gate, up, done
    assert grad_hidden is not None
    return grad_hidden, [g for g in sums.gradients() if g is not None]


def _gate_up(x: Tensor, w: FeedForwardWeights) -> tuple[Tensor, Tensor]:
    return F.linear(x, w.gate), F.linear(x, w.up)


def _rows_backward(
    hidden: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    w: FeedForwardWeights,
    eps: float,
    sums: "_Sums",
) -> Tensor:
    """Add these rows to the weights' sums and return the gradient of `hidden`; x is its norm."""
    grad_gate, grad_up, active = activate_backward(grad @ w.down, gate, up)
    sums.add(3, grad, active)
    del active
    sums.add(1, grad_gate, x)
    sums.add(2, grad_up, x)
    grad_x = grad_gate @ w.gate
    grad_x.addmm_(grad_up, w.up)
    del grad_gate, grad_up
    grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, w.norm, eps, residual=grad)
    sums.add_vector(0, grad_norm)
    return grad_hidden


class _Sums:
    """Sum weight gradients over tiles: in the weight's dtype for one tile, else `wide`, in float32 or better."""

    def __init__(self, weights: FeedForwardWeights, wanted: Any, wide: bool = False) -> None:
        self._weights, self._wanted, self._wide = weights, wanted, wide
        self._sums: list[Tensor | None] = [None] * len(weights)

    def add(self, index: int, grad: Tensor, rows: Tensor) -> None:
        """Add grad.T @ rows."""
        if not self._wanted[index]:
            return
        left, total = grad.t(), self._sums[index]
        wide = torch.promote_types(rows.dtype, torch.float32)
        if not self._wide or wide == rows.dtype:
            self._sums[index] = left @ rows if total is None else total.addmm_(left, rows)
        elif not rows.is_cuda:
            product = left.to(wide) @ rows.to(wide)
            self._sums[index] = product if total is None else total.add_(product)
        elif total is None:
            self._sums[index] = torch.mm(left, rows, out_dtype=wide)
        else:  # half-precision products added into the float32 matrix inside the kernel
            torch.addmm(total, left, rows, out_dtype=wide, out=total)

    def add_vector(self, index: int, vector: Tensor) -> None:
        """Add a finished gradient."""
        total = self._sums[index]
        self._sums[index] = vector if total is None else total.add_(vector)

    def gradients(self) -> list[Tensor | None]:
        """Return the sums in the weights' dtypes, None where not wanted."""
        return [
            s.to(w.dtype) if want and s is not None else None
            for s, w, want in zip(self._sums, self._weights, self._wanted)
        ]
