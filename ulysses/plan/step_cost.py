"""The planner's question, a step of a model on a machine, its answer, a plan, and the memory and seconds this takes.

    what lives on a GPU      bytes
    states                   weights, those of frozen models too: 2 N, over all ranks if they are sharded; of each
                             trained parameter 4 (master) + 8 (moments; 2 in 8 bits) + 4 (summed gradient), over all
    kept                     what every layer keeps at its level
    working                  the fuller of two moments: the vocabulary's loss, or one layer's backward, and two gathered
                             layers (CUDA graphs hold both, and every layer's gradients, in memory of their own)

Before a step, nothing is kept, and passes without gradient or sampling may hold more than that. Everything is times
SLACK, and CUDA and NCCL come on top. Measured steps judge all this (benchmarks/measured.jsonl): memory within 5%,
seconds within 15%. Elements are of bfloat16 here; in float32 weights have a separate master too.

The planner counts the FLOPs that are executed: recomputation, passes without gradient, every product of the logits. MFU
counts what the model asks for.

Letters: S local tokens, D width, V vocabulary, W processes.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from math import gcd
from typing import NamedTuple

from losses.logprobs import CUDA_TILE_BYTES, LOSS_TILES, equal_tiles
from ulysses.memory.levels import LEVELS
from ulysses.parallel.layout import squares
from ulysses.plan.hardware import Machine
from ulysses.plan.layer_cost import LayerCost, Model, Setting, layer_costs
from ulysses.stages.base import PlannedRollout

FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers
SLACK = 1.03  # the allocator's peak with the fragments that it cannot give back
CONTEXT_BYTES = 1.3e9  # CUDA context and libraries, outside the allocator, on an H200
COMMUNICATOR_BYTES = 2.1e9  # NCCL's buffers, with more than one process

# Rates measured on H200, as shares of the peaks: of products, of memory, and of links that transfers share.
PRODUCTS, MEMORY_RATE, LINKS = 0.64, 0.68, 0.36
WIDE_HEADS = 1.28  # the time of attention with heads wider than 128
# of computation's and of transfers' time is added to the other's: they share the memory and the multiprocessors
CONTENTION = 0.4
HOST_LINK = 15e9  # bytes/s between GPU and host, all GPUs of a node copying at once
# bytes that a layer's elementwise kernels move, for each token and unit of D + the feed-forward's width
ELEMENTWISE = 33
# ... and that eight products with adapters of experts, and their additions, move of each input and output
ADAPTED_EXPERTS = 14
# ... and that a pass without gradient moves of every logit: written, and read twice
LOGIT_BYTES = 12
# Seconds in which the host launches one layer, forward and backward, with weights that are gathered and that stay;
# CUDA graphs need none. They pay where a layer takes the GPU less than GRAPH_SECONDS.
LAUNCH, LAUNCH_RESIDENT = 7e-3, 3e-3
GRAPH_SECONDS = 5e-3
# in which the host lays out, packs and takes in an answer of a rollout, while the GPU waits
ANSWER_SECONDS = 8e-4
STEP_SECONDS = 0.007  # per micro-batch: metadata, the first gather, the last reduction, metrics
# read and written per trained parameter: by norm and zero/update.py, 8 of them the float32 gradient's, and where a
# micro-batch adds its gradient
UPDATE_BYTES, ADDITION_BYTES = 34, 10
# of a layer that is gathered and whose experts have adapters, as measured on NF4 bases
GATHERED_EXPERTS = 6e-3


# ---------------------------------------------------------------- question and answer


class Question(NamedTuple):
    """What the planner is asked: a model's step on a machine, and the memory settings.

    tokens_per_microbatch: of the fullest one, which `sp` ranks share, in `documents` of equal length (2 for one pair).
    fill: how full micro-batches are on average.
    squares: twice the pairs of a query and a key that an average micro-batch sees, shared prompts included; 0: those of
        equal documents.
    shares: sequences share their prompts, which CUDA graphs do not know.
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
    tokens_per_microbatch: int
    sp: int = 1
    micro_batches: int = 1
    fill: float = 1.0
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
    def rows(self) -> int:
        """The rows of the fullest micro-batch on a rank."""
        return -(-self.tokens_per_microbatch // self.sp)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels to choose from, the fastest first."""
        if self.recompute != "auto":
            return (self.recompute,)
        return LEVELS[1:] if self.offload == "checkpoints" else LEVELS

    @property
    def common_heads(self) -> int:
        """The common divisor of the heads of all models that share the mesh."""
        return gcd(*(m.shape.num_attention_heads for m in (self.model, *self.others)))

    def setting(self, model: Model) -> Setting:
        """Return what the costs of one of the models' layers depend on."""
        ranks = self.sp, gcd(self.sp, self.common_heads)
        return Setting(*ranks, not model.is_full, model.rank, self.element_size)

    def layers(self, model: Model) -> list[LayerCost]:
        """Return what each layer of one of the models takes."""
        return layer_costs(model.shape, self.setting(model))


class Plan(NamedTuple):
    """What the planner answers.

    levels: every layer's level, the first layer's first. There are at most two, and the last layers have the level that
        keeps more: their backward comes first, so their memory is free before the other layers recompute.
    offloaded_layers: how many layers, counted from the first, keep their tensors in host memory.
    resident: the weights stay whole on every rank, as on a single one they always do.
    """

    question: Question
    levels: tuple[str, ...]
    offloaded_layers: int = 0
    resident: bool = False

    @property
    def layers(self) -> list[tuple[str, LayerCost]]:
        """Every layer's level and costs."""
        return [*zip(self.levels, self.question.layers(self.question.model))]

    @property
    def kept(self) -> list[float]:
        """The bytes that every layer keeps."""
        q = self.question
        return [layer.kept_bytes(x, q.element_size) * q.rows for x, layer in self.layers]

    @property
    def tokens_per_microbatch(self) -> int:
        return self.question.tokens_per_microbatch

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay as the backward pass leaves them until the update (zero/reduce.py)."""
        q = self.question
        return q.whole_steps and q.machine.gpus == 1 and not q.offload_optimizer

    @property
    def graphs(self) -> bool:
        """Whether the layers run as CUDA graphs (memory/graphs.py)."""
        q, layers = self.question, self.question.model.layers
        alone = self.resident and q.sp == 1 and {*self.levels} == {"none"} and not q.shares
        fits = q.machine.is_gpu and q.element_size == 2
        # what experts and linear attention launch depends on the rows
        if not (alone and fits) or any(x.copied or x.row_flops for x in layers):
            return False
        of_layer = 6 * q.rows * max(layer.parameters for layer in layers)
        return of_layer < GRAPH_SECONDS * PRODUCTS * q.machine.peak_flops

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        if len({*self.levels}) == 1:
            return self.levels[0]
        return "+".join(f"{level}*{n}" for level, n in Counter(self.levels).items())


# ---------------------------------------------------------------- memory


class Prediction(NamedTuple):
    """Bytes of one rank.

    gpu: all that the GPU must hold. states, kept, working: parts of the allocator's peak; beside: what sampling or the
    passes of frozen models take above these. host: the host's; moved: what the settings moved there; fits_host: whether
    the node has room for that. One of unknown memory has, and where nothing is moved, what seems free decides nothing:
    some kernels report memory that grows on demand.
    """

    gpu: float
    states: float
    kept: float
    working: float
    beside: float
    host: float
    moved: float
    fits_host: bool

    @property
    def allocated(self) -> float:
        """The allocator's peak."""
        return self.states + self.kept + self.working + self.beside


def states(plan: Plan) -> tuple[float, float]:
    """Return the bytes of weights and of trained parameters' other states, wherever they are."""
    q, model, W = plan.question, plan.question.model, plan.question.machine.gpus
    weights = sum(m.weight_bytes(q.element_size) for m in (model, *q.others))
    each = 4 + 4 * (not plan.keeps_gradients) + q.moment_bytes
    return weights / (1 if plan.resident else W), each * model.trained / W


def predict(plan: Plan) -> Prediction:
    """Predict the bytes of a rank."""
    q, model, W = plan.question, plan.question.model, plan.question.machine.gpus
    weights, trained = states(plan)
    on_gpu = weights * (not q.offload_parameters) + trained * (not q.offload_optimizer)
    away, each = plan.offloaded_layers, plan.kept
    # of the layers that are moved one is in use and one is being copied
    kept = sum(each[away:]) + sum(each[: min(away, 2)])
    head, layer = _moments(plan, model, plan.levels)
    working, of_graphs = max(head, layer), 0.0
    words = q.element_size * model.vocabulary_parameters
    if plan.graphs:
        of_graphs = q.element_size * model.layer_parameters
        working = head + layer + of_graphs
    if plan.keeps_gradients:  # the head's comes first
        kept = max(kept + words * model.is_full, q.element_size * model.trained - of_graphs)
    passes = [max(_moments(plan, m._replace(trained=0), repeat("block"))) for m in q.others]
    sampled = [(model, q.rollout), *((m, q.samples) for m in (model, *q.others) if m.has_head)]
    passes += [_sampling_bytes(plan, m, rollout) for m, rollout in sampled if rollout]
    beside = max([kept + working, *passes]) - kept - working
    allocated = on_gpu + kept + working + beside
    # each of gloo's two threads copies the tensor that it gathers
    buffers = COMMUNICATOR_BYTES if q.machine.is_gpu else 2 * words
    gpu = allocated * SLACK + CONTEXT_BYTES + buffers * (W > 1)
    moved = weights + trained - on_gpu + sum(each[:away])
    # a checkpoint passes through, one kind of the state at a time
    host = moved + 4 * model.trained / W + PROCESS_BYTES
    room = not moved or not q.machine.host_bytes or host <= q.machine.host_budget
    return Prediction(gpu, on_gpu, kept, working, beside, host, moved, room)


def fits(plan: Plan) -> bool:
    """Return whether the GPU, with a reserve, and the host have room."""
    p = predict(plan)
    return p.gpu <= FILL * plan.question.machine.gpu_bytes and p.fits_host


def _moments(plan: Plan, model: Model, levels: Iterable[str]) -> tuple[float, float]:
    """Return the bytes of the vocabulary's loss, and of the fullest layer's backward, of one of the models."""
    q, W, V = plan.question, plan.question.machine.gpus, model.shape.vocab_size
    S, size, layers, tiles = q.rows, q.element_size, q.layers(model), 1
    words = model.vocabulary_parameters
    rows, trained = size * model.shape.hidden_size * S, words * model.is_full
    # two layers are gathered, and the vocabulary for its loss
    gathered = 2 * model.matrix_bytes(max(x.parameters for x in layers), size)
    head = 3 * rows
    if q.teacher and model is q.model:  # the teacher's rows and its whole matrix beside
        tiles, words = LOSS_TILES, words + q.teacher.vocabulary_parameters
        head += size * q.teacher.shape.hidden_size * S
    if model.has_head:
        # float32 tiles of logits and one in the weights' dtype; or float32 sums of the gradient, its cast, the buffer
        # it travels in and the float32 sum over the ranks
        tile = equal_tiles(S, 4 * V * tiles, CUDA_TILE_BYTES) * V * (4 * tiles + size)
        head += 4 * trained + max(tile, (2 * size + 4 / W) * trained * (W > 1))
    else:  # the embedding's gradient, whole, and its reduction
        head += 2 * size * trained
    layer = max(x.backward_bytes(y, S, q.setting(model)) for y, x in {*zip(levels, layers)})
    if model.quantize != "none":  # gate and up of experts
        layer += max(2 / 3 * size * x.feed_forward * bool(x.copied) for x in layers)
    # as measured the vocabulary's gradient on its way elsewhere, too, and one more output
    if W > 1 or q.offload_optimizer:
        layer += size * trained + rows * model.is_full
    shared = not plan.resident
    return head + (gathered + size * words) * shared, layer + gathered * shared


def _sampling_bytes(plan: Plan, model: Model, rollout: PlannedRollout) -> float:
    """Return the bytes of one of the models, gathered, and of what a sampler takes; nothing if servers answer."""
    from ulysses.rl.sampler import sampling_bytes

    size, answers = plan.question.element_size, rollout.batch >> plan.question.halvings
    weights = size * model.parameters * (rollout.merged and model is plan.question.model)
    weights += model.weight_bytes(size) * (not plan.resident)
    fixed, each = sampling_bytes(model.shape, rollout.prompt_tokens + rollout.new_tokens, size)
    return (weights + fixed + each * min(rollout.answers, answers)) * bool(rollout.batch)


# ---------------------------------------------------------------- seconds


def step_flops(plan: Plan) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for an average micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    q, model = plan.question, plan.question.model
    tokens, directions = q.fill * q.tokens_per_microbatch, 3 if model.is_full else 2
    length = tokens / q.documents
    pairs = q.squares or q.documents * squares(length, windows=model.shape.windows)
    products, mixed = q.forwards * model.forward_parameters, 0.0
    for level, layer in plan.layers:
        more, again = layer.computed_again(level, model.is_full)
        products += directions * layer.met + more
        again += 1 + q.forwards
        # the backward of linear attention runs forward once more
        mixed += layer.pair_flops * pairs * (2.5 + again) + layer.row_flops * tokens * (
            3.8 + again
        )
    # most losses take the logits once more, nll alone does without
    products += (directions + 0.5) * model.vocabulary_parameters * model.has_head
    products += 3 * (model.trained - model.unmet) * (not model.is_full)
    return 2 * tokens / q.sp * products, mixed / q.sp


def step_seconds(plan: Plan) -> float:
    """Estimate the seconds of one optimizer step, sampling aside: FLOPs and bytes over the rates measured on H200."""
    q, model, machine = plan.question, plan.question.model, plan.question.machine
    layers, size, W, L = q.layers(model), q.element_size, machine.gpus, len(plan.levels)
    rows, rate = q.fill * q.rows, MEMORY_RATE * machine.memory_rate
    products, attention = step_flops(plan)
    slow = WIDE_HEADS if model.shape.head_dim > 128 else 1
    seconds = (products + attention * slow) / (PRODUCTS * machine.peak_flops)
    # bytes of elementwise kernels, of those for adapters of experts, and of logits
    moved = (
        ELEMENTWISE * sum(x.width + x.copied + x.inner for x in layers) * (1 + q.forwards / 3)
    )
    if model.unmet:
        moved += ADAPTED_EXPERTS * sum(2 * x.copied + 3 * x.inner for x in layers)
    logits = q.logit_bytes + LOGIT_BYTES * q.forwards
    moved += logits * model.shape.vocab_size * model.has_head
    seconds += rows * moved / rate
    # exchanges: forward, backward and again
    seconds += 3 * size * rows * sum(x.sent for x in layers) / (LINKS * machine.link(q.sp))
    # many small kernels where layers are gathered
    seconds += GATHERED_EXPERTS * L * (model.unmet > 0 and not plan.resident)
    # a shared prompt has launches of its own, and no graph spares the host those of passes
    launch = LAUNCH_RESIDENT if plan.resident else LAUNCH
    later = launch * L * q.forwards / 3
    launches = (launch + LAUNCH_RESIDENT * q.shares) * L * (not plan.graphs) + later
    # during the computation: weights are gathered twice and gradients reduced; copies to and from the host
    gathers = 1 / q.micro_batches if plan.resident else 2 + q.forwards
    traffic = gathers * model.weight_bytes(size) + size * model.trained
    traffic *= (W - 1) / W / (LINKS * machine.link(W))
    seconds, traffic = seconds + CONTENTION * traffic, traffic + CONTENTION * seconds
    copied = 4 * model.trained / W * q.offload_optimizer
    copied += 2 * model.weight_bytes(size) / W * q.offload_parameters
    copied += 2 * sum(plan.kept[: plan.offloaded_layers])
    seconds = max(seconds + later * plan.graphs, traffic, copied / HOST_LINK, launches)
    added = ADDITION_BYTES * (not plan.keeps_gradients)
    seconds += STEP_SECONDS + added * model.trained / rate
    update = (UPDATE_BYTES - 4 * plan.keeps_gradients) * model.trained / W
    update /= HOST_LINK if q.offload_optimizer else rate
    if q.rollout:
        update += ANSWER_SECONDS * q.rollout.answers / q.rollout.steps
    return q.micro_batches * seconds + update
