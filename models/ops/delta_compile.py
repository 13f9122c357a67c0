"""Compile the kernels of FlashQLA side by side: one after the other they take minutes on a new machine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

WORKERS = 16  # most of a compilation is done by other processes


def compile_side_by_side(*computations: Callable[[], object]) -> None:
    """Compile every kernel of tilelang that these call, none of which runs; what they compute means nothing.

    Does nothing without tilelang. A kernel that fails to compile here does so again when it is first called.
    """
    try:
        from tilelang.jit import JITImpl
        from tilelang.jit import compile as compile_kernel
    except Exception:  # of any kind: the package looks for a driver
        return
    # traced before any compiles: compilations hold Python's lock for long, and the longest would begin last
    begun: dict[Any, Callable[[], object]] = {}

    def begin(kernel: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        key = id(kernel), args, tuple(sorted(kwargs.items()))
        if key not in begun:
            begun[key] = partial(
                compile_kernel,
                kernel.get_tir(*args, **kwargs),
                out_idx=kernel.out_idx,
                execution_backend=kernel.execution_backend,
                target=kernel.target,
                target_host=kernel.target_host,
                verbose=kernel.verbose,
                pass_configs=kernel.pass_configs,
                compile_flags=kernel.compile_flags,
            )
        return lambda *_: None

    call = JITImpl.__call__
    JITImpl.__call__ = begin
    try:
        with suppress(Exception):
            for compute in computations:
                compute()
    finally:
        JITImpl.__call__ = call
    with ThreadPoolExecutor(WORKERS) as pool:
        for compile_one in begun.values():
            pool.submit(compile_one)
