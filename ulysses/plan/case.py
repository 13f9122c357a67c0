"""The planner's question and its answer: a step of a model on a machine, and what the layers keep in it.

A `Case` is what is asked, a `Plan` what is answered. ulysses/plan/planned_run.py makes the case of a run,
ulysses/plan/memory_choice.py finds its plan, and footprint.py and seconds.py say what a plan takes.
"""

from collections import Counter
from math import gcd
from typing import NamedTuple

from models.arch import ModelConfig
from models.layers import layer_sizes
from ulysses.memory.levels import LEVELS
from ulysses.memory.size import LayerSize, Setting
from ulysses.plan.machine import Machine
from ulysses.stages.base import PlannedRollout

MATRICES = 0.64  # rate of matrix products, as a share of the peak, as measured on H200
# Seconds in which the host launches one layer, forward and backward, with weights that are gathered and that stay;
# CUDA graphs need none. They pay where a layer takes the GPU less than GRAPH_SECONDS.
LAUNCH, LAUNCH_RESIDENT = 7e-3, 3e-3
GRAPH_SECONDS = 5e-3


class Model(NamedTuple):
    """A model's shape, how many parameters it has and how many of them are trained, and how its matrices are kept."""

    shape: ModelConfig
    parameters: int
    trained: int
    has_head: bool = True  # False: a score per token instead of the vocabulary
    quantize: str = "none"  # how the layers' matrices are kept (models/quantized.py)

    @property
    def layers(self) -> int:
        return self.shape.num_hidden_layers

    @property
    def is_full(self) -> bool:
        """Whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters

    @property
    def layer(self) -> LayerSize:
        """The mean of its layers, on one rank."""
        return layer_sizes(self.shape, Setting())[0]

    @property
    def vocabulary_parameters(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def forward_parameters(self) -> float:
        """The matrices that a forward pass multiplies each token with."""
        return self.layers * self.layer.met + self.vocabulary_parameters * self.has_head

    def matrix_bytes(self, parameters: float, element_size: int) -> float:
        """Return the bytes of so many parameters of layers' matrices."""
        if self.quantize == "none":
            return parameters * element_size
        from models.quantized import BITS

        return parameters * BITS[self.quantize] / 8

    def weight_bytes(self, element_size: int) -> float:
        """Return the bytes of all weights."""
        matrices = self.layers * self.layer.parameters
        others = element_size * (self.parameters - matrices)
        return others + self.matrix_bytes(matrices, element_size)


class PlannedStep(NamedTuple):
    """What a step trains: of each example its tokens, and twice the pairs of a query and a key that it sees.

    shares: sequences share their prompts, so that no CUDA graph runs the layers.
    """

    tokens: list[int]
    squares: list[float]
    shares: bool = False


class Case(NamedTuple):
    """What the planner is asked about: a model's step on a machine, and the memory settings.

    tokens: of the fullest micro-batch, which `sp` ranks share, in `documents` of equal length (2 for one pair).
    mean_tokens: of a typical step's micro-batches on average; 0: all are as full as the fullest.
    squares: twice the pairs of a query and a key that an average micro-batch sees, shared prompts included; 0: those of
        equal documents.
    shares: sequences of a typical step share their prompts.
    forwards: passes without gradient over the same tokens (live reference, KTO's baseline), counted in passes of the
        trained model.
    logit_bytes: see ulysses.stages.base.Requirements.
    rollout: with the answers that this process decodes before it trains on them.
    samples: those of run.samples, which every language model of the run gives.
    recompute: the level that is asked for, or "auto".
    weights: "sharded" over all ranks, "resident" on each, or "auto" for the faster of those that fit.
    offload: "none"; "auto" for the fewest layers with which the GPU suffices, or if it never does as many as the host
        holds; "checkpoints" for as many as the host holds.
    moment_bytes: of AdamW's two moments of a trained parameter.
    others: frozen models that the run holds as well; teacher: the one of them whose logits are compared with the
        trained model's.
    """

    model: Model
    machine: Machine
    tokens: int
    sp: int = 1
    micro_batches: int = 1
    mean_tokens: float = 0.0
    documents: int = 1
    squares: float = 0.0
    shares: bool = False
    forwards: float = 0.0
    logit_bytes: int = 0
    rollout: PlannedRollout | None = None
    samples: PlannedRollout | None = None
    recompute: str = "auto"
    weights: str = "auto"
    offload: str = "none"
    element_size: int = 2
    moment_bytes: float = 8.0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    others: tuple[Model, ...] = ()
    teacher: Model | None = None

    @property
    def local(self) -> int:
        return -(-self.tokens // self.sp)

    @property
    def work(self) -> float:
        """The tokens that a micro-batch computes on average."""
        return self.mean_tokens or self.tokens

    @property
    def allowed(self) -> tuple[str, ...]:
        """The levels to choose from, the fastest first."""
        if self.recompute != "auto":
            return (self.recompute,)
        return LEVELS[1:] if self.offload == "checkpoints" else LEVELS

    @property
    def common_heads(self) -> int:
        """The common divisor of the heads of all models that share the mesh."""
        return gcd(*(m.shape.num_attention_heads for m in (self.model, *self.others)))

    def layer_sizes(self, model: Model) -> tuple[LayerSize, LayerSize]:
        """Return the mean of the layers of one of the models, and a layer as large as the largest in everything."""
        head_ranks = gcd(self.sp, self.common_heads)
        return layer_sizes(
            model.shape, Setting(self.sp, head_ranks, model.is_full, self.element_size)
        )


class Plan(NamedTuple):
    """What the planner answers.

    levels: every layer's level, the first layer's first. There are at most two, and the last layers have the level that
        keeps more: their backward comes first, so their memory is free before the other layers recompute.
    offloaded_layers: how many layers, counted from the first, keep their tensors in host memory.
    resident: the weights stay whole on every rank, as on a single one they always do.
    pass_tokens: of the micro-batches of passes without gradient; 0: as many as the case has.
    """

    case: Case
    levels: tuple[str, ...]
    offloaded_layers: int = 0
    resident: bool = False
    pass_tokens: int = 0

    @property
    def launch(self) -> float:
        """Seconds in which the host launches one layer, forward and backward."""
        return LAUNCH_RESIDENT if self.resident else LAUNCH

    @property
    def graphs(self) -> bool:
        """Whether the layers run as CUDA graphs (memory/graphs.py)."""
        case = self.case
        alone = self.resident and case.sp == 1 and {*self.levels} == {"none"}
        if not (alone and case.model.layer.is_captured):
            return False
        is_short = case.local < GRAPH_SECONDS * self._layer_rate
        return is_short and case.element_size == 2 and case.machine.is_gpu

    @property
    def _layer_rate(self) -> float:
        """The tokens that one layer computes in a second, forward and backward."""
        return MATRICES * self.case.machine.peak_flops / (6 * self.case.model.layer.parameters)

    @property
    def launched_tokens(self) -> float:
        """The tokens that the GPU computes while its host launches all layers, where CUDA graphs spare it that.

        With shared prompts, which the graphs do not know, a layer has twice the launches.
        """
        return self.graphs * 2 * LAUNCH_RESIDENT * self._layer_rate

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        if len({*self.levels}) == 1:
            return self.levels[0]
        return "+".join(f"{level}*{n}" for level, n in Counter(self.levels).items())
