"""Count the FLOPs of a step, for the planner's seconds and for MFU, and estimate its seconds.

The planner counts what is executed: recomputation, passes without gradient, every product of the logits. MFU counts
what the model asks for. Both take the FLOPs of a layer from its parts (memory/size.py).

Shapes: S local tokens, W processes.
"""

from ulysses.memory.levels import computed_again, kept_bytes
from ulysses.parallel.layout import squares
from ulysses.plan.case import LAUNCH_RESIDENT, MATRICES, Model, Plan
from ulysses.plan.footprint import pass_bytes, predict

# Rates measured on H200, as shares of the peaks.
# the time of a step's products where the layers' are of e4m3 numbers, rounding included, as a share of bfloat16's
FP8_PRODUCTS = 0.8
ATTENTION = 0.63  # attention kernels
EXCHANGE = 0.35  # all-to-alls, which share the links with ZeRO-3's traffic
GATHER = 0.37  # all-gathers and reduce-scatters
CONTENTION = 0.2  # of their time is added to that of the kernels beside them
MEMORY_RATE = 0.6  # GPU memory in the optimizer's update
HOST_LINK = 15e9  # bytes/s between GPU and host, all GPUs of a node copying at once
# bytes that a layer's elementwise kernels move, for each token and unit of D + the feed-forward's width
ELEMENTWISE = 48
# ... and that a pass without gradient moves of every logit: written, and read twice
LOGIT_BYTES = 12
# in which the host lays out, packs and takes in an answer of a rollout, while the GPU waits
ANSWER_SECONDS = 8e-4
STEP_SECONDS = 0.007  # per micro-batch: metadata, the first gather, the last reduction, metrics
# read and written per trained parameter: by norm and zero/update.py, and where a micro-batch adds its gradient
UPDATE_BYTES, ADDITION_BYTES = 34, 10
ADAPTER_SECONDS = 6e-4  # of the many small kernels for a layer's adapters, forward and backward
ENOUGH = 4  # times the launches of a pass without gradient, its computation takes: more tokens gain nothing


def step_flops(plan: Plan) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for an average micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    case, model, passes = plan.case, plan.case.model, plan.case.forwards
    (layer, _), S = case.layer_sizes(model), case.work / case.sp
    windows, length = model.shape.windows, case.work / case.documents
    pairs = case.squares or case.documents * squares(length, windows=windows)
    mix = layer.mixer.pair_flops * pairs / case.sp + layer.mixer.row_flops * S
    directions = 3 if model.is_full else 2
    products, mixes = passes * model.forward_parameters, passes * model.layers
    for level in plan.levels:
        more, again = computed_again(level, layer, model.is_full)
        products += directions * layer.met + more
        mixes += 1 + layer.mixer.backward + again
    # most losses take the logits once more, nll alone does without
    products += (directions + 0.5) * model.vocabulary_parameters * model.has_head
    products += 3 * model.trained * (not model.is_full)
    return 2 * S * products, mix * mixes


def model_flops(model: Model, tokens: float, squared_lengths: float, projected: float) -> float:
    """Return the FLOPs of one forward and backward pass, the numerator of MFU: 6 N T + 6 L (H E) sum(length^2).

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no
    gradient: with A parameters of adapters it is 4 N T + 6 A T. Causal attention counts half of the full square.
    Recomputation, passes without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        projected: tokens that meet the vocabulary projection: those whose target is trained.
    """
    layer, head = model.layer, model.vocabulary_parameters * model.has_head
    adapters = 0 if model.is_full else model.trained
    # of its layer's experts a token meets a few
    met = model.parameters - adapters - model.layers * (layer.parameters - layer.met)
    weights = (met - head) * tokens + head * projected
    linear = (6.0 if model.is_full else 4.0) * weights + 6.0 * adapters * tokens
    mix = layer.mixer.pair_flops * squared_lengths + layer.mixer.row_flops * tokens
    return linear + 3.0 * model.layers * mix


def step_seconds(plan: Plan) -> float:
    """Estimate the seconds of one optimizer step, sampling aside: FLOPs and bytes over the rates measured on H200."""
    case, model, machine = plan.case, plan.case.model, plan.case.machine
    (layer, _), size, W = case.layer_sizes(model), case.element_size, machine.gpus
    products, attention = step_flops(plan)
    products *= FP8_PRODUCTS if model.quantize == "fp8" and machine.is_gpu else 1
    seconds = (products / MATRICES + attention / ATTENTION) / machine.peak_flops
    # without gradient, in layers that run forward and backward
    passes, S = model.layers * case.forwards / 3, case.work / case.sp
    width = layer.width + layer.feed_forward.copied + layer.feed_forward.inner
    elements = S * width * (model.layers + passes)
    seconds += ELEMENTWISE * elements / machine.memory_rate
    rate = MEMORY_RATE * machine.memory_rate
    logits = S * model.shape.vocab_size * model.has_head
    seconds += logits * (case.logit_bytes + LOGIT_BYTES * case.forwards) / rate
    # those of the passes, which are fuller, at least one a step, and which no graph spares the host
    share = case.work / (plan.pass_tokens or case.work)
    # a shared prompt has launches of its own
    launch, captured = plan.launch, plan.graphs and not case.shares
    launch += LAUNCH_RESIDENT * case.shares
    later = launch * passes * min(1, max(share, 1 / case.micro_batches))
    launches = launch * model.layers * (not captured) + later
    # exchanges: forward, backward and again
    sent = 3 * model.layers * size * layer.mixer.sent * S
    seconds += sent / (EXCHANGE * machine.link(case.sp))
    # during the computation: weights are gathered twice and gradients reduced; copies to and from the host
    gathers = 1 / case.micro_batches if plan.resident else 2 + case.forwards
    traffic = gathers * model.weight_bytes(size) + size * model.trained
    traffic *= (W - 1) / W / (GATHER * machine.link(W))
    seconds += CONTENTION * traffic
    moved = 4 * model.trained / W * case.offload_optimizer
    moved += 2 * model.weight_bytes(size) / W * case.offload_parameters
    kept = kept_bytes(plan.levels[0], layer, size) * case.local
    moved += 2 * plan.offloaded_layers * kept
    together = seconds + later * captured, traffic, moved / HOST_LINK, launches
    seconds = max(together) if machine.is_gpu else seconds + launches
    seconds += STEP_SECONDS + ADDITION_BYTES * model.trained / rate
    seconds += ADAPTER_SECONDS * model.layers * (not model.is_full and machine.is_gpu)
    update = UPDATE_BYTES * model.trained / W / (HOST_LINK if case.offload_optimizer else rate)
    if case.rollout:
        update += ANSWER_SECONDS * case.rollout.answers / case.rollout.steps
    return case.micro_batches * seconds + update


def pass_tokens(plan: Plan) -> int:
    """Return the tokens of a micro-batch of passes without gradient, which keep nothing: at least the case's own.

    They hide the host's launches, if they take no more memory than a training step.
    """
    case, predicted = plan.case, predict(plan)
    launch = plan.launch / 3 * case.model.layers
    rate = MATRICES * case.machine.peak_flops / (2 * case.model.forward_parameters)
    most, room = ENOUGH * launch * rate * case.sp, predicted.allocated - predicted.states
    tokens = case.tokens
    while 2 * tokens <= most and pass_bytes(plan, 2 * tokens) <= room:
        tokens *= 2
    return tokens
