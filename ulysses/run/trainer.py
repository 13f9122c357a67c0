"""The loop: step, evaluate, keep the best, save, stop. The stage decides what depends on the algorithm.

One optimizer step on every rank:

    micro-batches of this data-parallel group, sharded over its sequence-parallel ranks
      -> normalisers of the whole step (one all-reduce)
      -> per micro-batch: forward, terms, backward of  world_size * sum_terms weight / normaliser * local_sum
      -> metrics (one all-reduce), gradient policies on the reduced gradient, update
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path

import torch
from torch import Tensor

from ulysses.check.run_folder import read_run_state
from ulysses.config.schema import OptimizerSection
from ulysses.data.serve.steps import StepLoader
from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import StepContext
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.random_keys import seed_of
from ulysses.plan.hardware import device_peaks
from ulysses.run.checkpoint import check_share, save_checkpoint
from ulysses.run.metrics import MetricsLog
from ulysses.run.stragglers import HostTime, Stragglers
from ulysses.stages.base import Metrics, MetricSums, Stage, StepBatches
from ulysses.watch.watch import Watch, grace_note
from ulysses.zero.state import load_state


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Train the engine that a stage is built around; all ranks call every method together.

    Args:
        loader: gives each step's examples for this data-parallel group.
        eval_loader: the same for held-out data, or None.
        policies: gradient policies, which act on the reduced gradient once per step.
        flops: (tokens, sum of squared lengths, tokens whose target is trained) -> model FLOPs of a forward and backward
            pass, for MFU.
        predicted_gib: the planner's prediction of a GPU's tensors, printed beside the peak of the first step.
        description: further keys of every checkpoint's run.json: the configuration, the model's shape and the inputs.
        say: prints a line.
        watch: takes note of every phase, and knows whether this process was asked to stop.
        log: rank 0's log of the metrics; None on the other ranks.
        samples: is called with the step number before every evaluation.

    Attributes:
        step: how many steps are done.
        best: step and eval/loss of the best evaluation so far.
        metrics: those of the last step.
        stop_requested, save_due: what all ranks have agreed on at the end of the last step.
    """

    stage: Stage
    loader: StepLoader
    eval_loader: StepLoader | None = None
    total_steps: int
    policies: GradientPolicyChain
    flops: Callable[[float, float, float], float] = lambda *_: 0.0
    predicted_gib: float = 0.0
    description: dict[str, object] = field(default_factory=dict)
    say: Callable[[str], None] = print
    watch: Watch = field(default_factory=Watch)
    log: MetricsLog | None = None
    samples: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.mesh, self.engine = self.stage.mesh, self.stage.model
        self.run = self.stage.config.run
        self.peak_flops = 0.0  # of a device whose peaks are not known
        if peaks := device_peaks():
            self.peak_flops, _ = peaks
        self.step = 0
        self.best: list[float] | None = None
        self.metrics: Metrics = {}
        self.stop_requested = self.save_due = False
        self._saved_at, self._saved_step = time.monotonic(), -1
        # what `_read` returns for the coming step, if it has been read ahead
        self._read_ahead: tuple[StepBatches, dict[str, Tensor]] | None = None
        config = self.stage.config
        self.routers = None
        if self.engine.module.config.moe:
            from ulysses.run.routers import Routers

            self.routers = Routers(self.engine, config.model.router_aux_loss_coefficient)
        self.host: HostTime | None = None  # only for a GPU, which may have to wait for its host
        if self.engine.device.type == "cuda":
            self.host = HostTime(config.batch.tokens_per_microbatch, self.mesh.world_size)
        self.stragglers = Stragglers(self.mesh) if self.mesh.world_size > 1 else None

    # ---------------------------------------------------------------- the loop

    def train(self) -> None:
        """Train to the last step or to a requested stop, as `advance` does."""
        run, log = self.run, self.log
        while not self.finished and not self.stop_requested:
            self.advance()
        # only run.patience ends a run before its last step
        if self.best and self.finished and self.step < self.total_steps:
            self.say(
                f"stopped at step {self.step}: eval/loss was not below that of step {self.best[0]} in {run.patience} "
                "evaluations; ulysses export writes that step's checkpoint as a model"
            )
        if self.stop_requested:
            why = "after an error" if log and log.failure else "as requested"
            self.say(
                f"stopped at step {self.step} {why}; checkpoint step-{self.step} continues with --run.resume auto"
            )

    def advance(self) -> None:
        """Take one step, evaluate, save and log as configured.

        An error gets a note with the step at which it happened.
        """
        run, log = self.run, self.log
        current = self.step + 1  # the number of this step, counted from 1
        is_first = not self.metrics
        evaluates = run.eval_every > 0 and current % run.eval_every == 0
        logs = current % run.log_every == 0
        saves = run.save_every > 0 and current % run.save_every == 0
        try:
            values = self.train_step()
            if is_first:
                self.say(self.watch.start_line())
                if measured := values.get("peak_memory_gib"):
                    self.say(
                        f"memory: predicted {self.predicted_gib:.1f} GiB, measured {measured:.1f} GiB"
                    )
            # by the time of the second step, because the first one takes longer
            if current == 2 and (note := grace_note(values["seconds"])):
                self.say(note)
            if self.eval_loader and (self.finished or evaluates):
                if self.samples:
                    self.watch.phase("samples")
                    self.samples(self.step)
                values |= self.evaluate()
            loss = values.get("eval/loss", math.nan)
            # a loss that is not finite is no improvement
            improved = math.isfinite(loss) and (self.best is None or loss < self.best[1])
            if improved:
                self.best = [self.step, loss]
            if log is not None:
                log.report(self.step, values, self.finished or logs)
                # all ranks stop after the coming step, with a checkpoint
                if log.failure is not None:
                    self.watch.ask_to_stop()
            is_due = saves or self.save_due or self.stop_requested
            is_best = improved and (run.save_every or run.patience)
            if is_due or is_best or (self.finished and run.save_last):
                self.save()
        except BaseException as error:
            error.add_note(f"step {current}")
            raise

    @property
    def finished(self) -> bool:
        """Whether the last step is taken, or the best evaluation lies `run.patience` evaluations in the past."""
        patience = self.run.patience * self.run.eval_every
        stale = self.best is not None and 0 < patience <= self.step - self.best[0]
        return stale or self.step >= self.total_steps

    # ---------------------------------------------------------------- one step

    def train_step(self) -> Metrics:
        """Take one optimizer step and return its metrics.

        Raises FloatingPointError if loss or gradient is not finite; the weights are then untouched.
        """
        began = time.perf_counter()
        step = self.step
        # Only dropout draws from this generator. It is seeded anew in every step, so that checkpoints need not hold it.
        torch.manual_seed(seed_of(self.run.seed, step, self.mesh.rank))
        self.watch.phase("data", step + 1)
        batches, normalisers = self._read_ahead or self._read(step)
        inputs_of_loss = self.stage.before_step(batches)
        metrics = MetricSums(self.engine.device)
        if self.routers:
            self.routers.begin(batches.trained)
        for batch, inputs in zip(batches.trained, inputs_of_loss, strict=True):
            loss = self._loss(batch, inputs, normalisers, metrics)
            self.watch.phase("backward")
            self.engine.backward(loss, only_microbatch=len(batches.trained) == 1)
            del loss  # with its graph, while the device still computes
        # The host reads the next batches while the device still computes. A step that begins with a rollout is not
        # read ahead: its answers are drawn with the weights that this step makes.
        needs = self.stage.requirements
        draws = needs.rollout is not None and (step + 1) % needs.steps_per_load == 0
        self._read_ahead = None
        if step + 1 < self.total_steps and not draws:
            self._read_ahead = self._read(step + 1)
        self.watch.phase("optimizer step")
        if self.routers:
            self.routers.add(metrics)
        gradients = self.engine.gradients()
        # the device measures the gradient before the host waits for the metrics, so that it waits only once
        gradients.begin_to_measure(*self.policies.reads)
        launched = time.perf_counter()
        values = self._reduce(metrics)
        waited = time.perf_counter() - launched
        if step == 0:
            self.stage.check_first_step(values)
        values |= self._update(gradients, values)
        self.step = step + 1
        self._measure(values, time.perf_counter() - began)
        if self.host:
            share = waited / values["seconds"]
            if note := self.host.note(self.step, share, len(batches.trained)):
                self.say(note)
        self.metrics = values
        return values

    def _read(self, step: int) -> tuple[StepBatches, dict[str, Tensor]]:
        """Return what a step reads, and what its loss terms are divided by, over all ranks. One collective."""
        batches = self.stage.read(self.loader, step)
        normalisers = MetricSums(self.engine.device)
        for batch in batches.trained:
            for name, value in self.stage.normalisers(batch).items():
                normalisers.add(name, value)
        totals = normalisers.totals()
        # in a step with nothing to train on, loss and gradient become zero instead of 0 / 0
        totals = totals.masked_fill(totals == 0, 1).float()
        return batches, dict(zip(normalisers.sums, totals, strict=True))

    def _loss(
        self,
        batch: ShardedBatch,
        inputs: tuple[Tensor, ...],
        normalisers: dict[str, Tensor],
        metrics: MetricSums,
    ) -> Tensor:
        """Run a micro-batch forward; return this rank's share of the step's loss, and add to the metrics."""
        self.watch.phase("forward")
        parts = []  # of this micro-batch's share of the step's mean loss
        for term in self.stage.losses(batch, metrics, *inputs):
            scaled = term._replace(weight=term.weight / normalisers[term.normaliser])
            metrics.add("loss", self.stage.local_sum(scaled))
            parts.append(scaled.value * scaled.weight)
        # the counts from which `_measure` computes the speed; rows with a target are projected to the vocabulary
        on_first_rank = self.stage.on_first_rank
        metrics.add("projected", float(batch.num_valid))
        metrics.add("tokens", on_first_rank(float(batch.num_tokens)))
        metrics.add("tokens_shared", on_first_rank(float(batch.num_tokens_shared)))
        metrics.add("squares", on_first_rank(float(batch.num_squares)))
        # gradients are averaged over all ranks, and each rank has its share of the mean
        return reduce(add, parts) * float(self.mesh.world_size)

    def _reduce(self, metrics: MetricSums) -> Metrics:
        """Return the step's metrics over all ranks. One collective, and the host waits for it.

        In the same collective all ranks agree on whether to stop, and whether to save a checkpoint.
        """
        metrics.add("stop", float(self.watch.stop_wanted))
        limit = 60 * self.run.save_minutes  # seconds; 0 saves at no time
        is_late = limit > 0 and time.monotonic() - self._saved_at > limit
        metrics.add("save", float(is_late and self.mesh.is_main))  # rank 0's clock decides
        if self.stragglers:
            self.stragglers.add(self.step + 1, metrics)
        values = metrics.reduce()
        if self.stragglers and (slow := self.stragglers.note(self.step + 1, values)):
            self.say(slow)
        # what one rank asks for, all of them do
        ranks_that_stop, ranks_that_save = values.pop("stop"), values.pop("save")
        self.stop_requested, self.save_due = ranks_that_stop > 0, ranks_that_save > 0
        return self.stage.finalise_metrics(values)

    def _update(self, gradients: Gradients, values: Metrics) -> Metrics:
        """Let the gradient policies act, update the weights, and return the policies' metrics and the learning rate."""
        context = StepContext(
            step=self.step,
            total_steps=self.total_steps,
            loss=values["loss"],
            lr=learning_rate(self.step, self.total_steps, self.stage.config.optimizer),
            seed=self.run.seed,
        )
        report = self.policies.apply(gradients, context)
        if context.stop:
            trained = self.stage.trained_examples(self.loader, self.step)
            raise FloatingPointError(f"{context.stop}; {trained}")
        lr = context.lr * context.lr_scale
        if context.skip or not values["tokens"]:
            self.engine.skip_step()
        else:
            self.engine.step(gradients, lr)
            self.stage.after_step(values)
        if context.skip:
            self.say(f"skipped {context.skip}")
        return report | {"lr": lr}

    def _measure(self, values: Metrics, seconds: float) -> None:
        """Add the metrics of speed and memory, and remove the counts that they are computed from."""
        tokens = values["tokens"]
        squares, projected = values.pop("squares"), values.pop("projected")
        values |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        if self.peak_flops:
            rate = self.flops(tokens, squares, projected) / seconds
            values["mfu"] = rate / self.mesh.world_size / self.peak_flops
        if self.engine.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30

    def evaluate(self) -> Metrics:
        """Return the `eval/...` metrics of all held-out data, weighted as in training, and of each named set."""
        self.watch.phase("evaluation")
        metrics = self.stage.evaluate(self.eval_loader)
        return {f"eval/{name}": value for name, value in metrics.items()}

    # ---------------------------------------------------------------- state

    def save(self) -> None:
        """Write a checkpoint of this step into the run folder, unless that has been done."""
        if self._saved_step == self.step:
            return
        self.watch.phase("save")
        policies = self.policies.state_dict()
        folder = Path(self.run.output) / "checkpoints"
        state = {"step": self.step, "best": self.best, "policies": policies, **self.description}
        save_checkpoint(folder, self.engine, state, self.stage.save, keep=self.run.keep)
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def resume(self, checkpoint: Path) -> None:
        """Restore weights, optimizer, gradient policies, stage and position from a checkpoint."""
        state = read_run_state(checkpoint)
        check_share(checkpoint, state["files"])
        self.step, self.best = state["step"], state["best"]
        self.policies.load_state_dict(state["policies"])
        load_state(self.engine, checkpoint)
        self.stage.load(checkpoint)


def learning_rate(step: int, total: int, config: OptimizerSection) -> float:
    """Return the learning rate of step `step` (0-based) out of `total`.

    Warm-up rises linearly and reaches the peak on its last step; then linear or cosine decay to min_lr * lr,
    constant, or WSD (constant, then linear decay over the last decay_fraction of all steps).
    """
    warmup = int(config.warmup) if config.warmup >= 1 else math.ceil(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    decay = max(1, round(config.decay_fraction * total))  # steps of WSD's decay
    decayed = {  # the share of the way from the peak to the floor
        "constant": 0.0,
        "linear": progress,
        "cosine": 0.5 - 0.5 * math.cos(math.pi * progress),
        "wsd": max(0.0, (step - (total - decay)) / decay),
    }
    return config.lr * (1 - (1 - config.min_lr) * decayed[config.schedule])
