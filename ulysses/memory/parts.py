"""What recomputation asks of a decoder layer: its stages one by one, and groups of heads. The drawing is in recompute.py.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Attention(Protocol):
    """Name the two halves of the attention kernel on head shards, without a graph."""

    def attend_forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor]:
        """Return out' and the log-sum-exp."""
        ...

    def attend_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q', k' and v'."""
        ...


class Layer(Protocol):
    """Name the parts of a decoder layer that the levels keep or repeat; see the drawing."""

    def project(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def head_groups(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], count: int
    ) -> "HeadGroups | None":
        """Return project for `count` equal groups of heads, or None if it must run as it is."""
        ...

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor: ...

    def output_groups(self, count: int) -> "OutputGroups | None":
        """Return output for `count` equal groups of heads, or None if it must run as it is."""
        ...

    def feed_forward_tiles(self, rows: Tensor, tile_rows: int) -> Tensor:
        """Run feed_forward tile by tile, without a graph."""
        ...

    def feed_forward_gradients(
        self, rows: Tensor, grad: Tensor, tile_rows: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the rows and of feed_forward's trainable parameters, tile by tile."""
        ...

    def stage_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Return the trainable parameters of project, of output and of feed_forward."""
        ...

    def draws(self) -> bool:
        """Say whether the layer draws random numbers (dropout in an adapter), to be drawn again in backward."""
        ...


class HeadGroups(Protocol):
    """Name what projects one group of heads at a time and adds up the gradients."""

    def project(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a group's q, k and v."""
        ...

    def add(self, index: int, grads: Sequence[Tensor]) -> None:
        """Take the gradients of a group's q, k and v."""
        ...

    def gradients(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the gradients of hidden and, by id, of project's trainable parameters."""
        ...


class OutputGroups(Protocol):
    """Name what runs a layer's output and takes its gradients, those of the attention output one group of heads at a time."""

    def run(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return middle."""
        ...

    def gradients(self, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Take the gradient of middle; return those of hidden (it may be the same) and of output's trainable parameters."""
        ...

    def part(self, index: int) -> Tensor:
        """Return the gradient of a group's attention output; each group is asked for once, in order."""
        ...
