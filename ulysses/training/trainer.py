"""The loop: batches in, one exact global gradient per step out. It knows no algorithm and no feature.

One optimizer step on every rank:

    micro-batches of this data-parallel group, sharded over its sequence-parallel ranks
      -> counts of the whole step (one all-reduce)
      -> per micro-batch: forward, terms, backward of  world_size * sum_terms weight / count * local_sum
      -> metrics (one all-reduce), gradient policies on the reduced gradient, update
"""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.policy import StepContext
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.metrics import MetricSums
from ulysses.training.stages.base import Stage
from ulysses.zero.engine import ZeroEngine

Prepared = tuple[
    list[ShardedBatch], list[ShardedBatch], dict[str, float]
]  # micro-batches, the stage's side batches, tokens


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Train one engine with one stage.

    Args:
        loader: gives each step's micro-batches for this data-parallel group (ulysses.data.steps.StepLoader).
        eval_loader: the same over held-out data, or None.
        learning_rate: step -> learning rate, pure.
        policies: act on the reduced gradient once per step.
        flops: (tokens, sum of squared lengths, tokens whose target is trained) -> model FLOPs of a forward and backward
            pass, for MFU.
        peak_flops: of one device, or None.
    """

    mesh: ParallelMesh
    engine: ZeroEngine
    stage: Stage
    loader: Any
    eval_loader: Any
    total_steps: int
    learning_rate: Callable[[int], float]
    policies: GradientPolicyChain
    flops: Callable[[float, float, float], float]
    peak_flops: float | None
    seed: int

    def __post_init__(self) -> None:
        self.step = 0
        self.best: tuple[int, float] | None = None  # (step, eval loss)
        self.metrics: dict[str, float] = {}
        self.skipped: str | None = (
            None  # why the last step left the weights alone, if a gradient policy said so
        )
        self.stop_requested = False  # agreed on by all ranks at a step's boundary
        self.stop_wanted = False  # this process was told to stop
        self._next: tuple[int, Prepared] | None = None

    # ---------------------------------------------------------------- one step

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step and return its metrics; all ranks call it together.

        Raises FloatingPointError if loss or gradient is not finite; the weights are then untouched.
        """
        began = time.perf_counter()
        step, device = self.step, self.engine.device
        torch.manual_seed(
            _mix(self.seed, step, self.mesh.rank)
        )  # dropout only: resuming needs no generator state
        batches, side_batches, amount = self._take(step)
        self.stage.step = step
        self.stage.prepare_step(batches, side_batches)
        counts = self._counts(batches)
        metrics = MetricSums(device)
        for i, batch in enumerate(batches):
            terms = self.stage.losses(batch, metrics)
            metrics.add_sum("projected", float(batch.num_valid))
            scaled = [t.value * (t.weight / counts[t.count]) for t in terms]
            for term, value in zip(terms, scaled, strict=True):
                metrics.add_sum("loss", self.stage.once(value) if term.per_sequence else value)
            self.engine.backward(
                sum(scaled) * float(self.mesh.world_size), last=i == len(batches) - 1
            )
        if step + 1 < self.total_steps and self.stage.may_prepare(step + 1):
            self._next = (
                step + 1,
                self._prepare(step + 1),
            )  # host work while the device still computes
        gradients = self.engine.gradients()  # built while the device still computes
        metrics.add_sum("stop", float(self.stop_wanted))
        values = metrics.reduce()
        self.stop_requested = values.pop("stop") > 0
        amount["projected"] = values.pop("projected", 0.0)
        values = self.stage.derive(values)
        if step == 0:
            self.stage.check_first_step(values)
        context = StepContext(
            step=step,
            total_steps=self.total_steps,
            loss=values["loss"],
            lr=self.learning_rate(step),
            seed=self.seed,
        )
        report = self.policies.apply(gradients, context)
        if context.stop:
            raise FloatingPointError(
                f"{context.stop}; examples {self.loader.indices(*self._position(step))[:8]} ... of the data"
            )
        self.skipped = context.skip
        if context.skip or not self.stage.accepts(values):
            self.engine.skip_step()
        else:
            self.engine.step(self._learning_rates(context))
        self.step = step + 1
        seconds = time.perf_counter() - began
        self.metrics = {
            **values,
            **report,
            "lr": context.lr * context.lr_scale,
            **self._speed(amount, seconds),
        }
        return self.metrics

    def _learning_rates(self, context: StepContext) -> list[float]:
        """Return the learning rate of each parameter group: the step's, times the group's own factor."""
        groups, lr = self.engine.optimizer.param_groups, context.lr * context.lr_scale
        return [lr * g.get("lr_factor", 1.0) for g in groups]

    def _position(self, step: int) -> tuple[int, int]:
        return divmod(step, self.loader.steps_per_epoch)

    def _take(self, step: int) -> Prepared:
        if self._next is None or self._next[0] != step:
            self._next = (step, self._prepare(step))
        _, prepared = self._next
        self._next = None
        return prepared

    def _prepare(self, step: int) -> Prepared:
        micro_batches = self.loader.step(*self._position(step))
        indices = self.loader.indices(*self._position(step))
        lengths = self.loader.dataset.sequence_lengths[indices].astype("float64")
        amount = {"tokens": float(lengths.sum()), "squared_lengths": float((lengths**2).sum())}
        return self._shard(micro_batches), self.stage.side_batches(self.loader, indices), amount

    def _shard(self, micro_batches: list[list[Any]]) -> list[ShardedBatch]:
        return [
            pack_shard(
                [s for example in examples for s in self.stage.sequences(example)],
                self.mesh,
                self.engine.device,
            )
            for examples in micro_batches
        ]

    def _counts(self, batches: list[ShardedBatch]) -> dict[str, Tensor]:
        """Global counts over all micro-batches and ranks, known before the first backward. One collective."""
        own: dict[str, Tensor] = {}
        for batch in batches:
            for name, value in self.stage.counts(batch).items():
                own[name] = own[name] + value if name in own else value
        names = sorted(own)
        flat = torch.stack([own[name].double() for name in names])
        if self.mesh.world_size > 1:
            dist.all_reduce(flat)
        flat = torch.where(
            flat > 0, flat, torch.ones_like(flat)
        )  # nothing to train on: zero loss, zero gradient
        return {name: flat[i].float() for i, name in enumerate(names)}

    def _speed(self, amount: dict[str, float], seconds: float) -> dict[str, float]:
        tokens, squares = amount["tokens"], amount["squared_lengths"]
        out = {"tokens": tokens, "tokens_per_second": tokens / seconds, "seconds": seconds}
        if self.peak_flops:
            out["mfu"] = (
                self.flops(tokens, squares, amount["projected"])
                / seconds
                / self.mesh.world_size
                / self.peak_flops
            )
        if self.engine.device.type == "cuda":
            out["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return out

    # ---------------------------------------------------------------- evaluation

    def evaluate(self) -> dict[str, float]:
        """Return `eval/...` metrics over all held-out data with the training's own weighting; all ranks call it together."""
        if self.eval_loader is None:
            return {}
        own = self.stage.evaluate(self.eval_loader)
        if own is not None:
            return own
        sums = MetricSums(self.engine.device)
        weights: dict[str, tuple[float, str]] = {}
        with self.engine.inference():
            for k in range(self.eval_loader.steps_per_epoch):
                batches = self._shard(self.eval_loader.step(0, k))
                self.stage.prepare_step(
                    batches,
                    self.stage.side_batches(self.eval_loader, self.eval_loader.indices(0, k)),
                )
                for batch in batches:
                    counts = self.stage.counts(batch)
                    for i, term in enumerate(self.stage.losses(batch, sums)):
                        weights[f"term{i}"] = (term.weight, term.count)
                        value = self.stage.once(term.value) if term.per_sequence else term.value
                        sums.add(f"term{i}", value, counts[term.count])
        means = sums.reduce()
        loss = sum(weight * means.pop(name, 0.0) for name, (weight, _) in weights.items())
        return {"eval/loss": loss, **{f"eval/{k}": v for k, v in self.stage.derive(means).items()}}

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "policies": self.policies.state_dict(),
            "best": list(self.best) if self.best else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.policies.load_state_dict(state["policies"])
        self.best = (int(state["best"][0]), float(state["best"][1])) if state["best"] else None

    def stop_on_signal(self, resources: ExitStack) -> None:
        """Finish the running step, save and exit on SIGTERM (decided together at the step's boundary).

        Closing `resources` gives SIGTERM its old meaning back.
        """

        def request(*_: Any) -> None:
            self.stop_wanted = True  # only the reduced sum of these decides: a signal may reach one rank a step earlier

        resources.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, request))


def _mix(*numbers: int) -> int:
    value = 0x9E3779B97F4A7C15
    for n in numbers:
        value = ((value ^ n) * 0xBF58476D1CE4E5B9) & (2**63 - 1)
        value ^= value >> 31
    return value
