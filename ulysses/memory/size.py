"""What the parts of a layer hold, keep and compute, as each part says of itself; the levels and the planner add.

Numbers are elements for each local row, unless something else is said.
"""

from typing import NamedTuple


class Setting(NamedTuple):
    """What the sizes depend on besides the model's shape.

    ranks: of a sequence-parallel group; `head_ranks` of them split the heads, and sets of those the rows.
    is_full: the matrices themselves are trained, rather than adapters.
    element_size: bytes of an element of weights and activations.
    """

    ranks: int = 1
    head_ranks: int = 1
    is_full: bool = True
    element_size: int = 2


class MixerSize(NamedTuple):
    """What a mixer takes. A further kind of mixer is one more of these, and changes nothing in the planner.

    parameters: of its matrices, all of which a row meets.
    out: width of the mix's output.
    results, exact: what `mix_forward` returns in the weights' dtype and in float32, as `tensors` tensors.
    kept: what level "none" keeps besides the input and these.
    restored: what a level that projects again holds meanwhile, besides what the mix reads.
    work: what backward holds at its fullest moment, the gradients of the mix among it.
    packed: what an exchange holds: its inputs, its buffer and its results.
    sent: what travels to other ranks, forward alone.
    pair_flops, row_flops: FLOPs of the mix forward, for each unit of parallel.layout.squares and for each row.
    backward: FLOPs of its backward, as a multiple of these.
    cached, state: what decoding keeps of every token, and of every answer however long it is.
    captured: 1 if a CUDA graph may run it.
    """

    parameters: float
    out: float
    results: float
    exact: float
    tensors: int
    kept: float
    restored: float
    work: float
    packed: float
    sent: float
    pair_flops: float = 0.0
    row_flops: float = 0.0
    backward: float = 2.5
    cached: float = 0.0
    state: float = 0.0
    captured: float = 1


class FeedForwardSize(NamedTuple):
    """What a feed-forward takes.

    parameters, met: of its matrices, and those of them that a row meets.
    inner: width between its products, of all experts of a row together.
    copied: width of a row's copies, one for each of its experts.
    kept, exact: what level "none" keeps in the weights' dtype and in float32.
    work: what a row of a tile needs in backward.
    unpacked: elements of matrices that exist while it works, if the matrices are quantised.
    tile_factor: a tile has so many times as many rows as usual.
    captured: 1 if a CUDA graph may run it.
    """

    parameters: float
    met: float
    inner: float
    copied: float
    kept: float
    exact: float
    work: float
    unpacked: float = 0.0
    tile_factor: float = 1
    captured: float = 1


class LayerSize(NamedTuple):
    """What a layer takes: its width, its norms behind a half (which keep their input), and its two parts."""

    width: int
    norms_after: int
    mixer: MixerSize
    feed_forward: FeedForwardSize

    @property
    def parameters(self) -> float:
        return self.mixer.parameters + self.feed_forward.parameters

    @property
    def met(self) -> float:
        """The parameters of matrices that a row meets."""
        return self.mixer.parameters + self.feed_forward.met

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs may run all of it."""
        return self.mixer.captured == self.feed_forward.captured == 1
