"""The loop: step, evaluate, keep the best, save, stop. It knows no algorithm and no feature.

One optimizer step on every rank:

    micro-batches of this data-parallel group, sharded over its sequence-parallel ranks
      -> normalisers of the whole step (one all-reduce)
      -> per micro-batch: forward, terms, backward of  world_size * sum_terms weight / normaliser * local_sum
      -> metrics (one all-reduce), gradient policies on the reduced gradient, update
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.policy import StepContext
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.random_keys import seed_of
from ulysses.run.checkpoint import check_share, read_run_state, save_checkpoint
from ulysses.run.metrics import MetricsLog, device_peaks
from ulysses.run.optim import learning_rate
from ulysses.stages.base import MetricSums, Stage, StepBatches
from ulysses.watch.failure import grace_note
from ulysses.watch.watch import Watch
from ulysses.zero.state import load_state

LOOK_AT = 8  # the step at which it is told if the host is too slow: kernels are compiled and graphs recorded by then
LEAST_WAIT = 0.05  # share of a step


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Train the engine that a stage is built around; all ranks call every method together.

    Args:
        loader: gives each step's micro-batches for this data-parallel group (ulysses.data.serve.steps.StepLoader).
        eval_loader: the same over held-out data, or None.
        policies: gradient policies, which act on the reduced gradient once per step.
        flops: (tokens, sum of squared lengths, tokens whose target is trained) -> model FLOPs of a forward and backward
            pass, for MFU.
        description: what every checkpoint's run.json says about the run: its configuration and the model's shape.
        say: prints a line.
        watch: is told of every phase, and knows whether this process was asked to stop.
    """

    stage: Stage
    loader: Any
    eval_loader: Any = None
    total_steps: int
    policies: GradientPolicyChain
    flops: Callable[[float, float, float], float] = lambda *_: 0.0
    description: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = print
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self.mesh, self.engine = self.stage.mesh, self.stage.model
        self.run, self.peak_flops = self.stage.config.run, (device_peaks() or (0.0,))[0]
        self.step = 0
        self.best: list[float] | None = None  # step, eval loss
        self.metrics: dict[str, float] = {}
        # agreed on by all ranks at a step's boundary
        self.stop_requested = self.save_due = False
        self._saved = time.monotonic()
        self._next = None  # what `_prepare` returned for the coming step
        self.routers: Any = None  # of a model with experts
        if self.engine.module.config.moe:
            from ulysses.run.routers import Routers

            self.routers = Routers(
                self.engine, self.stage.config.model.router_aux_loss_coefficient
            )
        # shares of the last steps in which the host waited for the device
        self._waits: deque[float] = deque(maxlen=LOOK_AT // 2)

    # ---------------------------------------------------------------- the loop

    def train(self, log: MetricsLog | None = None) -> None:
        """Train to the last step or to a requested stop, and evaluate, save and log as configured.

        An error says in a note at which step it happened.

        Args:
            log: where rank 0 writes the metrics; None on the other ranks.
        """
        run = self.run
        try:
            began = self.step
            while not self.finished and not self.stop_requested:
                current = self.step + 1
                values = self.train_step()
                if current == began + 1:
                    self.say(self.watch.start_line())
                # the first step takes longer than others
                if self.step == 2 and (note := grace_note(values["seconds"])):
                    self.say(note)
                if self.step == LOOK_AT and (note := self._host_note()):
                    self.say(note)
                if self.finished or (run.eval_every and self.step % run.eval_every == 0):
                    values |= self.evaluate()
                loss, best = values.get("eval/loss", math.nan), self.best or (0, math.inf)
                improved = -math.inf < loss < best[1]  # never if it is not finite
                if improved:
                    self.best = [self.step, loss]
                last = self.finished
                if log is not None:
                    log.report(self.step, values, last or self.step % run.log_every == 0)
                    if log.failure is not None:
                        self.watch.ask_to_stop()  # after the coming step, with a checkpoint, which all ranks write
                is_best = improved and (run.save_every or run.patience)
                due = run.save_every and self.step % run.save_every == 0
                due = due or self.save_due or self.stop_requested
                if is_best or due or (last and run.save_last):
                    self.save()
        except Exception as error:
            error.add_note(f"step {current}")
            raise
        if self.finished and self.step < self.total_steps:
            self.say(
                f"stopped at step {self.step}: eval/loss was not below that of step {self.best[0]} in {run.patience} "
                "evaluations; ulysses export writes that step's checkpoint as a model"
            )
        if self.stop_requested:
            self.say(
                f"stopped at step {self.step} as requested; checkpoint step-{self.step} continues with "
                "--run.resume auto"
            )

    def _host_note(self) -> str:
        """Return what to set if the device had nothing to do while the host prepared its work, or an empty text."""
        share = sum(self._waits) / len(self._waits)
        auto = self.stage.config.batch.tokens_per_microbatch == "auto"
        # several micro-batches were chosen because larger ones gain nothing, or do not fit
        if self.engine.device.type != "cuda" or share > LEAST_WAIT or (auto and self._cuts > 1):
            return ""
        advice = "more batch.examples" if auto else 'batch.tokens_per_microbatch = "auto"'
        fewer = ", or use fewer GPUs" * (self.mesh.world_size > 1)
        return (
            f"the GPU waits for its host, which waits for the GPU in {share:.0%} of a step only: give it more work at "
            f"a time by {advice}{fewer}"
        )

    @property
    def finished(self) -> bool:
        """Whether the last step is taken, or the best evaluation lies `run.patience` evaluations back."""
        patience = self.run.patience * self.run.eval_every
        stale = self.best is not None and 0 < patience <= self.step - self.best[0]
        return stale or self.step >= self.total_steps

    # ---------------------------------------------------------------- one step

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step and return its metrics.

        Raises FloatingPointError if loss or gradient is not finite; the weights are then untouched.
        """
        began = time.perf_counter()
        step = self.step
        # Only dropout draws from this generator, so a resumed run needs no generator state.
        torch.manual_seed(seed_of(self.run.seed, step, self.mesh.rank))
        self.watch.phase("data", step + 1)
        read = self._next or self._prepare(self.loader, step)
        self._next, batches = None, read.batches
        self._cuts = len(batches)
        of_step = self.stage.before_step(read)
        normalisers = self._normalisers(batches)
        metrics = MetricSums(self.engine.device)
        if self.routers:
            self.routers.begin(batches)
        for batch, known in zip(batches, of_step, strict=True):
            self.watch.phase("forward")
            terms = self.stage.losses(batch, metrics, **known)
            metrics.add("projected", 0.0 if self.stage.reward else float(batch.num_valid))
            for name in ("tokens", "tokens_shared", "squares"):
                metrics.add(
                    name, self.stage.on_first_rank(float(getattr(batch, f"num_{name}")))
                )
            loss = 0.0
            for term in terms:
                value = term.value * (term.weight / normalisers[term.normaliser])
                metrics.add(
                    "loss", self.stage.on_first_rank(value) if term.per_sequence else value
                )
                loss = loss + value
            self.watch.phase("backward")
            self.engine.backward(loss * float(self.mesh.world_size))
        # Host work while the device still computes.
        if step + 1 < self.total_steps and self.stage.may_prepare(step + 1):
            self._next = self._prepare(self.loader, step + 1)
        self.watch.phase("optimizer step")
        if self.routers:
            self.routers.add(metrics)
        gradients = self.engine.gradients()
        metrics.add("stop", float(self.watch.stop_wanted))
        late = time.monotonic() - self._saved > 60 * self.run.save_minutes > 0
        metrics.add("save", float(late and self.mesh.is_main))  # one clock decides
        launched = time.perf_counter()
        values = metrics.reduce()
        waited = time.perf_counter() - launched
        self.stop_requested, self.save_due = (values.pop(x) > 0 for x in ("stop", "save"))
        work = values["tokens"], values.pop("squares"), values.pop("projected")
        values = self.stage.finalise_metrics(values)
        if step == 0:
            self.stage.check_first_step(values)
        context = StepContext(
            step=step,
            total_steps=self.total_steps,
            loss=values["loss"],
            lr=learning_rate(step, self.total_steps, self.stage.config.optimizer),
            seed=self.run.seed,
        )
        report = self.policies.apply(gradients, context)
        if context.stop:
            examples = self.loader.indices(*divmod(step, self.loader.steps_per_epoch))[:8]
            raise FloatingPointError(
                f"{context.stop}; examples {examples} ... of {self.loader.holds}"
            )
        lr = context.lr * context.lr_scale
        if context.skip or not work[0]:  # a step without a token
            self.engine.skip_step()
        else:
            self.engine.step(gradients, lr)
            self.stage.after_step(values)
        if context.skip:
            self.say(f"skipped {context.skip}")
        self.step = step + 1
        on_gpu = self.engine.device.type == "cuda"
        self.watch.step_done(torch.cuda.current_stream().record_event() if on_gpu else None)
        seconds = time.perf_counter() - began
        self._waits.append(waited / seconds)
        values |= report | {
            "lr": lr,
            "tokens_per_second": work[0] / seconds,
            "seconds": seconds,
        }
        if self.peak_flops:
            rate = self.flops(*work) / seconds
            values["mfu"] = rate / self.mesh.world_size / self.peak_flops
        if on_gpu:
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.metrics = values
        return values

    def _prepare(self, loader: Any, step: int) -> StepBatches:
        """Return what a step reads on this rank."""
        position = divmod(step, loader.steps_per_epoch)
        batches = [
            pack_shard(
                self.stage.packed(examples), self.mesh, self.engine.device, may_be_empty=True
            )
            for examples in loader.step(*position)
        ]
        kl_batches = self.stage.kl_batches(loader, loader.indices(*position))
        return StepBatches(step, batches, kl_batches)

    def _normalisers(self, batches: list[ShardedBatch]) -> dict[str, Tensor]:
        """Sum them over all micro-batches and ranks, before the first backward. One collective."""
        found = MetricSums(self.engine.device)
        for batch in batches:
            for name, value in self.stage.normalisers(batch).items():
                found.add(name, value)
        totals = found.totals()
        # nothing to train on: zero loss, zero gradient
        return dict(zip(found.sums, totals.masked_fill(totals == 0, 1).float(), strict=True))

    # ---------------------------------------------------------------- evaluation

    def evaluate(self) -> dict[str, float]:
        """Return `eval/...` metrics over all held-out data with the training's own weighting."""
        if self.eval_loader is None:
            return {}
        self.watch.phase("evaluation")
        if (own := self.stage.evaluate(self.eval_loader)) is not None:
            return own
        sums = MetricSums(self.engine.device)
        with self.engine.inference():
            for k in range(self.eval_loader.steps_per_epoch):
                read = self._prepare(self.eval_loader, k)
                of_step = self.stage.before_step(read)
                for batch, known in zip(read.batches, of_step, strict=True):
                    normalisers = self.stage.normalisers(batch)
                    for i, term in enumerate(self.stage.losses(batch, sums, **known)):
                        value = term.value * term.weight
                        value = self.stage.on_first_rank(value) if term.per_sequence else value
                        sums.add(f"term{i}", value, normalisers[term.normaliser])
        means = sums.reduce()
        loss = sum(means.pop(name) for name in list(means) if name.startswith("term"))
        values = {"loss": loss, **self.stage.finalise_metrics(means)}
        return {f"eval/{name}": value for name, value in values.items()}

    # ---------------------------------------------------------------- state

    def save(self) -> None:
        """Write a checkpoint of this step into the run folder."""
        self.watch.phase("save")
        policies, folder = self.policies.state_dict(), Path(self.run.output) / "checkpoints"
        state = {"step": self.step, "best": self.best, "policies": policies, **self.description}
        save_checkpoint(folder, self.engine, state, self.stage.save, keep=self.run.keep)
        self._saved = time.monotonic()

    def resume(self, checkpoint: Path) -> None:
        """Restore weights, optimizer, gradient policies, stage and position from a checkpoint."""
        state = read_run_state(checkpoint)
        check_share(checkpoint, state)
        self.step, self.best = state["step"], state["best"]
        self.policies.load_state_dict(state["policies"])
        load_state(self.engine, checkpoint)
        self.stage.load(checkpoint)
