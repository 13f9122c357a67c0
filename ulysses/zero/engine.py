"""One model under ZeRO-3: forward, backward by the one gradient rule, and the update.

    forward(batch) -> backward(loss) ... -> gradients() -> step(gradients, lr)
    units are whole   reduce.py: averages, fp32    policies        AdamW on this rank's slices

A unit's weights are whole when it is used. Afterwards they are released (DeepSpeed gathers them again for the next use)
or kept (resident.py). DeepSpeed knows nothing of sequence parallelism, and the engine reduces the gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.gradients.gradients import Gradients
from ulysses.zero.construct import streaming_memory
from ulysses.zero.deepspeed_internals import Partition, ShardedWeights, empty
from ulysses.zero.reduce import GradientReduction
from ulysses.zero.resident import ResidentWeights
from ulysses.zero.update import ParameterGroup

RESERVE = 0.05  # of the free memory, for what sampling itself allocates


class ZeroEngine:
    """A model whose weights are partitioned over all ranks, to be run.

    Args:
        model: built by `build_partitioned`.
        config: from ulysses.zero.settings.derive.
        unit_kinds: classes of modules whose parameters are gathered and reduced as one unit (one hook instead of many).
        resident: whether the weights stay whole on every rank. On one process they do in any case, unless they are
            kept in host memory.
        optimizer: of a model that is trained.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        unit_kinds: Sequence[type[nn.Module]] = (),
        *,
        resident: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.module, self.device = model, next(model.parameters()).device
        self.units = [module for module in model.modules() if type(module) in unit_kinds]
        if self.units:
            deepspeed.utils.set_z3_leaf_modules(model, list(unit_kinds))
        self._deepspeed: Any
        self._deepspeed, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
        on_host = "offload_param" in config["zero_optimization"]
        stay = (resident or dist.get_world_size() == 1) and not on_host
        self.weights: ShardedWeights | ResidentWeights = (
            ResidentWeights if stay else ShardedWeights
        )(self._deepspeed, self.units)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; all ranks must call it together, the same number of times."""
        with self.weights.forward_pass():
            return self.module(*args, **kwargs)

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
        self.weights.close()
        empty(self._deepspeed)


class TrainedEngine(ZeroEngine):
    """A model that is trained: its gradients and its optimizer's state are partitioned too.

    Args:
        optimizer: makes a torch optimizer of the tables of parameter groups, as torch's optimizers take them.
        groups: the trainable parameters.
        reduce_between: dtype in which sums of gradients travel between nodes.
        graphs: whether the layers run as CUDA graphs (memory/graphs.py), which run no hooks and write all gradients
            to memory of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        unit_kinds: Sequence[type[nn.Module]] = (),
        *,
        reduce_between: torch.dtype = torch.float32,
        resident: bool = False,
        graphs: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.optimizer = optimizer(
            [{"params": g.parameters, "weight_decay": g.weight_decay} for g in groups]
        )
        # a graph of all layers gathers and reduces nothing in between
        kinds = () if graphs else unit_kinds
        super().__init__(model, config, kinds, resident=resident, optimizer=self.optimizer)
        self.partition = Partition(self._deepspeed, self.groups)
        self.reduction = GradientReduction(
            self.partition.slices,
            self.units,
            self.device,
            lent=graphs,
            bucket=config["zero_optimization"]["reduce_bucket_size"],
            between=reduce_between,
        )

    def backward(self, loss: Tensor) -> None:
        """Back-propagate an already scaled loss."""
        loss.backward()
        self.weights.backward_done()
        self.reduction.finish()

    def gradients(self) -> Gradients:
        """Return a view of the whole step's reduced gradient, valid between the last backward and `step`.

        It shows this rank's float32 slices. What is written to them is what the optimizer reads.

        Raises:
            RuntimeError: if a trained parameter received no gradient in this step, naming it.
        """
        self.reduction.wait()
        return Gradients(self.partition.slices, self._all_reduce)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device)
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def step(self, gradients: Gradients, lr: float) -> None:
        """Update the weights by the slices times the factors of `gradients`; `lr` is the schedule's learning rate."""
        for group, settings in zip(self.groups, self.optimizer.param_groups, strict=True):
            settings["lr"] = lr * group.lr_factor
        with self.weights.rewritten(), torch.no_grad():
            for scope, parameters, update in self.partition.sub_groups:
                update(gradients.factors[scope])
                self.weights.written(parameters)
        self.skip_step()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the master weights to the model after a change from outside."""
        with self.weights.rewritten():
            for _, parameters, update in self.partition.sub_groups:
                update.write()
                self.weights.written(parameters)

    def skip_step(self) -> None:
        """Drop the accumulated gradient without touching the weights."""
        self.reduction.forget()

    def destroy(self) -> None:
        """Give all memory back; nothing of the engine may be used afterwards."""
        self.reduction.close()
        self.weights.close()
        empty(self._deepspeed, list(self.optimizer.state.values()))


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
            with engine.weights.whole(parameters), torch.no_grad():
                values = [p.detach().to("cpu", copy=True) if main else None for p in parameters]
            yield from zip(names, values)


@contextmanager
def gathered_weights(engine: ZeroEngine) -> Iterator[dict[str, Tensor]]:
    """Gather all parameters by their names; read only.

    A sampler reads them without hooks and without collectives: all ranks enter and leave together, and need
    no lockstep in between. The memory for them was planned before the run began.
    """
    chosen = dict(engine.module.named_parameters())
    with engine.weights.whole(chosen.values()):
        yield {name: p.data for name, p in chosen.items()}


def free_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process can still allocate for a sampler's cache."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * (1 - RESERVE))
