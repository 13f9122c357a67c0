"""A model's shape as the planner sees it: what its layers hold, and what a token meets of it."""

from typing import NamedTuple

# of an element of a quantised matrix (models/quantized.py): its code, and its share of scales and their tables
BITS = {"nf4": 4 + 8 / 64 + 32 / 64 / 256, "fp8": 8.01}


class Model(NamedTuple):
    """A model's shape; `parameters` and `trained` count all and the trained ones."""

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
    qk_norm: bool = False  # queries and keys are also kept as they were before their norms
    quantize: str = "none"  # how the layers' matrices are kept (models/quantized.py)
    windows: tuple[int | None, ...] = ()  # of every layer, or of none (parallel/layout.py)
    norms_after: int = (
        0  # of a layer's two halves that have a norm after them, which keeps its input
    )
    # of the layers that have experts in place of the MLP: how many they are, the experts of a layer and of a token, and
    # an expert's intermediate width
    sparse_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_width: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def normalised_width(self) -> int:
        """The width of the queries and keys that have norms."""
        return (self.query_width + self.kv_width) * self.qk_norm

    @property
    def attention_parameters(self) -> int:
        return 2 * self.width * (self.query_width + self.kv_width)

    @property
    def feed_forward_parameters(self) -> int:
        """The parameters of a layer's second half, of the larger kind."""
        experts = self.experts * (3 * self.expert_width + 1) * self.width
        return max(experts, 3 * self.width * self.intermediate * self.has_mlp)

    @property
    def has_mlp(self) -> bool:
        """Whether any layer has an MLP."""
        return self.sparse_layers < self.layers or not self.experts

    @property
    def inner_width(self) -> int:
        """The intermediate width of a token's MLP, or of its experts together, whichever is larger."""
        return max(self.active_experts * self.expert_width, self.intermediate * self.has_mlp)

    @property
    def copied_width(self) -> int:
        """The width of the copies of a token that its experts take."""
        return self.active_experts * self.width

    @property
    def layer_parameters(self) -> int:
        """The parameters of a layer's matrices, of the larger kind."""
        return self.attention_parameters + self.feed_forward_parameters

    @property
    def matrices(self) -> int:
        """The parameters of all layers' matrices."""
        return self._matrices(self.experts)

    @property
    def active_matrices(self) -> int:
        """The parameters of the layers' matrices that a token meets."""
        return self._matrices(self.active_experts)

    def _matrices(self, experts: int) -> int:
        of_experts = 3 * self.expert_width * experts + self.experts  # with the router
        inner = (self.layers - self.sparse_layers) * 3 * self.intermediate
        inner += self.sparse_layers * of_experts
        return self.layers * self.attention_parameters + self.width * inner

    def layer_bytes(self, element_size: int) -> float:
        """Return the bytes of a layer's matrices."""
        return self.layer_parameters * BITS.get(self.quantize, 8 * element_size) / 8

    def weight_bytes(self, element_size: int) -> float:
        """Return the bytes of all weights."""
        held = self.matrices * BITS.get(self.quantize, 8 * element_size) / 8
        return element_size * (self.parameters - self.matrices) + held

    @property
    def vocabulary_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def forward_parameters(self) -> int:
        """The matrices that a forward pass multiplies each token with."""
        return self.active_matrices + self.vocabulary_parameters * self.has_head

    @property
    def is_full(self) -> bool:
        """Whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters
