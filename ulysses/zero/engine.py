"""One model under ZeRO-3: forward, backward by the one gradient rule, and the update.

    forward(batch) -> backward(loss, last) ... -> gradients() -> step(lr)
    all-gather        reduce.py: averages, fp32    policies        AdamW on this rank's slices

DeepSpeed gathers and releases the weights. It knows nothing of sequence parallelism, and the engine reduces
the gradients.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.gradients.gradients import Gradients
from ulysses.zero.construct import streaming_memory
from ulysses.zero.deepspeed_internals import Partition, empty, remove_hooks
from ulysses.zero.reduce import GradientReduction
from ulysses.zero.resident import ResidentWeights

AHEAD = 2  # layers that the host may run ahead of the GPU
RESERVE = 0.05  # of the free memory, for what sampling itself allocates


class ZeroEngine:
    """A model whose parameters, gradients and optimizer state are partitioned over all ranks.

    Args:
        model: built by `build_partitioned`.
        config: from ulysses.zero.settings.derive.
        optimizer: a torch optimizer over the trainable parameters, or None for a frozen model.
        leaf_modules: module classes whose parameters are gathered and reduced as one unit (one hook instead
        of many).
        reduce_between: dtype in which sums of gradients travel between nodes.
        resident: whether the weights stay whole on every rank (resident.py). On one process they do in any case, unless
            they are kept in host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
        leaf_modules: tuple[type[nn.Module], ...] = (),
        reduce_between: torch.dtype = torch.float32,
        *,
        resident: bool = False,
    ) -> None:
        units = [module for module in model.modules() if type(module) in leaf_modules]
        on_host = "offload_param" in config["zero_optimization"]
        resident = (resident or dist.get_world_size() == 1) and not on_host
        self._begun: deque[torch.cuda.Event] = deque()
        if not resident and units:
            deepspeed.utils.set_z3_leaf_modules(model, list(leaf_modules))
            if torch.cuda.is_available():
                for unit in units:
                    unit.register_forward_pre_hook(self._stay_near)
        self.module, self.optimizer = model, optimizer
        self._engine: Any = None  # a frozen model whose weights stay needs none
        if optimizer is not None or not resident:
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config
            )
        self.weights: Any = None  # those that stay
        if resident:
            if self._engine is not None:
                remove_hooks(self._engine)
            self.weights = ResidentWeights(model, units)
        self.device = torch.device((self.weights or self._engine).device)
        self.partition: Any = None  # a frozen model has none
        self._gradients: Gradients | None = None  # the last view of this step
        if optimizer is not None:
            self.partition = Partition(self._engine, self.weights)
            self.reduction = GradientReduction(
                self.partition.slices,
                units,
                self.device,
                bucket=config["zero_optimization"]["reduce_bucket_size"],
                between=reduce_between,
            )

    def _stay_near(self, *_: Any) -> None:
        """Keep the host from issuing gathers far ahead: gathered layers would fill the memory."""
        self._begun.append(torch.cuda.current_stream().record_event())
        if len(self._begun) > AHEAD:
            self._begun.popleft().synchronize()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; all ranks must call it together, the same number of times."""
        if self.partition is None or self.weights is not None:
            return self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            return self._engine(*args, **kwargs)
        with self.partition.forward_only():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate an already scaled loss; `last` marks the step's last micro-batch."""
        if self.weights is not None:
            loss.backward()
        else:
            self._engine.set_gradient_accumulation_boundary(last)
            self._engine.backward(loss, scale_wrt_gas=False)
        self.reduction.finish()

    def gradients(self) -> Gradients:
        """Return a view of the whole step's reduced gradient, valid between the last backward and `step`.

        It shows this rank's float32 slices. What is written to them is what the optimizer reads.

        Raises:
            RuntimeError: if a trained parameter received no gradient in this step, naming it.
        """
        self.reduction.wait()
        if self._gradients is not None:
            iter(self._gradients)  # does what an earlier view has put off
        self._gradients = Gradients(
            self.partition.slices, self._all_reduce, defer=bool(self.partition.updates)
        )
        return self._gradients

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device)
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def step(self, learning_rates: list[float]) -> None:
        """Update the weights with one learning rate per parameter group."""
        for group, lr in zip(self.optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = lr
        self.partition.publish((self._gradients or self.gradients()).take_factors())
        self.skip_step()

    def skip_step(self) -> None:
        """Drop the accumulated gradient without touching the weights."""
        self._gradients = None
        self.reduction.forget()
        self.partition.begin_step()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Run what follows in evaluation mode without gradients; restores the training mode."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    def destroy(self) -> None:
        """Give all memory back; nothing of the engine may be used afterwards."""
        if self.partition is not None:
            self.reduction.close()
        if self.weights is not None:
            self.weights.close()
        empty(self._engine, self.module, self.partition)


# --- whole weights out of their slices: one module at a time for an export, all at once for a sampler ---------------


def full_parameters(
    engine: ZeroEngine, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the whole value of every wanted parameter in the model's order.

    Values are in host memory and on rank 0 only; the others get None. All ranks must iterate together. No rank ever
    holds more than one module's parameters.
    """
    main = dist.get_rank() == 0
    chosen = ((name, p) for name, p in engine.module.named_parameters() if wanted(name))
    with streaming_memory():
        for _, of_module in groupby(chosen, lambda item: item[0].rpartition(".")[0]):
            names, parameters = zip(*of_module)
            with gathered(engine, parameters), torch.no_grad():
                values = [p.detach().to("cpu", copy=True) if main else None for p in parameters]
            yield from zip(names, values)


@contextmanager
def gathered_weights(engine: ZeroEngine) -> Iterator[dict[str, Tensor]]:
    """Gather all parameters by their names; read only.

    A sampler reads them without hooks and without collectives: all ranks enter and leave together, and need
    no lockstep in between. The memory for them was planned before the run began.
    """
    chosen = dict(engine.module.named_parameters())
    with gathered(engine, chosen.values()):
        yield {name: p.data for name, p in chosen.items()}


def gathered(
    engine: ZeroEngine, parameters: Iterable[nn.Parameter]
) -> AbstractContextManager[Any]:
    """Return the context in which these parameters are whole; all ranks enter and leave it together."""
    if engine.weights is None:
        return deepspeed.zero.GatheredParameters(parameters)
    engine.weights.wait()
    return nullcontext()


def free_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process can still allocate for a sampler's cache."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * (1 - RESERVE))
