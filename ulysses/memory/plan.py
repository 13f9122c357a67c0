"""Predict a training step's memory and time from plain numbers, and choose what to recompute and offload.

What is predicted: peak.py (bytes) and step_time.py (seconds); what was measured: calibration.py and
benchmarks/measured.jsonl, with the errors that benchmarks/plan_accuracy.py prints.

The layers need not be alike: the last ones may keep more than the first ones. With equal layers, time and memory are
linear in how many have a level, so two levels at most are ever worth mixing.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ulysses.memory.case import Machine, Model, Options, Work, shards
from ulysses.memory.levels import AUTOGRAD
from ulysses.memory.peak import peak_bytes, pinned_per_layer
from ulysses.memory.step_time import step_seconds
from ulysses.memory.tiling import head_chunk_counts

FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
WORTH = 0.02  # share of a step's time that layers on the host, more groups of heads or kept gathered weights must save
HOST_FILL = 0.9  # share of a node's free memory that training may take
FASTEST_FIRST = ("none", "mlp", "keep_exchange", "keep_attention", "block", "pair")


class Prediction(NamedTuple):
    """Hold bytes per rank and seconds per optimizer step.

    gpu_bytes: all that the GPU holds. allocated: the allocator's peak, of which states, kept and working are parts.
    offloaded: activations; moved: all that the settings moved to the host. host_bytes includes both.
    """

    gpu_bytes: float
    host_bytes: float
    seconds: float
    allocated: float
    states: float
    kept: float
    working: float
    offloaded: float
    moved: float

    def fits_gpu(self, machine: Machine) -> bool:
        return self.gpu_bytes <= FILL * machine.gpu_bytes

    def fits_host(self, machine: Machine) -> bool:
        """Say whether the node has room for what is moved there; one of unknown memory has, but no activations are sent there.

        Where nothing is moved, the estimate of what is free decides nothing: some kernels report memory that grows on demand.
        """
        return not self.moved or not machine.host_bytes or self.host_bytes <= host_budget(machine)

    def fits(self, machine: Machine) -> bool:
        """Say whether GPU and host have room, with their reserves."""
        return self.fits_gpu(machine) and self.fits_host(machine)


def host_budget(machine: Machine) -> float:
    """Return the host memory that one process may take."""
    return HOST_FILL * machine.host_bytes / machine.local_processes


class Choice(NamedTuple):
    """Hold memory settings with chosen levels and offload, and what is predicted for them."""

    options: Options
    layers: int
    prediction: Prediction

    @property
    def offloaded_layers(self) -> int:
        return self.options.offloaded_layers

    @property
    def level(self) -> str:
        return self.options.level

    @property
    def head_chunks(self) -> int:
        return self.options.tiling.head_chunks

    @property
    def levels(self) -> tuple[str, ...]:
        """Return every layer's level, the first layer's first."""
        below = self.layers - self.options.upper_layers
        return (self.options.level,) * below + (self.options.upper,) * self.options.upper_layers

    @property
    def name(self) -> str:
        return level_name(self.levels)


def level_name(levels: tuple[str, ...]) -> str:
    """Return "block", or "block*20+none*12" where the layers differ."""
    runs: list[tuple[str, int]] = []
    for level in levels:
        if runs and runs[-1][0] == level:
            runs[-1] = level, runs[-1][1] + 1
        else:
            runs.append((level, 1))
    return runs[0][0] if len(runs) == 1 else "+".join(f"{level}*{count}" for level, count in runs)


def level_list(name: str, layers: int) -> tuple[str, ...]:
    """Return every layer's level from what `level_name` wrote.

    Raises:
        ValueError: for counts that are not the model's layers.
    """
    if "*" not in name:
        return (name,) * layers
    found: list[str] = []
    for part in name.split("+"):
        level, _, count = part.partition("*")
        found += [level] * int(count or 1)
    if len(found) != layers:
        raise ValueError(
            f"recompute {name} lists {len(found)} layers but the model has {layers}; make the counts add up"
        )
    return tuple(found)


def predict(model: Model, machine: Machine, work: Work, options: Options) -> Prediction:
    """Predict peak GPU bytes and host bytes of a rank, and seconds per step."""
    peak = peak_bytes(model, machine.gpus, work, options)
    seconds = step_seconds(model, machine, work, options)
    return Prediction(
        peak.device,
        peak.host,
        seconds,
        peak.allocated,
        peak.states,
        peak.kept,
        peak.working,
        peak.offloaded,
        peak.moved,
    )


def most_offloaded(model: Model, machine: Machine, work: Work, options: Options) -> int:
    """Return how many layers' activations the host has room for, beside what it holds anyway."""
    here = peak_bytes(model, machine.gpus, work, options._replace(offloaded_layers=0)).host
    each = model.decoders * pinned_per_layer(model, work.sp, work.local, options)
    return max(
        0, min(model.layers - options.upper_layers, int((host_budget(machine) - here) // each))
    )


def _choice(model: Model, machine: Machine, work: Work, options: Options) -> Choice:
    return Choice(options, model.layers, predict(model, machine, work, options))


def choices(
    model: Model,
    machine: Machine,
    work: Work,
    options: Options,
    *,
    levels: tuple[str, ...],
    offload: str,
) -> Iterator[Choice]:
    """Yield one choice per level, the same for all layers.

    offload: "none", "checkpoints" (all layers that the host holds) or "auto" (the fewest that fit). Of
    `options.head_chunks` each takes the fewest that fit, more of them rather than one more layer offloaded.
    """
    for level in levels:
        if level in AUTOGRAD and offload == "checkpoints":
            continue
        counts = _chunk_counts(model, work, options, level)
        found = [
            _in_chunks(model, machine, work, options._replace(level=level), count, offload)
            for count in counts
        ]
        yield min(found, key=partial(_reluctance, machine))


def _chunk_counts(model: Model, work: Work, options: Options, *levels: str) -> tuple[int, ...]:
    """Return the numbers of groups of heads that may be chosen for layers of such levels, the fewest first."""
    allowed = head_chunk_counts(
        model.heads, model.kv_heads, shards(model, work.sp).head_ranks
    )  # not the same at every degree
    counts = tuple(count for count in options.head_chunks if count in allowed)
    return (
        counts
        if counts and not any(level in AUTOGRAD for level in levels)
        else (options.tiling.head_chunks,)
    )


def _reluctance(machine: Machine, choice: Choice) -> tuple[bool, int, float]:
    """Order choices of one level: what fits first, with little offloaded; the first of equals has the fewest chunks."""
    fits = choice.prediction.fits(machine)
    return not fits, choice.offloaded_layers, 0.0 if fits else choice.prediction.gpu_bytes


def _in_chunks(
    model: Model, machine: Machine, work: Work, options: Options, chunks: int, offload: str
) -> Choice:
    tiling = replace(options.tiling, head_chunks=chunks)
    here = options._replace(upper_layers=0, offloaded_layers=0, tiling=tiling)
    if offload != "none" and options.level not in AUTOGRAD:
        most = most_offloaded(model, machine, work, here)
        here = here._replace(
            offloaded_layers=_fewest(model, machine, work, here, most)
            if offload == "auto"
            else most
        )
    return _choice(model, machine, work, here)


def _fewest(model: Model, machine: Machine, work: Work, options: Options, most: int) -> int:
    """Return the fewest offloaded layers that make the GPU suffice, `most` if none do."""

    def fits(layers: int) -> bool:
        return _choice(
            model, machine, work, options._replace(offloaded_layers=layers)
        ).prediction.fits_gpu(machine)

    return bisect_left(range(most), True, key=fits)


def mixtures(
    model: Model,
    machine: Machine,
    work: Work,
    options: Options,
    *,
    levels: tuple[str, ...],
    offload: str,
) -> Iterator[Choice]:
    """Yield, for each two levels, groups of heads and several numbers of offloaded layers, as many layers of the faster one as fit."""
    ordered = [level for level in FASTEST_FIRST if level in levels]
    for level, upper in (
        (level, upper) for place, level in enumerate(ordered) for upper in ordered[:place]
    ):
        for chunks in _chunk_counts(model, work, options, level, upper):
            tiling = replace(options.tiling, head_chunks=chunks)
            alone = options._replace(
                level=level, upper=upper, upper_layers=0, offloaded_layers=0, tiling=tiling
            )
            most = (
                0
                if offload == "none" or level in AUTOGRAD
                else most_offloaded(model, machine, work, alone)
            )
            for away in (
                [most]
                if offload == "checkpoints"
                else range(0, most + 1, max(1, model.layers // 16))
            ):
                here = alone._replace(offloaded_layers=away)
                count = _most_upper(model, machine, work, here)
                if count:
                    yield _choice(model, machine, work, here._replace(upper_layers=count))


def _most_upper(model: Model, machine: Machine, work: Work, options: Options) -> int:
    """Return how many last layers can have the upper level; 0 if none fit, or if all do (then it needs no mixture)."""

    def too_many(layers: int) -> bool:
        return not _choice(
            model, machine, work, options._replace(upper_layers=layers)
        ).prediction.fits(machine)

    return bisect_left(range(1, model.layers - options.offloaded_layers), True, key=too_many)


def choose_level(
    model: Model,
    machine: Machine,
    work: Work,
    options: Options,
    *,
    levels: tuple[str, ...] = FASTEST_FIRST,
    offload: str = "none",
) -> Choice | None:
    """Return the fastest predicted choice that fits, the simpler and higher one where two are alike; None: none fits.

    With several `levels` the layers may get two of them. Heads go in groups, and with offload "auto" layers to the host, only
    where that saves more than WORTH.
    """
    fitting = [
        c
        for c in choices(model, machine, work, options, levels=levels, offload=offload)
        if c.prediction.fits(machine)
    ]
    if (
        not any(c.options.level == levels[0] and not c.offloaded_layers for c in fitting)
        and len(levels) > 1
    ):
        mixed = mixtures(model, machine, work, options, levels=levels, offload=offload)
        fitting += [c for c in mixed if c.prediction.fits(machine)]
    limit = (1 + WORTH) * min((c.prediction.seconds for c in fitting), default=0.0)
    fast = (c for c in fitting if c.prediction.seconds <= limit)
    return min(
        fast,
        key=lambda c: (
            c.offloaded_layers * (offload == "auto"),
            c.head_chunks,
            round(c.prediction.seconds, 4),
        ),
        default=None,
    )


def keep_gathered(model: Model, machine: Machine, work: Work, choice: Choice) -> Choice:
    """Return the choice with as many layers' gathered weights kept from the forward to the backward pass as fit.

    That saves one of two gathers: a few percent of a short step, more where links between nodes limit it, nothing of a long one. So
    only where nothing is recomputed, or where more than WORTH is predicted to be saved.
    """

    def keeping(layers: int) -> Choice:
        return _choice(model, machine, work, choice.options._replace(gathered_layers=layers))

    if machine.gpus == 1 or work.rollout is not None:
        return choice
    kept = keeping(
        bisect_left(
            range(1, model.layers + 1),
            True,
            key=lambda layers: not keeping(layers).prediction.fits(machine),
        )
    )
    saves = kept.prediction.seconds < (1 - WORTH) * choice.prediction.seconds
    return kept if saves or set(choice.levels) == {"none"} else choice


def longest_sequence(
    model: Model,
    machine: Machine,
    sp: int,
    options: Options,
    *,
    documents: int = 1,
    levels: tuple[str, ...] = FASTEST_FIRST,
    offload: str = "none",
    like: Work | None = None,
    limit: int = 1 << 27,
) -> int:
    """Return the longest document in tokens, a multiple of 1024, that some level fits; 0 if not even 1024 do.

    `documents` share the micro-batch: 2 for a pair, whose sides may both be that long. `like` gives the rest of the work.
    """

    like = like or Work(0)

    def fits(blocks: int) -> bool:
        work = like._replace(
            tokens=1024 * blocks * documents, sp=sp, micro_batches=1, documents=documents
        )
        found = choices(model, machine, work, options, levels=levels, offload=offload)
        return any(c.prediction.fits(machine) for c in found)

    # all powers of two are tried: MLP tiles set in at some length, and a longer sequence can need less than a shorter one
    low = max((1 << i for i in range(max(limit >> 10, 1).bit_length()) if fits(1 << i)), default=0)
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low


def recommend(
    model: Model,
    machine: Machine,
    work: Work,
    options: Options,
    *,
    batches: int = 1 << 10,
    levels: tuple[str, ...] = FASTEST_FIRST,
    offloads: tuple[str, ...] = ("none", "auto"),
) -> tuple[int, str, Choice] | None:
    """Return degree, offload and levels of the fastest step of `batches` micro-batches like `work`; None: none fits.

    Offload is taken where a degree does not fit without it, or is slower by more than WORTH. Groups without a micro-batch of
    their own wait.
    """
    found: list[tuple[float, int, str, Choice]] = []
    for sp in (d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0):
        here = work._replace(sp=sp, micro_batches=-(-batches // (machine.gpus // sp)))
        best = float("inf")
        for offload in offloads:
            choice = choose_level(model, machine, here, options, levels=levels, offload=offload)
            if choice is not None and choice.prediction.seconds < (1 - WORTH) * best:
                best = choice.prediction.seconds
                found.append((best, sp, offload, choice))
    return min(found, key=lambda f: f[0])[1:] if found else None
