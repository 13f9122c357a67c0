"""One model under ZeRO-3: forward, backward by the one gradient rule, and the update.

    forward(batch) -> backward(loss) ...   -> gradients()       -> step(gradients, lr)
    units are whole   reduce.py averages      policies change it   AdamW on this rank's slices

A unit's weights are whole when it is used. Afterwards they are released (DeepSpeed gathers them again for the next use)
or kept (resident.py). DeepSpeed knows nothing of sequence parallelism, and the engine reduces the gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models.layers import DecoderLayer
from ulysses.gradients.gradients import Gradients
from ulysses.zero import gpu_kernels
from ulysses.zero.across_ranks import AveragedReduction
from ulysses.zero.construct import streaming_memory
from ulysses.zero.reduce import GradientReduction
from ulysses.zero.resident import ResidentWeights
from ulysses.zero.settings import ZeroSettings
from ulysses.zero.update import ParameterGroup, SubGroup


class ZeroEngine:
    """A model whose weights are partitioned over all ranks, for forward passes.

    Args:
        model: built by `build_partitioned`.
        settings: from ulysses.zero.settings.derive.
        by_layer: each layer's parameters are gathered and reduced as one unit, by one hook instead of many.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ZeroSettings,
        *,
        by_layer: bool = True,
    ) -> None:
        self.module = model
        self.device = next(model.parameters()).device
        self.units = [m for m in model.modules() if by_layer and isinstance(m, DecoderLayer)]
        # `build_partitioned` has decided where the weights are
        if next(model.parameters()).shard.whole is not None:
            self.weights: Any = ResidentWeights(model, self.units)
        else:
            from ulysses.zero.deepspeed_internals import ShardedWeights

            self.weights = ShardedWeights(model, settings.deepspeed, self.units)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; all ranks must call it together, the same number of times."""
        with self.weights.forward_pass():
            return self.module(*args, **kwargs)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Run the block in evaluation mode without gradients; restores the training mode."""
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
        free([(p, p.shard.local) for p in self.module.parameters()])


class TrainedEngine(ZeroEngine):
    """A model that is trained: its gradients and its optimizer's state are partitioned too.

    Args:
        groups: the trainable parameters.
        offload_optimizer: whether master weights, gradients and the optimizer's state are in host memory.
        reduce_between: dtype in which sums of gradients travel between nodes.
        graphs: whether the layers run as CUDA graphs (memory/graphs.py), which run no hooks and write the gradients of
            every backward pass to the same memory.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ZeroSettings,
        groups: Sequence[ParameterGroup],
        *,
        offload_optimizer: bool,
        reduce_between: torch.dtype,
        graphs: bool = False,
    ) -> None:
        # a graph of all layers gathers and reduces nothing between layers
        super().__init__(model, settings, by_layer=not graphs)
        device = torch.device("cpu") if offload_optimizer else self.device
        self.sub_groups = [*sub_groups(groups, settings.sub_group_size, device)]
        names = {p: name for name, p in model.named_parameters()}
        self.slices = [s for sub_group in self.sub_groups for s in sub_group.slices(names)]
        reduction: Callable[..., GradientReduction] = GradientReduction
        if dist.get_world_size() > 1:
            reduction = partial(AveragedReduction, between=reduce_between)
        self.reduction = reduction(
            self.slices,
            self.units,
            self.device,
            gradients_reused=graphs,
            bucket=settings.reduce_bucket_size,
        )

    def backward(self, loss: Tensor, *, only_microbatch: bool = False) -> None:
        """Back-propagate an already scaled loss.

        Args:
            only_microbatch: whether the step has no other micro-batch, so that its gradients need no sum.
        """
        self.reduction.begin(only_microbatch=only_microbatch)
        loss.backward()
        self.weights.backward_done()
        self.reduction.finish()

    def gradients(self) -> Gradients:
        """Return a view of the whole step's reduced gradient, valid between the last backward and `step`.

        It shows this rank's slices. The optimizer reads what is written to those that `slices` returns.

        Raises:
            RuntimeError: if a trained parameter received no gradient in this step, naming it.
        """
        return StepGradients(self.reduction.gradients(), self._all_reduce)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)

    @torch.no_grad()
    def step(self, gradients: Gradients, lr: float) -> None:
        """Update the weights by the slices of `gradients` times their factors; `lr` is the schedule's learning rate."""
        # in the order of `slices`: sub-group after sub-group, and in each the order of its parameters
        entries = iter(gradients.entries)
        with self.weights.rewriting():
            for sub_group in self.sub_groups:
                group = sub_group.group
                grads = [next(entries).grad for _ in sub_group.parameters]
                sub_group.update(grads, lr * group.lr_factor, gradients.factors[group.scope])
                self.weights.rewritten(sub_group.parameters)
        self.reduction.forget()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the master weights to the model after somebody else than `step` has changed them."""
        with self.weights.rewriting():
            for sub_group in self.sub_groups:
                sub_group.write()
                self.weights.rewritten(sub_group.parameters)

    def skip_step(self) -> None:
        """Drop the accumulated gradient without touching the weights."""
        self.reduction.forget()

    def destroy(self) -> None:
        """Give all memory back; nothing of the engine may be used afterwards."""
        self.reduction.close()
        super().destroy()
        free([[group.master, group.moments] for group in self.sub_groups])


def sub_groups(
    groups: Sequence[ParameterGroup], size: int, device: torch.device
) -> Iterator[SubGroup]:
    """Yield sub-groups of about `size` elements on this rank, in the order of the groups.

    Args:
        device: of master weights, sums of gradients and state; pinned memory if it is the host of a GPU.
    """
    for group in groups:
        parameters: list[nn.Parameter] = []
        weights: list[Tensor] = []
        for p in group.parameters:
            parameters.append(p)
            weights.append(p.shard.local)
            if sum(map(len, weights)) < size and p is not group.parameters[-1]:
                continue
            master = torch.cat(weights).to(device, torch.float32)
            pinned = device.type == "cpu" and torch.cuda.is_available()
            if pinned:
                master = master.pin_memory()
            sub_group_class = SubGroup
            if group.eight_bit:
                from ulysses.zero.eight_bit import EightBitSubGroup

                sub_group_class = EightBitSubGroup
            elif gpu_kernels.triton and master.is_cuda and weights[0].is_cuda:
                sub_group_class = gpu_kernels.OnePassSubGroup
            lengths = [p.shard.length for p in parameters]
            yield sub_group_class(group, parameters, weights, lengths, master)
            parameters, weights = [], []


class StepGradients(Gradients):
    """A step's gradient, part of which may still be in the weights' dtype."""

    def apply_factors(self) -> None:
        """Make every slice float32 first, so that no change by a gradient policy is rounded."""
        self.entries = [replace(e, grad=e.grad.to(self.sum_dtype)) for e in self.entries]
        super().apply_factors()


def free(tensors: Any) -> None:
    """Free the memory of all tensors in a nested structure, and of their gradients.

    DeepSpeed's tables refer to a model as long as the process lives, so nothing else gives the memory back.
    """
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor):
            for held in (tensor, tensor.grad):
                if held is not None and held.untyped_storage().resizable():
                    held.untyped_storage().resize_(0)


# --- whole weights out of their slices: one module at a time for an export, all at once for a sampler ---------------


def full_parameters(
    engine: ZeroEngine,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    without: tuple[str, ...] = (),
    exact: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and whole value of every wanted parameter, in the model's order.

    Parameters whose names begin with a prefix in `without` are left out. Values are on rank 0 only, in the memory of
    `device`; other ranks get None. All ranks must iterate together. No rank ever holds the parameters of more than one
    module. With `exact`, trained parameters are the master weights in float32, in host memory.
    """
    masters = {s.name: s for s in engine.slices} if exact else {}  # type: ignore[attr-defined]
    main = dist.get_rank() == 0
    chosen = (
        (name, p)
        for name, p in engine.module.named_parameters()
        if wanted(name) and not name.startswith(without)
    )
    with streaming_memory():
        for _, items in groupby(chosen, lambda item: item[0].rpartition(".")[0]):
            of_module = dict(items)
            values: Any = dict.fromkeys(of_module)  # None, which stays so on other ranks than 0
            with engine.weights.whole(of_module.values()), torch.no_grad():
                for name, p in of_module.items():
                    if main and name not in masters:
                        values[name] = p.detach().to(device, copy=True)
            for name, value in values.items():
                if name in masters:
                    value = masters[name].whole_master(engine.device)
                yield name, value


@contextmanager
def gathered_weights(engine: ZeroEngine) -> Iterator[dict[str, Tensor]]:
    """Gather all parameters by their names; read only.

    All ranks enter and leave together. In between a sampler reads the parameters without hooks and collectives, so that
    ranks need not run in lockstep. The plan of the run has counted their memory.
    """
    parameters = dict(engine.module.named_parameters())
    with engine.weights.whole(parameters.values()):
        yield {name: p.data for name, p in parameters.items()}
