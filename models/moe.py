"""Experts as the feed-forward of a layer: a router chooses a few of many MLPs for every row.

All experts of a layer are two parameters, which ZeRO-3 gathers with the layer: experts travel to tokens.

Shapes: S rows, D width, N experts, F an expert's width, k experts of a row.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.modules import MLP, NO_NORM, Linear, MakeLinear, Norm
from models.ops.experts import (
    ExpertsNode,
    ExpertStacks,
    SparseMLP,
    Stack,
    is_grouped,
    route,
)
from models.ops.linear import Adapter
from models.ops.norm import NormRule
from ulysses.memory.tiling import EXPERT_TILES
from ulysses.parallel.batch import ShardedBatch


def times_counted(batch: ShardedBatch) -> Tensor:
    """Return for each local row [S] how many sequences it is of: none in the tail, several where a prompt is shared."""
    ids, plan = batch.sequence_ids, batch.attention_plan
    times = (ids < batch.num_sequences).long()
    for start, end in plan.prefixes.values():
        owner = plan.cu_seqlens.index(start)
        times += (ids == owner) & (batch.positions < end - start)
    return times


class RouterRecord:
    """What the routers of a model choose in an optimizer step.

    The decoder opens it for a pass forward whose gradient is wanted, and closes it: what backward computes again is not
    noted again. Each row counts as often as `times_counted` says.

    layers, number: the layers with experts, which count themselves, and N. counts: rows of every layer's experts,
    [layers, N] int64. probabilities: summed over rows and layers [N] float64, if they are wanted. balance: what the
    balance loss adds to the gradient of every row's probabilities [N], or None.
    counts_all: passes without gradient are noted too. on_close: is called at the end of a pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None
        self.layers, self.number = 0, config.moe.num_experts
        self.counts_all = self.is_open = False
        self.on_close: Callable[[], None] | None = None
        self.times: Tensor | None = None  # [S], of the newest pass
        self.restart()

    def restart(
        self, *, with_probabilities: bool = False, balance: Tensor | None = None
    ) -> None:
        """Forget everything but what the balance loss adds."""
        self.counts: Tensor | None = None
        self.probabilities: Tensor | None = None
        self.with_probabilities, self.balance = with_probabilities, balance

    def open(self, batch: ShardedBatch) -> None:
        """Begin a pass, if it is to be noted."""
        self.is_open = self.counts_all or torch.is_grad_enabled()
        if not self.is_open or not self.layers:
            return
        self.times = times_counted(batch)
        if self.counts is None:
            self.counts = self.times.new_zeros(self.layers, self.number)
            if self.with_probabilities:
                self.probabilities = self.counts.new_zeros(self.number, dtype=torch.float64)

    def close(self) -> None:
        """End the pass."""
        if self.is_open and self.on_close is not None:
            self.on_close()
        self.is_open = False

    def note(self, place: int, chosen: Tensor, probabilities: Tensor, part: slice) -> None:
        """Note the experts chosen [n, k] for a part of the rows by one layer, of all probabilities [n, N].

        Where these have a gradient, the balance loss adds its own.
        """
        if self.times is None:
            return
        times = self.times[part]
        if probabilities.requires_grad:
            probabilities.register_hook(partial(self._add_balance, times))
        if self.is_open and self.counts is not None:
            every = times.repeat_interleave(chosen.shape[1])
            self.counts[place].index_add_(0, chosen.flatten(), every)
            if self.probabilities is not None:
                self.probabilities += times.double() @ probabilities.detach().double()

    def _add_balance(self, times: Tensor, grad: Tensor) -> Tensor:
        return grad if self.balance is None else grad + times[:, None] * self.balance


class Router(nn.Module):
    """Choose k experts for every row, by a softmax in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.count, self.normalise = config.moe.num_experts_per_tok, config.moe.norm_topk_prob
        N = config.moe.num_experts
        self.weight = nn.Parameter(torch.empty(N, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(N)) if config.family.clamped_experts else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the weights and the numbers [S, k] of the experts of rows x, and all probabilities [S, N]."""
        return route(x, self.weight, self.count, self.normalise, self.bias)


class ExpertMatrices(nn.Module):
    """Hold the experts' matrices: gate_up_proj [N, 2F, D], gate before up, and down_proj [N, D, F].

    Clamped ones are the other way round, [N, D, 2F] and [N, F, D], and have biases [N, 2F] and [N, D].
    quantized: each is a frozen parameter of bytes, of a matrix [N * 2F, D] or [N * D, F]. Adapters are lora_A
    [N, r, inputs] and lora_B [N, outputs, r] by the names of the matrices.
    """

    def __init__(self, config: ModelConfig, quantized: bool = False) -> None:
        super().__init__()
        assert config.moe is not None
        N, F, D = config.moe.num_experts, config.moe.moe_intermediate_size, config.hidden_size
        self.number, self.clamped = N, config.family.clamped_experts
        self.activation = "clamped" if self.clamped else config.family.activation
        self.sizes = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}  # outputs and inputs
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.packed: dict[str, Any] = {}  # what the bytes stand for
        self.scale, self.adapted = 1.0, True
        for name, (outputs, inputs) in self.sizes.items():
            size = (inputs, outputs) if self.clamped else (outputs, inputs)
            self.shapes[name] = shape = (N, *size)
            if quantized:
                from models.quantized import Packed, empty_packed

                self.packed[name] = Packed(shape)
                matrices = nn.Parameter(empty_packed(shape), requires_grad=False)
            else:
                matrices = nn.Parameter(torch.empty(shape))
            self.register_parameter(name, matrices)
            bias = nn.Parameter(torch.empty(N, outputs)) if self.clamped else None
            self.register_parameter(f"{name}_bias", bias)
        self.lora_A: nn.Module | None = None
        self.lora_B: nn.Module | None = None

    def add_adapters(self, names: Iterable[str], rank: int, scale: float) -> None:
        """Give matrices adapters, whose values somebody fills."""
        self.scale, N = scale, self.number
        a, b = [], []  # pairs, of which torch keeps the order
        for name in names:
            outputs, inputs = self.sizes[name]
            a.append((name, nn.Parameter(torch.empty(N, rank, inputs))))
            b.append((name, nn.Parameter(torch.empty(N, outputs, rank))))
        if a:  # ZeRO-3 partitions what a new module holds
            self.lora_A, self.lora_B = nn.ParameterDict(a), nn.ParameterDict(b)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapters on or off."""
        self.adapted = enabled

    def _stack(self, name: str) -> Stack:
        adapter = None
        if self.adapted and hasattr(self.lora_A, name):
            own = getattr(self.lora_A, name), getattr(self.lora_B, name)
            adapter = Adapter(*own, self.scale)
        bias = getattr(self, f"{name}_bias")
        packed = self.packed.get(name)
        return Stack(getattr(self, name), packed, adapter, bias, self.clamped)

    @property
    def stacks(self) -> ExpertStacks:
        """The operations' view of the matrices."""
        gate_up, down = self._stack("gate_up_proj"), self._stack("down_proj")
        trained = [p for p in self.parameters() if p.requires_grad] if self.adapted else []
        return ExpertStacks(gate_up, down, self.number, trained, self.activation)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum [S, D] of the experts chosen for rows x."""
        experts = self.stacks
        return ExpertsNode.apply(x, weights, chosen, experts, *experts.trained)


class MoE(nn.Module):
    """Compute the sum of the MLPs that a router chooses for each of rows [S, D], times its weights."""

    tile_factor, fits_graphs = EXPERT_TILES, False  # graphs would not note what routers choose

    def __init__(
        self,
        config: ModelConfig,
        linear: MakeLinear,
        record: RouterRecord,
        quantized: bool = False,
    ) -> None:
        super().__init__()
        self.router_name = "router" if config.family.clamped_experts else "gate"
        self.register_module(self.router_name, Router(config))
        self.experts = ExpertMatrices(config, quantized)
        self.record, self.place = record, record.layers
        record.layers += 1
        self.shared_expert: Any = None
        if config.family.shared_expert:
            assert config.moe is not None
            width = config.moe.shared_expert_intermediate_size
            self.shared_expert = MLP(config, linear, width)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen, probabilities = self.chooser(x)
        self.record.note(self.place, chosen, probabilities, slice(0, len(x)))
        out = self.experts(x, weights, chosen)
        return out if self.shared_expert is None else out + self.shared(x)

    def shared(self, x: Tensor) -> Tensor:
        """Return what the expert for all rows adds."""
        return self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)

    @property
    def chooser(self) -> Router:
        """The router, under the name that files have for it."""
        return getattr(self, self.router_name)  # type: ignore[no-any-return]

    @property
    def is_capturable(self) -> bool:
        """Whether the host does not wait for the sizes of groups, in the dtype of the router."""
        matrices = self.chooser.weight.new_empty(
            1, *self.experts.shapes["gate_up_proj"][1:], device="meta"
        )
        return is_grouped(matrices, matrices.mT.contiguous())

    def fused(self, norm: Norm, after: Norm, rule: NormRule, factor: float) -> SparseMLP:
        """Return the operation that does the norm and this module; no family has a norm after it, or a factor."""
        assert after is NO_NORM and factor == 1
        router = self.chooser
        beside: tuple = ()
        if self.shared_expert is not None:
            parts = self.shared_expert, self.shared_expert_gate
            beside = self.shared, [p for m in parts for p in m.parameters() if p.requires_grad]
        return SparseMLP(
            norm.weight,
            router.weight,
            self.experts.stacks,
            rule,
            router.count,
            router.normalise,
            self.record,
            self.place,
            router.bias,
            *beside,
        )
