"""The planner's question and its answer: a step of a model on a machine, and what the layers keep in it.

A `Case` is what is asked, a `Plan` what is answered. memory_choice.py makes the case of a run and finds its plan, and
costs.py says what a plan takes.
"""

import math
import time
from collections import Counter
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from models.arch import ModelConfig
from models.kinds import count_parameters
from models.layers import layer_sizes
from ulysses.environment import local_world_size
from ulysses.memory.levels import LEVELS
from ulysses.memory.size import LayerSize, Setting
from ulysses.parallel.mesh import gather
from ulysses.stages.base import PlannedRollout

GIB = 1 << 30
PEAKS = {  # dense bfloat16 FLOP/s, and bytes/s of memory, by part of the device name, from the vendors' data sheets
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H800": (989e12, 3.35e12),
    "B200": (2250e12, 8e12),
    "A100": (312e12, 2e12),
    "A800": (312e12, 2e12),
    "L40S": (362e12, 0.86e12),
    "4090": (165e12, 1e12),
}
# of a process without a GPU, roughly: it only decides how much work hides a launch
CPU_FLOPS = 1e11
HOST_FILL = 0.9  # share of a node's free memory that training may take
LINK = 450e9  # bytes/s between two GPUs of one node, one direction
NODE_LINK = 50e9  # of two nodes
MATRICES = 0.64  # rate of matrix products, as a share of the peak, as measured on H200
# Seconds in which the host launches one layer, forward and backward, with weights that are gathered and that stay;
# CUDA graphs need none. They pay where a layer takes the GPU less than GRAPH_SECONDS.
LAUNCH, LAUNCH_RESIDENT = 7e-3, 3e-3
GRAPH_SECONDS = 5e-3


# ---------------------------------------------------------------- the machine


class Machine(NamedTuple):
    """GPUs, their memory in bytes, which is infinite for a CPU in their place, their peak in FLOP/s, and bytes/s."""

    gpus: int
    gpu_bytes: float
    host_bytes: float = 0.0  # per node, free for training; 0 if unknown
    gpus_per_node: int = 8
    peak_flops: float = PEAKS["H200"][0]
    memory_rate: float = PEAKS["H200"][1]

    @property
    def is_gpu(self) -> bool:
        return self.gpu_bytes < math.inf

    @property
    def local_processes(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def host_budget(self) -> float:
        """The host memory that one process may take."""
        return HOST_FILL * self.host_bytes / self.local_processes

    def link(self, ranks: int) -> float:
        """Return the speed of the slowest link between this many neighbouring ranks."""
        return LINK if ranks <= self.gpus_per_node else NODE_LINK


def cpu_machine(processes: int) -> Machine:
    """Return processes without GPUs, whose memory has no limit."""
    return Machine(processes, math.inf, math.inf, 1, CPU_FLOPS, CPU_FLOPS)


def this_machine(device: torch.device, host_gib: float = 0.0) -> Machine:
    """Return the slowest and smallest GPU and host memory of all ranks and the largest node, so that they decide alike.

    On CPU there is no limit. `host_gib` is a node's host memory (memory.host_memory), 0 what its kernel reports. All
    ranks call it together, before they allocate.
    """
    own = cpu_machine(1)
    if device.type == "cuda":
        # of what this process may take: all, unless the program set a smaller share
        memory = int(
            torch.cuda.get_device_properties(device).total_memory
            * torch.cuda.get_per_process_memory_fraction(device)
        )
        host, peaks = host_gib * GIB or free_host_bytes(), device_peaks() or PEAKS["H200"]
        own = Machine(1, memory, host, local_world_size(), *peaks)
    gpus, memories, hosts, nodes, flops, rates = zip(*gather(own))
    return Machine(sum(gpus), min(memories), min(hosts), max(nodes), min(flops), min(rates))


def device_peaks() -> tuple[float, float] | None:
    """Return this GPU's dense bfloat16 FLOP/s and the bytes/s of its memory, or None where they are not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peaks for part, peaks in PEAKS.items() if part in name), None)


def cpu_flops(dtype: str) -> float:
    """Measure the FLOP/s of this process's cores in a product of matrices: 512 wide, the fastest of three."""
    matrix, seconds = torch.rand(512, 512).to(getattr(torch, dtype)), []
    for _ in range(3):
        begun = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - begun)
    return 2 * 512**3 / min(seconds)


def slow_products(dtype: str) -> str:
    """Return a sentence if this CPU multiplies matrices of the dtype much more slowly than float32's, or ""."""
    if dtype == "float32" or (factor := cpu_flops("float32") / cpu_flops(dtype)) < 2:
        return ""
    return (
        f"products of {dtype} matrices are {factor:.0f} times slower than those of float32 on this CPU; "
        'set model.dtype = "float32"'
    )


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered.

    A machine that is given memory on demand reports less than there will be; memory.host_memory is for it.
    """
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


# ---------------------------------------------------------------- question and answer


class Model(NamedTuple):
    """A model's shape, how many parameters it has and how many of them are trained, and how its matrices are kept.

    unmet: of the trained ones, adapters of experts that a token does not go through.
    """

    shape: ModelConfig
    parameters: int
    trained: int
    has_head: bool = True  # False: a score per token instead of the vocabulary
    quantize: str = "none"  # how the layers' matrices are kept (models/quantized.py)
    unmet: int = 0

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

        return parameters * BITS / 8

    def weight_bytes(self, element_size: int) -> float:
        """Return the bytes of all weights."""
        matrices = self.layers * self.layer.parameters
        others = element_size * (self.parameters - matrices)
        return others + self.matrix_bytes(matrices, element_size)


def plain_model(shape: ModelConfig, *, reward: bool = False) -> Model:
    """Return the planner's view of a model that trains all its weights."""
    parameters = count_parameters(shape, reward=reward)
    return Model(shape, parameters, trained=parameters, has_head=not reward)


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
    whole_steps: no step has more than one micro-batch for each group.
    forwards: passes without gradient over the same tokens (live reference, KTO's baseline), counted in passes of the
        trained model.
    logit_bytes: see ulysses.stages.base.Requirements.
    rollout: with the answers that this process decodes before it trains on them.
    samples: those of run.samples, which every language model of the run gives.
    halvings: how often the number of answers decoded at a time is halved, so that they fit.
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
    whole_steps: bool = False
    forwards: float = 0.0
    logit_bytes: int = 0
    rollout: PlannedRollout | None = None
    samples: PlannedRollout | None = None
    halvings: int = 0
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
    def keeps_gradients(self) -> bool:
        """Whether gradients stay as the backward pass leaves them until the update (zero/reduce.py)."""
        case = self.case
        return case.whole_steps and case.machine.gpus == 1 and not case.offload_optimizer

    @property
    def graphs(self) -> bool:
        """Whether the layers run as CUDA graphs (memory/graphs.py)."""
        case = self.case
        alone = self.resident and case.sp == 1 and {*self.levels} == {"none"}
        fits = case.machine.is_gpu and case.element_size == 2
        if not (alone and fits and case.model.layer.is_captured):
            return False
        return case.local < GRAPH_SECONDS * self._layer_rate

    @property
    def _layer_rate(self) -> float:
        """The tokens that one layer computes in a second, forward and backward."""
        return MATRICES * self.case.machine.peak_flops / (6 * self.case.model.layer.parameters)

    @property
    def launched_tokens(self) -> float:
        """The tokens that the GPU computes while its host launches all layers, where CUDA graphs spare it that.

        With shared prompts, which the graphs do not know, a layer has twice the launches.
        """
        return 2 * LAUNCH_RESIDENT * self._layer_rate if self.graphs else 0.0

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        if len({*self.levels}) == 1:
            return self.levels[0]
        return "+".join(f"{level}*{n}" for level, n in Counter(self.levels).items())
