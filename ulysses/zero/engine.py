"""One model under ZeRO-3: forward, backward by the one gradient rule, the update, and nothing else.

    forward(batch) -> backward(loss, last) ... -> gradients() -> step(lr)
    all-gather        reduce.py: averages, fp32    policies        fused AdamW on this rank's slices

DeepSpeed gathers and releases weights; it knows nothing of sequence parallelism, and reduces nothing.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ulysses.gradients.gradients import Gradients
from ulysses.zero.gradients import check_deepspeed, rank_slices, zero_gradients
from ulysses.zero.reduce import GradientReduction

AHEAD = 2  # layers that the host may run ahead of the GPU


class _RunAhead:
    """Keep the host from issuing gathers far ahead of the computation: gathered layers would fill the memory."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.events: deque[torch.cuda.Event] = deque()

    def __call__(self, *_: Any) -> None:
        event = torch.cuda.Event()
        event.record()
        self.events.append(event)
        if len(self.events) > self.layers:
            self.events.popleft().synchronize()


class ZeroEngine:
    """A model whose parameters, gradients and optimizer state are partitioned over all ranks.

    Args:
        model: built by `build_partitioned` (or any module; DeepSpeed then partitions it).
        config: from ulysses.zero.settings.derive.
        optimizer: a torch optimizer over the trainable parameters, or None for a frozen model.
        leaf_modules: module classes whose parameters are gathered and reduced as one unit (one hook instead of many).
        reduce_between: dtype in which sums of gradients travel between nodes.
        node_size: ranks of one node; None asks the launcher.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
        leaf_modules: tuple[type[nn.Module], ...] = (),
        reduce_between: torch.dtype = torch.float32,
        node_size: int | None = None,
    ) -> None:
        present = [c for c in leaf_modules if any(type(m) is c for m in model.modules())]
        if present:
            deepspeed.utils.set_z3_leaf_modules(model, present)
            if torch.cuda.is_available():
                ahead = _RunAhead(AHEAD)
                for module in model.modules():
                    if type(module) in present:
                        module.register_forward_pre_hook(ahead)
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.module: nn.Module = self.engine.module
        self.trainable = optimizer is not None
        self.zero = self.engine.optimizer
        self.device = torch.device(self.engine.device)
        if self.trainable:
            check_deepspeed(self.zero)
            # DeepSpeed learns the order in which modules run, to gather ahead and to know what may stay gathered. Passes without
            # a backward half have an order of their own: in one with the others, neither would ever be learnt.
            self.forward_only = copy.copy(self.zero.parameter_offload.param_coordinator)
            self.forward_only._clear_trace_structures()
            slices = {parameter: grad for _, parameter, _, grad in rank_slices(self.zero)}
            units = [m for m in model.modules() if type(m) in present]
            bucket = config["zero_optimization"]["reduce_bucket_size"]
            self.reduction = GradientReduction(
                slices,
                units,
                self.device,
                bucket=bucket,
                between=reduce_between,
                node_size=node_size,
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; all ranks must call it together, the same number of times."""
        if not self.trainable:
            return self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            return self.engine(*args, **kwargs)
        offload = self.zero.parameter_offload
        training, offload.param_coordinator = offload.param_coordinator, self.forward_only
        try:
            return self.module(*args, **kwargs)
        finally:
            offload.param_coordinator = training

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Back-propagate an already scaled loss; `last` marks the step's last micro-batch."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)
        self.reduction.finish()

    def gradients(self) -> Gradients:
        """Return the view on the reduced gradient of the whole step, valid between the last backward and `step`."""
        self.reduction.wait()
        return zero_gradients(self.zero, self.names, self.device)

    @torch.no_grad()
    def step(self, learning_rates: list[float]) -> None:
        """Update the weights with one learning rate per parameter group.

        The sequence of DeepSpeed's own step without its norm and overflow passes: our gradient policies have
        looked at, checked and clipped the gradient already.
        """
        zero = self.zero
        for group, lr in zip(zero.optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = lr
        zero._pre_step()
        zero._partition_all_parameters()
        if not zero.offload_optimizer:
            zero.zero_grad(set_to_none=True)
        offset = 0
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            if (
                not zero.offload_optimizer
            ):  # the slices of a sub-group lie side by side in one buffer: no copy is needed
                master.grad = zero.grad_partitions_flat_buffer.narrow(0, offset, master.numel())
                offset += master.numel()
            zero._optimizer_step(index)
            zero._reassign_or_swap_out_partitioned_parameters(index)
            if not zero.offload_optimizer:
                master.grad = None
        self.reduction.forget()
        zero._post_step(set())
        self.engine.global_steps += 1

    def skip_step(self) -> None:
        """Drop the accumulated gradient without touching the weights."""
        self.reduction.forget()
        self.zero._pre_step()
        self.zero.zero_grad(set_to_none=True)
        if self.zero.offload_optimizer:
            self.zero.reset_cpu_buffers()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients; restores the training mode."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    def destroy(self) -> None:
        """Remove DeepSpeed's hooks and give all memory back; nothing of the engine may be used afterwards.

        DeepSpeed's own tables refer to the model as long as the process lives, so its tensors are emptied.
        """
        if self.trainable:
            self.reduction.close()
        self.engine.destroy()
        held = [
            t
            for p in self.module.parameters()
            for t in (p.data, p.grad, getattr(p, "ds_tensor", None))
        ]
        if self.trainable:
            zero = self.zero
            held += [
                *zero.fp32_partitioned_groups_flat,
                *(f.grad for f in zero.fp32_partitioned_groups_flat),
            ]
            held += [
                *zero.fp16_partitioned_groups_flat,
                *getattr(zero, "param_groups_fp16_flat_cpu_memory", []),
            ]
            held += [getattr(zero, "grad_partitions_flat_buffer", None)]
            held += [value for state in zero.optimizer.state.values() for value in state.values()]
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
