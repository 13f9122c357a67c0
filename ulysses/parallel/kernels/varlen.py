"""The kernels of other projects that take a whole pack on a GPU: torch's FlashAttention-2 and flash-attn 4."""

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import DocumentBounds
from .document import (
    CUDNN,
    CUDNN_ELEMENTS,
    ONE_DOCUMENT,
    InputGradients,
    Inputs,
    Results,
    empty_gradients,
    run_backward,
)

# The head dim for which cuDNN's backward of one long document is faster than flash4's: 57 and 66 ms (H100, 32k tokens,
# 16 query and 2 kv heads), although its forward takes 12.2 ms and flash4's 10.7.
CUDNN_BACKWARD = 256


@functools.cache
def flash4() -> Any:
    """Import flash-attn 4; returns the module, or the error's first line if the import fails."""
    # the next process finds compiled kernels in a folder that only this user writes to
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    folder = Path("~/.cache/ulysses/flash4").expanduser()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # an absent package, or a build for another torch or driver, which fails in any of these ways
        return repr(error).splitlines()[0]


def _bounds(documents: DocumentBounds) -> dict[str, Tensor | int]:
    """Return a varlen kernel's arguments for the documents' bounds, in the order of its parameters."""
    return {
        "cu_seqlens_q": documents.cu_q,
        "cu_seqlens_k": documents.cu_k,
        # for a longest document of 1 query, flash kernels would return lse in another layout
        "max_seqlen_q": max(2, documents.max_q),
        "max_seqlen_k": documents.max_k,
    }


def torch_forward(inputs: Inputs, documents: DocumentBounds) -> Results:
    window = _window(inputs)
    tensors = *inputs[:3], *_bounds(documents).values()
    # dropout, the causal mask, and whether the softmax is returned for debugging
    options = 0.0, inputs.causal and not window, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, *options, scale=inputs.scale, **window
    )
    return out, lse


def torch_backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, documents: DocumentBounds
) -> InputGradients:
    window = _window(inputs)
    # of a generator that dropout would need
    state = torch.zeros(2, dtype=torch.uint64, device=dout.device)
    unused = torch.empty(0, device=dout.device)
    tensors = dout.contiguous(), *inputs[:3], out, lse, *_bounds(documents).values()
    options = 0.0, inputs.causal and not window, state, unused
    return torch.ops.aten._flash_attention_backward(
        *tensors, *options, scale=inputs.scale, **window
    )


def _window(inputs: Inputs) -> dict[str, int]:
    """Return a kernel's arguments for the window, which do not count a row's own key; none if there is no window."""
    if inputs.window is None:
        return {}
    return {"window_size_left": inputs.window - 1, "window_size_right": 0}


def flash4_forward(inputs: Inputs, documents: DocumentBounds) -> Results:
    index, bounds = _flash4_form(documents)
    out, lse, *_ = flash4()._flash_attn_fwd(
        *(x[index] for x in inputs[:3]),
        **bounds,
        **_window(inputs),
        softmax_scale=inputs.scale,
        causal=inputs.causal,
        return_lse=True,
    )
    return out.flatten(0, -3), lse.flatten(0, -2)


def flash4_backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, documents: DocumentBounds
) -> InputGradients:
    deterministic = torch.are_deterministic_algorithms_enabled()
    index, bounds = _flash4_form(documents)
    is_plain = not (bounds or inputs.window or deterministic)
    is_plain &= inputs.q.numel() < CUDNN_ELEMENTS
    if inputs.q.shape[-1] == CUDNN_BACKWARD and is_plain:
        return run_backward(CUDNN, dout, inputs, out, lse, documents)
    grads = empty_gradients(inputs)
    tensors = [x[index] for x in (*inputs[:3], out, dout.contiguous(), lse)]
    dq, dk, dv = (grad[index] for grad in grads)
    options = {"dq": dq, "dk": dk, "dv": dv, "deterministic": deterministic, **_window(inputs)}
    flash4()._flash_attn_bwd(*tensors, inputs.scale, inputs.causal, **bounds, **options)
    return tuple(grads)


def _flash4_form(documents: DocumentBounds) -> tuple[Any, dict[str, Tensor | int]]:
    """Return the index that turns packed tensors into what flash4 takes, and the arguments for the documents' bounds.

    One long document is a batch of one instead: bounds cost up to 7% (H200, one document of 32k tokens, 16 heads).
    """
    is_alone = documents.cu_q.numel() == 2 and documents.max_q >= ONE_DOCUMENT
    return (None, {}) if is_alone else (..., _bounds(documents))
