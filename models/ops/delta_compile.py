"""Compile the kernels of FlashQLA side by side: one after the other they take minutes on a new machine.

To find these kernels, `convolve` and `delta_rule` stand in for those of delta_kernels.py, for which Triton and torch
would first compile others, one after the other.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import Tensor

from ulysses.parallel.recurrence import Recurrence, TreeLevel

WORKERS = 16  # while kernels compile, other threads can run Python nearly all the time


def convolve(
    x: Tensor, weight: Tensor, recurrence: Recurrence, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return something of the shapes and dtypes that delta_kernels.py's `convolve` returns."""
    return (x * weight[:, -1]).split(widths, 1)


def delta_rule(*rows: Tensor, level: TreeLevel, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call FlashQLA as delta_kernels.py's `delta_rule` does through fla-core, which takes long to import."""
    from flash_qla import chunk_gated_delta_rule

    out, states = chunk_gated_delta_rule(
        *(x.contiguous()[None] for x in rows),
        initial_state=start,
        output_final_state=level.final_states is not None,
        cu_seqlens=level.cu_seqlens,
    )
    return out.squeeze(0), states


def compile_side_by_side(*computations: Callable[[], object]) -> None:
    """Compile every kernel of tilelang that these call, none of which runs; what they compute means nothing.

    The computations run one after the other while the kernels compile, and may fail. Does nothing without tilelang. A
    kernel that fails to compile here does so again when it is first called.
    """
    try:
        from tilelang.jit import JITImpl
    except Exception:  # of any kind: the package looks for a driver
        return
    begun: dict[Any, Future] = {}

    def compile_kernel(kernel: Any, args: Any, kwargs: Any) -> None:
        compiled = kernel.compile(*args, **kwargs)
        # else it is looked up by its source, in which compilation has changed names, and linked by the first call
        kernel._kernel_cache[kernel.func.parse_args(*args, **kwargs)[0]] = compiled
        compiled.adapter.get_exportable_executable().jit()

    def begin(kernel: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        key = id(kernel), args, tuple(sorted(kwargs.items()))
        if key not in begun:
            kernel.get_tir(*args, **kwargs)  # traced here, and kept for `compile`
            begun[key] = pool.submit(compile_kernel, kernel, args, kwargs)
        return lambda *_: None

    call = JITImpl.__call__
    with ThreadPoolExecutor(WORKERS) as pool:
        JITImpl.__call__ = begin
        try:
            for compute in computations:
                with suppress(Exception):
                    compute()
        finally:
            JITImpl.__call__ = call
