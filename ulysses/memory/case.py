"""What the planner is asked about: a model, a machine, a step's work and the memory settings, all plain numbers.

Shapes: T tokens of a micro-batch over a sequence-parallel group, S local tokens, D width, H query heads, K kv heads,
E head dim, F feed-forward width, V vocabulary, W processes.
"""

from math import gcd
from typing import NamedTuple

from ulysses.memory.calibration import Calibration
from ulysses.memory.tiling import TilingOptions
from ulysses.parallel.layout import head_layout

GIB = 1 << 30


class Model(NamedTuple):
    """Give a model's shape; `parameters` and `trained` count all and the trained ones, of all decoders."""

    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    parameters: int
    trained: int
    has_head: bool = True  # False: a score per token instead of the vocabulary
    head_divisor: int = (
        0  # what else the ranks that exchange heads must divide, of models beside this one
    )
    decoders: int = (
        1  # 2: a second stack of layers runs on the same tokens (a value model beside the policy)
    )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        return (
            2 * self.width * (self.query_width + self.kv_width) + 3 * self.width * self.intermediate
        )

    @property
    def vocabulary_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def is_full(self) -> bool:
        """Say whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters


class Machine(NamedTuple):
    """Give GPUs and memory in bytes, speeds in FLOP/s and bytes/s per GPU; defaults are an H200 node's."""

    gpus: int
    gpu_bytes: float
    host_bytes: float = 0.0  # per node, free for training
    gpus_per_node: int = 8
    peak_flops: float = 989e12
    link: float = 450e9  # between GPUs of a node, one direction
    node_link: float = 50e9  # between nodes
    hbm: float = 4.8e12
    host_link: float = 15e9  # all GPUs of a node copying at once

    @property
    def local_processes(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    def link_over(self, ranks: int) -> float:
        """Return the link that a collective over so many neighbouring ranks is bound by."""
        return self.link if ranks <= self.gpus_per_node else min(self.link, self.node_link)


class Rollout(NamedTuple):
    """Give what one process decodes before `steps` optimizer steps: PPO's answers, `batch` of them at a time."""

    answers: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    merged: bool = False  # adapters are added into a copy of the matrices first


class Work(NamedTuple):
    """Give what a step computes: `tokens` of one micro-batch per sequence-parallel group, cut into `documents`."""

    tokens: int
    sp: int = 1
    micro_batches: int = 1
    documents: int = 1  # equally long; 2 for one pair
    forwards: float = (
        0.0  # passes without gradient over the same tokens: a live reference, KTO's baseline
    )
    rollout: Rollout | None = None

    @property
    def local(self) -> int:
        return -(-self.tokens // self.sp)


class Options(NamedTuple):
    """Give the memory settings.

    level: recompute level of the layers; the last `upper_layers` have the level `upper` instead, which keeps more: their
    backward comes first, and what they kept is free again when the others start to recompute.
    offloaded_layers: how many, from the first on, keep their tensors on the host.
    """

    level: str = "none"
    upper: str = "none"
    upper_layers: int = 0
    offloaded_layers: int = 0
    tiling: TilingOptions = TilingOptions()
    logits_rows: int = 0  # 0: tiles of LOGITS_TILE_BYTES
    element_size: int = 2
    gathered_layers: int = (
        0  # the last ones, whose gathered weights stay from the forward to the backward pass
    )
    offload_optimizer: bool = False
    offload_parameters: bool = False
    frozen_parameters: int = 0  # of models held beside the trained one
    saves: bool = False  # checkpoints are written: their copy passes through host memory
    head_chunks: tuple[
        int, ...
    ] = ()  # to choose `tiling.head_chunks` from, the fewest first; empty: it is given
    calibration: Calibration = Calibration()

    def counts(self, layers: int) -> dict[str, int]:
        """Return how many layers have each level."""
        upper = min(self.upper_layers, layers)
        found = {self.level: layers - upper}
        found[self.upper] = found.get(self.upper, 0) + upper
        return {level: count for level, count in found.items() if count}


class Shards(NamedTuple):
    """Say how attention is split over `sp` ranks: U head-parallel times R row-parallel (ulysses.parallel.layout)."""

    head_ranks: int
    row_ranks: int
    query: int  # heads on one rank, of all groups together
    key: int


def shards(model: Model, sp: int, chunks: int = 1) -> Shards:
    """Return the split of the model's heads over `sp` ranks; the row-parallel ones all hold their heads' whole keys.

    Heads that travel in several groups (`chunks`) leave fewer kv heads than ranks in each, which are then sent more often.
    """
    ranks = gcd(sp, model.heads, model.head_divisor)
    layout = head_layout(model.heads // chunks, model.kv_heads // chunks, ranks)
    return Shards(ranks, sp // ranks, chunks * layout.query, chunks * layout.key)


def kept_kv_heads(model: Model, sp: int, chunks: int = 1) -> int:
    """Return the kv heads that a rank holds after the exchange, per local token: copies and gathered rows included."""
    split = shards(model, sp, chunks)
    return split.key * split.head_ranks * split.row_ranks
