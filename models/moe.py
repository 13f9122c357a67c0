"""Experts as the feed-forward of a layer: a router chooses a few of many MLPs for every row.

All experts of a layer are two parameters, which ZeRO-3 gathers with the layer: experts travel to tokens.

Shapes: S rows, D width, N experts, F an expert's width, k experts of a row.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.modules import MLP, Linear
from models.ops.experts import ExpertStacks, SparseMLP, Stack, is_grouped
from models.ops.linear import Adapter, trained
from ulysses.memory.levels import EXPERT_TILES
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.ranges import count_rows


def times_counted(batch: ShardedBatch) -> Tensor:
    """Return to how many sequences each local row [S] belongs: none in the tail, several where they share it."""
    ids, plan = batch.sequence_ids, batch.attention_plan
    times = (ids < batch.num_sequences).long()
    for start, end in chain(*plan.prefixes.values()):
        holder = plan.cu_seqlens.index(start)  # the sequence that holds these rows
        before = count_rows(plan.prefixes.get(holder, ()))
        times += (ids == holder) & (batch.positions < before + end - start)
    return times


class RouterRecord:
    """What the routers of a model choose in an optimizer step.

    The decoder opens it before a forward pass and closes it after the last layer, so that what backward computes again
    is not noted twice. Each row counts as often as `times_counted` says.

    layers: how many layers have experts; each counts itself when it is built. num_experts: N.
    counts: how many rows chose each expert of every layer, [layers, N] int64.
    probabilities: summed over rows and layers [N] float64, if they are asked for.
    balance: what the balance loss adds to the gradient of every row's probabilities [N], or None.
    counts_all: passes without gradient are noted too. on_close: is called at the end of a noted pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None
        self.layers, self.num_experts = 0, config.moe.num_experts
        self.counts_all = self.is_open = False
        self.on_close: Callable[[], None] | None = None
        self.times: Tensor | None = None  # of the newest pass, [S]
        self.restart()

    def restart(
        self, *, with_probabilities: bool = False, balance: Tensor | None = None
    ) -> None:
        """Forget what was noted, and set what later passes note and add."""
        self.counts: Tensor | None = None
        self.probabilities: Tensor | None = None
        self.with_probabilities, self.balance = with_probabilities, balance

    def open(self, batch: ShardedBatch) -> None:
        """Begin a pass, if it is to be noted. Its backward calls `note` again, and comes before another pass begins."""
        self.is_open = self.counts_all or torch.is_grad_enabled()
        if not self.is_open or not self.layers:
            return
        self.times = times_counted(batch)
        if self.counts is None:
            self.counts = self.times.new_zeros(self.layers, self.num_experts)
            if self.with_probabilities:
                self.probabilities = self.counts.new_zeros(
                    self.num_experts, dtype=torch.float64
                )

    def close(self) -> None:
        """End the pass."""
        if self.is_open and self.on_close is not None:
            self.on_close()
        self.is_open = False

    def note(self, layer: int, chosen: Tensor, probabilities: Tensor, part: slice) -> None:
        """Note the experts chosen [n, k] by one layer for a part of the rows, and their probabilities [n, N].

        Where the probabilities have a gradient, that of the balance loss is added to it.
        """
        if self.times is None:
            return
        times = self.times[part]
        if probabilities.requires_grad:
            probabilities.register_hook(partial(self._add_balance, times))
        if self.is_open and self.counts is not None:
            by_copy = times.repeat_interleave(chosen.shape[1])
            self.counts[layer].index_add_(0, chosen.flatten(), by_copy)
            if self.probabilities is not None:
                self.probabilities += times.double() @ probabilities.detach().double()

    def _add_balance(self, times: Tensor, grad: Tensor) -> Tensor:
        return grad if self.balance is None else grad + times[:, None] * self.balance


class Router(nn.Module):
    """Hold the weights that choose k experts for every row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k, self.normalise = config.moe.num_experts_per_tok, config.moe.norm_topk_prob
        N = config.moe.num_experts
        self.weight = nn.Parameter(torch.empty(N, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(N)) if config.family.clamped_experts else None


class ExpertMatrices(nn.Module):
    """Hold the experts' matrices: gate_up_proj [N, 2F, D], gate before up, and down_proj [N, D, F].

    Clamped experts have them transposed, [N, D, 2F] and [N, F, D], with gate and up in turns, and have biases [N, 2F]
    and [N, D]. linear: the class of linear modules, which says how matrices are held. Adapters are lora_A
    [N, r, inputs] and lora_B [N, outputs, r] by the names of the matrices.
    """

    def __init__(self, config: ModelConfig, linear: type[Linear]) -> None:
        super().__init__()
        assert config.moe is not None
        N, F, D = config.moe.num_experts, config.moe.moe_intermediate_size, config.hidden_size
        self.num_experts, self.clamped = N, config.family.clamped_experts
        self.activation = "clamped" if self.clamped else config.family.activation
        self.sizes = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}  # outputs and inputs
        self.packed: dict[str, Any] = {}  # what the bytes of quantised matrices stand for
        self.scale, self.is_on = 1.0, True  # of the adapters
        for name, (outputs, inputs) in self.sizes.items():
            sides = (inputs, outputs) if self.clamped else (outputs, inputs)
            matrices, self.packed[name] = linear.empty((N, *sides))
            self.register_parameter(name, matrices)
            bias = nn.Parameter(torch.empty(N, outputs)) if self.clamped else None
            self.register_parameter(f"{name}_bias", bias)
        self.lora_A: Any = None  # or an nn.ParameterDict
        self.lora_B: Any = None

    def add_adapters(self, names: Iterable[str], rank: int, scale: float) -> None:
        """Give matrices adapters, whose values are uninitialised."""
        self.scale, N = scale, self.num_experts
        a, b = [], []  # pairs, because torch sorts the names of a plain dict
        for name in names:
            outputs, inputs = self.sizes[name]
            a.append((name, nn.Parameter(torch.empty(N, rank, inputs))))
            b.append((name, nn.Parameter(torch.empty(N, outputs, rank))))
        if a:  # made whole, because ZeRO-3 partitions what a new module holds
            self.lora_A, self.lora_B = nn.ParameterDict(a), nn.ParameterDict(b)

    def _stack(self, name: str) -> Stack:
        adapter = None
        if self.is_on and self.lora_A is not None and name in self.lora_A:
            adapter = Adapter(self.lora_A[name], self.lora_B[name], self.scale)
        bias = getattr(self, f"{name}_bias")
        return Stack(getattr(self, name), self.packed[name], adapter, bias, self.clamped)

    @property
    def stacks(self) -> ExpertStacks:
        """The matrices in the form that operations take."""
        gate_up, down = self._stack("gate_up_proj"), self._stack("down_proj")
        return ExpertStacks(gate_up, down, self.activation)


class MoE(nn.Module):
    """Hold the experts of a layer and the router that chooses k of them for each row; `fused` adds up their outputs."""

    tile_factor = EXPERT_TILES
    fits_graphs = False  # graphs would not note what routers choose

    def __init__(
        self,
        config: ModelConfig,
        linear: type[Linear],
        record: RouterRecord,
    ) -> None:
        super().__init__()
        if config.family.clamped_experts:
            self.router = Router(config)
        else:
            self.gate = Router(config)
        self.experts = ExpertMatrices(config, linear)
        self.record, self.layer_number = record, record.layers
        record.layers += 1
        self.shared_expert: Any = None
        if config.family.shared_expert:
            assert config.moe is not None
            width = config.moe.shared_expert_intermediate_size
            self.shared_expert = MLP(config, linear, width)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def shared(self, x: Tensor) -> Tensor:
        """Return the gated output of the expert that all rows go through."""
        return self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)

    @property
    def router_module(self) -> Router:
        """The router, under the name that files have for it."""
        return self.router if self.experts.clamped else self.gate

    @property
    def is_capturable(self) -> bool:
        """Whether products of all experts run without waiting for the sizes of groups, in the router's dtype."""
        sizes = self.experts.sizes["gate_up_proj"]
        matrix = self.router_module.weight.new_empty(sizes, device="meta")
        return is_grouped(matrix, matrix.mT.contiguous())

    def fused(self) -> SparseMLP:
        """Return what computes this module in a layer's second half."""
        router = self.router_module
        mlp = SparseMLP(
            [*router.parameters()],
            self.experts.stacks,
            router.top_k,
            router.normalise,
            self.record,
            self.layer_number,
        )
        if self.shared_expert is None:
            return mlp
        parts = self.shared_expert, self.shared_expert_gate
        of_shared = trained([p for m in parts for p in m.parameters()])
        return mlp._replace(shared=self.shared, of_shared=of_shared)
