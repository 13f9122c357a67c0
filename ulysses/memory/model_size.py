"""A model's shape as the planner sees it: its matrices, and the bytes that they take."""

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
    def layer_parameters(self) -> int:
        return self.attention_parameters + 3 * self.width * self.intermediate

    def layer_bytes(self, element_size: int) -> float:
        """Return the bytes of a layer's matrices."""
        return self.layer_parameters * BITS.get(self.quantize, 8 * element_size) / 8

    def weight_bytes(self, element_size: int) -> float:
        """Return the bytes of all weights."""
        others = self.parameters - self.layers * self.layer_parameters
        return element_size * others + self.layers * self.layer_bytes(element_size)

    @property
    def vocabulary_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def forward_parameters(self) -> int:
        """The matrices that a forward pass multiplies each token with."""
        return self.layers * self.layer_parameters + self.vocabulary_parameters * self.has_head

    @property
    def is_full(self) -> bool:
        """Whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters
