"""What the planner is asked and what it answers, and the memory and the seconds that a step of its answer takes.

    what lives on a GPU      bytes
    states                   weights, those of frozen models too: 2 N, divided by all ranks if they are sharded; of each
                             trained parameter 4 (master) + 8 (moments; 2 in 8 bits) + 4 (summed gradient), divided by
                             all ranks
    kept                     what every layer keeps at its level
    working                  the fuller of two moments: the vocabulary's loss, or one layer's backward, each with two
                             gathered layers (CUDA graphs hold both, and every layer's gradients, in their own memory)
    beside                   what sampling, or a pass of a frozen model, takes above kept and working: nothing is kept
                             before a step

The sum is multiplied by SLACK, and CUDA and NCCL come on top. The bytes above are those of bfloat16; weights in float32
have a separate master too.

    a micro-batch waits for  seconds; the slowest of these counts, and once a step the update
    computation              FLOPs of products and attention, bytes of elementwise kernels, exchanges between ranks
    traffic                  gathered weights and reduced gradients, over the links
    copies                   what is offloaded, over the link to the host
    launches                 of every layer that is in no CUDA graph

The formulas are compared with measured steps (benchmarks/measured.jsonl): memory within 5%, seconds within 15%.

The planner counts the FLOPs that are executed: recomputation, passes without gradient, every product of the logits. MFU
counts those that the model asks for (model_flops in layer_cost.py).

Letters: S local tokens, D width, V vocabulary, W processes.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from math import gcd
from typing import NamedTuple

from losses.logprobs import CUDA_TILE_BYTES, LOSS_TILES, equal_tiles
from ulysses.parallel.layout import squares
from ulysses.plan.hardware import Machine
from ulysses.plan.layer_cost import LayerCost, LayerSetup, PlannedModel, layer_costs, total
from ulysses.stages.base import PlannedRollout

FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers
SLACK = 1.03  # the allocator's peak with the fragments that it cannot give back
CONTEXT_BYTES = 1.3e9  # CUDA context and libraries, outside the allocator, on an H200
COMMUNICATOR_BYTES = 2.1e9  # NCCL's buffers, with more than one process

# Rates measured on H200, as shares of the peaks: of products and of memory.
PRODUCTS, MEMORY_RATE = 0.64, 0.68
WIDE_HEADS = 1.28  # the time of attention with heads wider than 128
# The share of computation's time by which transfers take longer, and of transfers' time by which computation does:
# both use the memory and the multiprocessors.
CONTENTION = 0.4
HOST_LINK = 15e9  # bytes/s between GPU and host, all GPUs of a node copying at once
# Bytes that are moved: by a layer's elementwise kernels, for each token and unit of D + the feed-forward's width;
ELEMENTWISE = 33
# by the eight products of experts' adapters and their additions, for each input and output;
ADAPTED_EXPERTS = 8
# by a pass without gradient, for each logit, which is written and read twice.
LOGIT_BYTES = 12
# Seconds in which the host launches one layer, forward and backward: with gathered weights, and with resident ones.
# CUDA graphs spare them. They pay where a layer takes the GPU less than GRAPH_SECONDS.
LAUNCH, LAUNCH_RESIDENT = 7e-3, 3e-3
GRAPH_SECONDS = 5e-3
# Seconds in which the host lays out, packs and takes in one answer of a rollout, while the GPU waits.
ANSWER_SECONDS = 8e-4
STEP_SECONDS = 0.007  # per micro-batch: metadata, the first gather, the last reduction, metrics
# Bytes read and written per trained parameter: by the norm and the update (zero/update.py), 8 of them for the float32
# gradient; and by a micro-batch that adds its gradient to the sum.
UPDATE_BYTES, ADDITION_BYTES = 34, 10
# Seconds more for a gathered layer whose experts have adapters, as measured on NF4 bases.
GATHERED_EXPERTS = 5e-3


# ---------------------------------------------------------------- question and answer


class Question(NamedTuple):
    """What the planner is asked: a model's step on a machine, and the memory settings.

    tokens_per_microbatch: of the fullest micro-batch, which `sp` ranks share, in `documents` of equal length (2 for one
        pair).
    fill: how full micro-batches are on average.
    squares: twice the pairs of a query and a key in an average micro-batch, with shared prompts counted once; 0 is
        those of equal documents.
    shares: sequences share their prompts, which CUDA graphs cannot do.
    whole_steps: no step has more than one micro-batch for each data-parallel group.
    forwards: passes without gradient over the same tokens (live reference, KTO's baseline), counted in passes of the
        trained model.
    logit_bytes: see ulysses.stages.base.Requirements.
    rollout: what this process decodes before it trains on it.
    samples: the answers of run.samples, which every language model of the run gives.
    recompute: the level that is asked for, or "auto".
    weights: "sharded" over all ranks, "resident" on each, or "auto" for the faster of those that fit.
    offload: "none"; "auto" moves the inputs of layers where that is faster than to compute more again or, if the GPU
        never suffices, as many as the host holds.
    moment_bytes: of AdamW's two moments of a trained parameter.
    others: frozen models that the run holds as well.
    teacher: the one of `others` whose logits are compared with the trained model's.
    """

    model: PlannedModel
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
    recompute: str = "auto"
    weights: str = "auto"
    offload: str = "none"
    element_size: int = 2
    moment_bytes: float = 8.0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    others: tuple[PlannedModel, ...] = ()
    teacher: PlannedModel | None = None

    @property
    def rows(self) -> int:
        """The rows of the fullest micro-batch on a rank."""
        return -(-self.tokens_per_microbatch // self.sp)

    @property
    def common_heads(self) -> int:
        """The common divisor of the heads of all models that share the mesh."""
        return gcd(*(m.shape.num_attention_heads for m in (self.model, *self.others)))

    def layers(self, model: PlannedModel) -> list[LayerCost]:
        """Return what each layer of a model takes in this question."""
        setup = LayerSetup(
            ranks=self.sp,
            head_ranks=gcd(self.sp, self.common_heads),
            lora_rank=model.lora_rank,
            size=self.element_size,
        )
        return layer_costs(model.shape, setup)


class Plan(NamedTuple):
    """What the planner answers.

    levels: every layer's level, the first layer's first. There are at most two levels, and the last layers have the one
        that keeps more: their backward comes first, so their memory is free before the other layers recompute.
    offloaded_layers: how many layers, counted from the first, keep their tensors in host memory.
    resident: the weights stay whole on every rank.
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
    def keeps_gradients(self) -> bool:
        """Whether gradients stay as the backward pass leaves them until the update (zero/reduce.py)."""
        q = self.question
        return q.whole_steps and q.machine.gpus == 1 and not q.offload_optimizer

    @property
    def graphs(self) -> bool:
        """Whether the layers run as CUDA graphs (memory/graphs.py)."""
        q = self.question
        layers = total(self.question.model.layers)
        if not q.machine.is_gpu or q.element_size != 2:
            return False
        alone = self.resident and q.sp == 1 and {*self.levels} == {"none"} and not q.shares
        # the launches of experts and of linear attention depend on the rows, which no graph can follow
        steady = not (layers.copied or layers.row_flops)
        of_layer = 6 * q.rows * q.model.largest_layer
        return alone and steady and of_layer < GRAPH_SECONDS * PRODUCTS * q.machine.peak_flops

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        if len({*self.levels}) == 1:
            return self.levels[0]
        return "+".join(f"{level}*{n}" for level, n in Counter(self.levels).items())


# ---------------------------------------------------------------- memory


class Prediction(NamedTuple):
    """Bytes of one rank.

    gpu: all that the GPU must hold.
    states, kept, working: parts of the allocator's peak.
    beside: what sampling or passes of frozen models take above these.
    host: all that the process takes of host memory; moved: the part of it that the settings moved there.
    fits_host: whether the node has room. It has if its memory is unknown, and if nothing is moved: some kernels report
        too little, because memory grows on demand, and that shall refuse no run that moves nothing.
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
    """Return a rank's bytes of weights, and of master weights, moments and gradients, on the GPU or the host."""
    q, model, W = plan.question, plan.question.model, plan.question.machine.gpus
    weights = sum(m.weight_bytes(q.element_size) for m in (model, *q.others))
    # the master weights, and the sums of gradients unless these stay as they are
    each = (4 if plan.keeps_gradients else 8) + q.moment_bytes
    return weights if plan.resident else weights / W, each * model.trained / W


def predict(plan: Plan) -> Prediction:
    """Predict the bytes of a rank."""
    q, model, W = plan.question, plan.question.model, plan.question.machine.gpus
    away, of_layers = plan.offloaded_layers, plan.kept
    weights, trained = states(plan)
    on_gpu = 0.0 if q.offload_parameters else weights
    if not q.offload_optimizer:
        on_gpu += trained
    # of the layers whose activations are moved, one is in use and one is being copied
    kept = sum(of_layers[max(0, away - 2) :])
    loss, layer = _working_bytes(plan, model, plan.levels)
    working = max(loss, layer)
    vocabulary = q.element_size * model.vocabulary_parameters
    if plan.graphs:
        working = loss + layer + q.element_size * total(model.layers).parameters
    # gradients take the place of activations; the vocabulary's gradient comes first
    if plan.keeps_gradients:
        first = vocabulary if model.is_full else 0
        kept = max(kept + first, q.element_size * model.trained)
    frozen = (m._replace(trained=0) for m in q.others)
    passes = [max(_working_bytes(plan, m, repeat("block"))) for m in frozen]
    decoders = [(model, q.rollout), *((m, q.samples) for m in (model, *q.others) if m.has_head)]
    passes += [_sampling_bytes(plan, m, rollout) for m, rollout in decoders if rollout]
    beside = max([0.0, *(taken - kept - working for taken in passes)])
    gpu = (on_gpu + kept + working + beside) * SLACK + CONTEXT_BYTES
    if W > 1:  # each of gloo's two threads copies the tensor that it gathers
        gpu += COMMUNICATOR_BYTES if q.machine.is_gpu else 2 * vocabulary
    moved = weights + trained - on_gpu + sum(of_layers[:away])
    # a checkpoint passes through host memory, one kind of state at a time
    host = moved + 4 * model.trained / W + PROCESS_BYTES
    fits_host = not (moved and q.machine.host_bytes) or host <= q.machine.host_budget
    return Prediction(gpu, on_gpu, kept, working, beside, host, moved, fits_host)


def fits(plan: Plan) -> bool:
    """Return whether the GPU, with a reserve, and the host have room."""
    p = predict(plan)
    return p.gpu <= FILL * plan.question.machine.gpu_bytes and p.fits_host


def _working_bytes(
    plan: Plan, model: PlannedModel, levels: Iterable[str]
) -> tuple[float, float]:
    """Return the bytes that a model holds in the vocabulary's loss, and in its fullest layer's backward."""
    q, W, V = plan.question, plan.question.machine.gpus, model.shape.vocab_size
    S, size, layers, tiles = q.rows, q.element_size, q.layers(model), 1
    vocabulary = model.vocabulary_parameters
    rows = size * model.shape.hidden_size * S
    trained = vocabulary if model.is_full else 0
    loss = 3 * rows
    if q.teacher and model is q.model:  # the teacher's rows and its vocabulary lie beside
        tiles, vocabulary = LOSS_TILES, vocabulary + q.teacher.vocabulary_parameters
        loss += size * q.teacher.shape.hidden_size * S
    if model.has_head:
        # float32 tiles of logits and one in the weights' dtype; or float32 sums of the gradient, its cast, the buffer
        # it travels in and the float32 sum over the ranks
        tile = equal_tiles(S, 4 * V * tiles, CUDA_TILE_BYTES) * V * (4 * tiles + size)
        travelling = (2 * size + 4 / W) * trained if W > 1 else 0
        loss += 4 * trained + max(tile, travelling)
    else:  # the embedding's gradient, whole, and its reduction
        loss += 2 * size * trained
    layer = max(x.backward_bytes(y, S, size, model) for y, x in {*zip(levels, layers)})
    # as measured, the vocabulary's gradient is still on its way to other ranks or the host, and one more output lives
    if model.is_full and (W > 1 or q.offload_optimizer):
        layer += size * trained + rows
    if not plan.resident:  # two layers are gathered at a time, and the vocabulary for its loss
        gathered = 2 * model.matrix_bytes(model.largest_layer, size)
        loss += gathered + size * vocabulary
        layer += gathered
    return loss, layer


def _sampling_bytes(plan: Plan, model: PlannedModel, rollout: PlannedRollout) -> float:
    """Return the bytes of a gathered model and of its sampler's cache and work; 0 if servers answer."""
    if not rollout.batch:
        return 0.0
    from ulysses.rl.sampler import sampling_bytes

    size = plan.question.element_size
    weights = 0.0
    if rollout.merged and model is plan.question.model:
        weights += size * model.parameters
    if not plan.resident:
        weights += model.weight_bytes(size)
    fixed, each = sampling_bytes(model.shape, rollout.prompt_tokens + rollout.new_tokens, size)
    return weights + fixed + each * min(rollout.answers, rollout.batch)


# ---------------------------------------------------------------- seconds


def step_flops(plan: Plan) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for an average micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    q, model = plan.question, plan.question.model
    tokens = q.fill * q.tokens_per_microbatch
    directions = 3 if model.is_full else 2
    pairs = q.squares or q.documents * squares(
        tokens / q.documents, windows=model.shape.windows
    )
    products = q.forwards * model.forward_parameters
    mixed = 0.0
    for level, layer in plan.layers:
        more, again = layer.computed_again(level, model.is_full)
        products += directions * layer.active + more
        # a backward pass takes about 2.5 times the FLOPs of a forward pass
        passes = 1 + q.forwards + again + 2.5
        mixed += passes * (layer.pair_flops * pairs + layer.row_flops * tokens)
    # most losses compute the logits once more; only nll does not, so half a product more is counted
    if model.has_head:
        products += (directions + 0.5) * model.vocabulary_parameters
    if not model.is_full:
        products += 3 * (model.trained - model.idle_adapters)
    return 2 * tokens / q.sp * products, mixed / q.sp


def step_seconds(plan: Plan) -> float:
    """Estimate the seconds of one optimizer step, sampling aside.

    A micro-batch waits for the slowest of computation, traffic between the ranks, copies to and from the host, and the
    launches of its kernels; then comes the update.
    """
    q, model, machine = plan.question, plan.question.model, plan.question.machine
    size = q.element_size
    W = machine.gpus
    L = len(plan.levels)
    layers = total(q.layers(model))
    rows = q.fill * q.rows
    rate = MEMORY_RATE * machine.memory_rate
    products, attention = step_flops(plan)
    if model.shape.head_dim > 128:
        attention *= WIDE_HEADS
    computation = (products + attention) / (PRODUCTS * machine.peak_flops)
    # exchanges between ranks: forward, recomputed and backward
    computation += 3 * size * rows * layers.sent / machine.link(q.sp)
    # bytes per row of elementwise kernels, of logits, and of experts' adapters
    moved = ELEMENTWISE * (layers.width + layers.copied + layers.inner) * (1 + q.forwards / 3)
    if model.has_head:
        moved += (q.logit_bytes + LOGIT_BYTES * q.forwards) * model.shape.vocab_size
    if model.idle_adapters:
        moved += ADAPTED_EXPERTS * (2 * layers.copied + 3 * layers.inner)
        if not plan.resident:
            computation += GATHERED_EXPERTS * L
    computation += rows * moved / rate
    # weights are gathered twice, and gradients reduced
    gathers = 1 / q.micro_batches if plan.resident else 2 + q.forwards
    traffic = gathers * model.weight_bytes(size) + size * model.trained
    traffic *= (W - 1) / W / machine.link(W)
    copied = 4 * model.trained / W if q.offload_optimizer else 0.0
    if q.offload_parameters:
        copied += 2 * model.weight_bytes(size) / W
    copied += 2 * sum(plan.kept[: plan.offloaded_layers])
    # passes without gradient are in no graph, and shared prompts are launched by themselves
    launch = LAUNCH_RESIDENT if plan.resident else LAUNCH
    launches = launch * L * q.forwards / 3
    computed = computation + CONTENTION * traffic
    if plan.graphs:
        computed += launches
    else:
        launches += (launch + (LAUNCH_RESIDENT if q.shares else 0)) * L
    micro_batch = STEP_SECONDS + max(
        computed, traffic + CONTENTION * computation, copied / HOST_LINK, launches
    )
    update_bytes = UPDATE_BYTES
    if plan.keeps_gradients:
        update_bytes -= 4
    else:
        micro_batch += ADDITION_BYTES * model.trained / rate
    update = update_bytes * model.trained / W
    update /= HOST_LINK if q.offload_optimizer else rate
    if q.rollout:
        update += ANSWER_SECONDS * q.rollout.answers / q.rollout.steps
    return q.micro_batches * micro_batch + update
