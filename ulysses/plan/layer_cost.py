"""What a layer takes, by formulas: what it keeps for the backward pass, holds during it, sends and computes.

tests/unit/test_layer_cost.py compares them with a real layer of every family: a layer that changes needs them changed.

Letters: D width, H query heads and K kv heads of width E, F a feed-forward's width, N experts, k of them for each row.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple
from functools import cache
from typing import NamedTuple

from models.arch import ModelConfig
from models.kinds import count_parameters
from ulysses.memory.levels import EXPERT_TILES, TILE_ROWS, tile_rows
from ulysses.parallel.layout import head_layout


class LayerSetup(NamedTuple):
    """What a layer's cost depends on besides the model's shape.

    ranks: of a sequence-parallel group; `head_ranks` of them split the heads, and sets of so many the rows.
    lora_rank: of the matrices' adapters; 0 without. size: bytes of an element.
    """

    ranks: int = 1
    head_ranks: int = 1
    lora_rank: int = 0
    size: int = 2


class LayerCost(NamedTuple):
    """What a layer has, and what each of its rows takes on a rank. "The mix" is attention, softmax or linear.

    width: of the layer's input.
    mixer, feed_forward: parameters of its two parts; active: those that a row is multiplied with.
    kept: bytes that level "none" keeps; results: bytes of the mix's results, which "keep_attention" keeps beside the
    layer's input.
    out: width of the mix's output; mix_work: elements that the mix's backward holds at its fullest moment.
    sent: elements that travel to other ranks in the forward pass.
    pair_flops, row_flops: forward FLOPs of the mix, for each unit of parallel.layout.squares and for each row.
    inner: width between the feed-forward's products; copied: width of a row's copies, one for each of its experts.
    """

    width: float = 0
    mixer: float = 0
    feed_forward: float = 0
    active: float = 0
    kept: float = 0
    results: float = 0
    out: float = 0
    mix_work: float = 0
    sent: float = 0
    pair_flops: float = 0
    row_flops: float = 0
    inner: float = 0
    copied: float = 0

    @property
    def parameters(self) -> float:
        return self.mixer + self.feed_forward

    def kept_bytes(self, level: str, size: int) -> float:
        """Return the bytes that the layer keeps of a row at a level, its input among them."""
        if level == "none":
            return self.kept
        return size * self.width + (self.results if level == "keep_attention" else 0)

    def computed_again(self, level: str, is_full: bool) -> tuple[float, int]:
        """Return what backward repeats at a level: active parameters of one more product, and passes of the mix."""
        if level == "none":
            return 0.0, 0
        again = self.active
        # the feed-forward's last product, a third of it, is repeated for adapters only
        if is_full:
            again -= (self.active - self.mixer) / 3
        return again, 1 if level == "block" else 0

    def backward_bytes(self, level: str, rows: int, size: int, model: "PlannedModel") -> float:
        """Return the bytes that a level's backward holds, the layer's own gradients among them."""
        D, tile = self.width, rows
        if level != "none":
            tile = tile_rows(rows, TILE_ROWS * (EXPERT_TILES if self.copied else 1))
        # gate and up with their gradients
        both = 2 * self.inner * tile
        feed_forward = 2 * both
        # of experts, gate and up may be computed again, and rows are copied, with gradients of the copies; their
        # matrices are unpacked, or copied beside their adapters
        if self.copied:
            fullest = both if level == "none" else 2 * both
            if model.quantize != "none" or model.idle_adapters:
                fullest = max(fullest, 2 / 3 * self.feed_forward)
            feed_forward = both + fullest + 2 * self.copied * tile
        # gradients of the residual and of the mix, and the output
        mixing = 2 * D + self.mix_work
        if level == "block":
            mixing += self.out
        held = size * max(4 * D * rows + feed_forward, mixing * rows)
        # the gradients and, where the feed-forward runs in tiles, their float32 sums
        if model.is_full:
            held += size * self.parameters
            if tile < rows:
                held += 4 * self.feed_forward
        return held


def total(costs: Iterable[LayerCost]) -> LayerCost:
    """Return what several layers, or several parts of one, take together."""
    return LayerCost(*map(sum, zip(*costs)))


@cache
def layer_costs(shape: ModelConfig, setup: LayerSetup) -> list[LayerCost]:
    """Return what each of a model's layers takes, the first layer's first."""
    D, norms_after = shape.hidden_size, sum(map(bool, shape.family.norms[1::2]))
    # the layer's input, what lies between its halves, and what the norms after each half read
    common = LayerCost(width=D, kept=setup.size * D * (2 + norms_after))
    parts = {"linear_attention": _linear_attention, "experts": _experts, "mlp": _mlp}
    costs = []
    for kind in shape.layers:
        mixer = parts.get(kind.mixer, _attention)(shape, setup)
        costs.append(total([common, mixer, parts[kind.feed_forward](shape, setup)]))
    return costs


def _attention(shape: ModelConfig, setup: LayerSetup) -> LayerCost:
    """Return what attention takes. Keys that are copied to several ranks count on each of them."""
    D, E, family = shape.hidden_size, shape.head_dim, shape.family
    H, K = shape.num_attention_heads, shape.num_key_value_heads
    ranks, head_ranks, lora_rank, size = setup
    keys = head_layout(H, K, head_ranks).key
    # widths of all queries, of all keys, and of the keys that the ranks hold together
    query, key, held = H * E, K * E, keys * ranks * E
    gate = query if family.output_gate else 0
    parameters = D * (2 * (query + key) + gate)
    # queries, keys and values, and the output; the inner rows of adapters
    kept = 2 * query + 2 * held + 4 * lora_rank
    if ranks > 1:  # the output before and after its exchange
        kept += query
    if family.qk_norm != "none":
        # queries and keys before their norms; with adapters the values lie beside the keys
        kept += query + key
        if lora_rank and ranks > 1:
            kept += key
    if gate:  # normalised rows for it, its sigmoid and its product
        kept += D + 2 * gate + lora_rank
    results = size * query + 4 * H  # the output and its log-sum-exp
    return LayerCost(
        mixer=parameters,
        active=parameters,
        kept=size * kept + 4 * H,
        results=results,
        out=query,
        # q, k and v, their gradients and the output's, and the kernel's float32 sums
        mix_work=5 * query + 8 * held,
        sent=E * (2 * H // head_ranks * (head_ranks - 1) + 2 * keys * (ranks - 1)),
        pair_flops=2 * query,
    )


def _linear_attention(shape: ModelConfig, setup: LayerSetup) -> LayerCost:
    """Return what linear attention takes. A rank holds all rows of its heads; heads on several ranks count on each."""
    K, H, E, V, taps = astuple(shape.delta)
    D, columns, out = shape.hidden_size, sum(shape.delta.widths), H * V
    ranks = math.gcd(setup.ranks, H)
    size = setup.size
    layout = head_layout(H, K, ranks)
    # width of a rank's heads: q | k | v, b and a
    shard = 2 * layout.key * E + layout.query * (V + 2)
    parameters = D * (columns + 2 * H + 2 * out)
    # normalised rows for the projections and for the gate; the shards; the rule's output, the gate, the normalised
    # output, and the product of these two
    kept = 2 * D + setup.ranks * shard + 4 * out
    kept += setup.lora_rank * (4 if shape.family.fused_projections else 5)
    if shape.family.fused_projections and setup.ranks == 1 and setup.lora_rank:
        kept += 2 * H  # b and a, in one tensor with q | k | v
    return LayerCost(
        mixer=parameters,
        active=parameters,
        kept=size * kept,
        results=size * setup.ranks * layout.query * V,
        out=out,
        # the shards, before and after the convolution and at unit length, the gradients of all three, the output's
        mix_work=6 * setup.ranks * shard + 2 * out,
        sent=shard * (setup.ranks - 1) + out * (ranks - 1) / ranks,
        # for each token a head reads its state twice and writes to it once
        row_flops=6 * H * E * V + 2 * taps * columns,
    )


def _mlp(shape: ModelConfig, setup: LayerSetup) -> LayerCost:
    F = shape.intermediate_size
    parameters = 3 * shape.hidden_size * F
    kept = setup.size * (2 * F + 3 * setup.lora_rank)
    return LayerCost(feed_forward=parameters, active=parameters, kept=kept, inner=F)


def _experts(shape: ModelConfig, setup: LayerSetup) -> LayerCost:
    D, moe = shape.hidden_size, shape.moe
    N, k, F = moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size
    shared = moe.shared_expert_intermediate_size or 0
    # parameters of the shared expert and its gate
    for_all = (3 * shared + 1) * D if shared else 0
    return LayerCost(
        feed_forward=N * (3 * F + 1) * D + for_all,
        active=(3 * k * F + N) * D + for_all,
        # gate and up of the chosen experts, and their numbers
        kept=setup.size * 2 * k * F + 8 * k,
        inner=k * F + shared,
        copied=k * D,
    )


# ---------------------------------------------------------------- models


class PlannedModel(NamedTuple):
    """What the planner knows of a model: its shape, its parameters, how many are trained, and how they are kept.

    idle_adapters: trained parameters that a token does not meet: those of adapters of experts that it does not choose.
    lora_rank: of adapters; 0 without.
    """

    shape: ModelConfig
    parameters: int
    trained: int
    has_head: bool = True  # False: a score per token instead of the vocabulary
    quantize: str = "none"  # how the layers' matrices are kept (models/quantized.py)
    idle_adapters: int = 0
    lora_rank: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters

    @property
    def vocabulary_parameters(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def layers(self) -> list[LayerCost]:
        """What each layer has and computes on one rank."""
        return layer_costs(self.shape, LayerSetup())

    @property
    def largest_layer(self) -> float:
        """The parameters of the largest layer's matrices."""
        return max(layer.parameters for layer in self.layers)

    @property
    def forward_parameters(self) -> float:
        """The matrices that a forward pass multiplies each token with."""
        head = self.vocabulary_parameters if self.has_head else 0
        return total(self.layers).active + head

    def matrix_bytes(self, parameters: float, element_size: int) -> float:
        """Return the bytes of so many parameters of layers' matrices."""
        if self.quantize == "none":
            return parameters * element_size
        from models.quantized import BITS

        return parameters * BITS / 8

    def weight_bytes(self, element_size: int) -> float:
        """Return the bytes of all weights."""
        matrices = total(self.layers).parameters
        others = element_size * (self.parameters - matrices)
        return others + self.matrix_bytes(matrices, element_size)


def plain_model(shape: ModelConfig, *, reward: bool = False) -> PlannedModel:
    """Return the planner's view of a model that trains all its weights."""
    parameters = count_parameters(shape, reward=reward)
    return PlannedModel(shape, parameters, trained=parameters, has_head=not reward)


def model_flops(
    model: PlannedModel, tokens: float, squared_lengths: float, projected: float
) -> float:
    """Return the FLOPs of one forward and backward pass, the numerator of MFU: 6 N T + 6 L (H E) sum(length^2).

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no
    gradient: with A parameters of adapters it is 4 N T + 6 A T. Causal attention counts half of the full square.
    Recomputation, passes without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        projected: tokens that meet the vocabulary projection: those whose target is trained.
    """
    layers = total(model.layers)
    head = model.vocabulary_parameters if model.has_head else 0
    adapters = 0 if model.is_full else model.trained
    # a token meets only a few of a layer's experts
    active = model.parameters - adapters - layers.parameters + layers.active
    weights = (active - head) * tokens + head * projected
    linear = (6.0 if model.is_full else 4.0) * weights
    linear += 6.0 * (adapters - model.idle_adapters) * tokens
    mix = layers.pair_flops * squared_lengths + layers.row_flops * tokens
    return linear + 3.0 * mix
