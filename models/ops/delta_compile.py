"""Compile the kernels of FlashQLA side by side: one after the other they take minutes on a new machine.

To find these kernels, `convolve` and `delta_rule` stand in for those of delta_kernels.py, for which Triton and torch
would first compile others, one after the other.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import Tensor

from ulysses.parallel.recurrence import Recurrence, TreeLevel


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


def compile_side_by_side(
    found: Iterable[Callable[[], object]], meanwhile: Iterable[Callable[[], object]]
) -> None:
    """Compile every kernel of tilelang that the computations of `found` call, those of the longest source first.

    `meanwhile` are computations that run while the kernels compile. No kernel runs in any of them, so that what they
    compute means nothing, and they may fail. Does nothing without tilelang. A kernel that fails to compile here does so
    again when it is first called.
    """
    try:
        from tilelang.jit import JITImpl
    except Exception:  # of any kind: the package looks for a driver
        return
    calls: dict[Any, tuple[Any, Any, Any]] = {}

    def record(kernel: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        calls.setdefault(
            (id(kernel), args, tuple(sorted(kwargs.items()))), (kernel, args, kwargs)
        )
        return lambda *_: None

    def compile_kernel(kernel: Any, args: Any, kwargs: Any) -> None:
        compiled = kernel.compile(*args, **kwargs)
        # else it is looked up by its source, in which compilation has changed names, and linked by the first call
        kernel._kernel_cache[kernel.func.parse_args(*args, **kwargs)[0]] = compiled
        compiled.adapter.get_exportable_executable().jit()

    call = JITImpl.__call__
    JITImpl.__call__ = record
    try:
        # as many at a time as there are cores, of which the machine counts each twice: more slow the longest one down
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            _compute(found)
            for kernel, args, kwargs in sorted(
                calls.values(), key=lambda x: -len(x[0].func_source)
            ):
                with suppress(Exception):
                    kernel.get_tir(*args, **kwargs)  # traced here, and kept for `compile`
                    pool.submit(compile_kernel, kernel, args, kwargs)
            _compute(meanwhile)
    finally:
        JITImpl.__call__ = call


def _compute(computations: Iterable[Callable[[], object]]) -> None:
    for compute in computations:
        with suppress(Exception):
            compute()
