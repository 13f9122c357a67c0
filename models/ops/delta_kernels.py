"""The gated delta rule and its convolution on GPUs: fla-core's kernels, which run FlashQLA's where it is installed.

Only half precision comes here; models/ops/delta_rule.py does the rest, and is what these kernels are measured against.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulysses.parallel.waves import Recurrence, Wave


@functools.cache
def load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the rule and the convolution; RuntimeError, one sentence, where they cannot be imported."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # of any kind: they compile, and look for a driver
        raise RuntimeError(
            f"layers of linear attention need fla-core and flash-qla on a GPU, which cannot be imported ({error}); "
            'install them with pip install -e ".[hybrid]"'
        ) from error
    return chunk_gated_delta_rule, causal_conv1d


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    wave: Wave,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do models/ops/delta_rule.py's `delta_rule`."""
    rule, _ = load()
    out, last = rule(
        *(x.contiguous()[None] for x in (query, key, value, g, beta)),
        initial_state=start,
        output_final_state=wave.hands_on is not None,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=wave.cu_seqlens,
        cu_seqlens_cpu=torch.tensor(wave.bounds),
    )
    return out[0], last


def convolve(x: Tensor, weight: Tensor, recurrence: Recurrence) -> Tensor:
    """Do models/ops/delta_rule.py's `convolve`."""
    _, convolution = load()
    if len(recurrence.waves) == 1:
        cu_seqlens = recurrence.waves[0].cu_seqlens
        return convolution(x[None], weight, activation="silu", cu_seqlens=cu_seqlens)[0][0]
    cu_seqlens, rows, kept = recurrence.with_copies(weight.shape[1] - 1)
    out, _ = convolution(x[rows][None], weight, activation="silu", cu_seqlens=cu_seqlens)
    return out[0][kept]
