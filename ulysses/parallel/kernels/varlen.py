"""The kernels of a GPU that take a whole pack: torch's FlashAttention-2, flash-attn 4, and short.py's.

Milliseconds forward / backward (H200, head dim 64): 256 documents of 256 tokens, 9 query and 3 kv heads, take
0.133 / 0.363 with short.py and 0.247 / 0.671 with flash4; 16 of 512, 14 and 2 heads, 0.047 / 0.168 and 0.146 / 0.225.
From 1,024 tokens on, and for head dim 128, flash4 is as fast or faster.
"""

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import Segments
from . import short
from .document import (
    CUDNN,
    ONE_DOCUMENT,
    Gradients,
    Inputs,
    Results,
    empty_gradients,
    run_backward,
)

# The head dim for which cuDNN's backward of one long document is faster than flash4's: 57 and 66 ms (H100, 32k tokens,
# 16 query and 2 kv heads), although its forward takes 12.2 ms and flash4's 10.7.
CUDNN_BACKWARD = 256


def forward(name: str, inputs: Inputs, segments: Segments) -> Results:
    """Return out [T, H, E] and lse [H, T] of the kernel "torch" or "flash4"."""
    if short.usable(inputs, segments):
        return short.forward(inputs, segments)
    run = _flash4_forward if name == "flash4" else _torch_forward
    return run(inputs, segments)


def backward(
    name: str, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, segments: Segments
) -> Gradients:
    """Return dq, dk and dv."""
    given = dout, inputs, out, lse
    if short.usable(inputs, segments):
        return short.backward(*given, segments)
    run = _flash4_backward if name == "flash4" else _torch_backward
    return run(*given, segments)


@functools.cache
def flash4() -> Any:
    """Import flash-attn 4; returns the module, or the error's first line if the import fails."""
    # compiled kernels are kept for the next process, in a folder that is the user's alone
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    folder = Path("~/.cache/ulysses/flash4").expanduser()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # not only absent packages: a build for another torch or driver fails in any of these ways
        return repr(error).splitlines()[0]


def _varlen(segments: Segments) -> dict[str, Tensor | int]:
    """Return the arguments that describe the documents to a varlen kernel, in the order of its parameters."""
    return {
        "cu_seqlens_q": segments.cu_q,
        "cu_seqlens_k": segments.cu_k,
        # told that the longest document has 1 query, flash kernels would lay lse out differently
        "max_seqlen_q": max(2, segments.max_q),
        "max_seqlen_k": segments.max_k,
    }


def _torch_forward(inputs: Inputs, segments: Segments) -> Results:
    window, qkv = _window(inputs), inputs[:3]
    given = *qkv, *_varlen(segments).values(), 0.0, inputs.causal and not window, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, scale=inputs.scale, **window)
    return out, lse


def _torch_backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, segments: Segments
) -> Gradients:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=dout.device)
    unused, window = torch.empty(0, device=dout.device), _window(inputs)
    given = dout.contiguous(), *inputs[:3], out, lse, *_varlen(segments).values()
    options = 0.0, inputs.causal and not window, no_dropout, unused
    return torch.ops.aten._flash_attention_backward(
        *given, *options, scale=inputs.scale, **window
    )


def _window(inputs: Inputs) -> dict[str, int]:
    """Return a window's arguments, in which a row's own key does not count; no arguments without one."""
    if inputs.window is None:
        return {}
    return {"window_size_left": inputs.window - 1, "window_size_right": 0}


def _flash4_forward(inputs: Inputs, segments: Segments) -> Results:
    at, documents = _flash4_form(segments)
    out, lse, *_ = flash4()._flash_attn_fwd(
        *(x[at] for x in inputs[:3]),
        **documents,
        **_window(inputs),
        softmax_scale=inputs.scale,
        causal=inputs.causal,
        return_lse=True,
    )
    return out.flatten(0, -3), lse.flatten(0, -2)


def _flash4_backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, segments: Segments
) -> Gradients:
    deterministic = torch.are_deterministic_algorithms_enabled()
    at, documents = _flash4_form(segments)
    is_plain = not (documents or inputs.window or deterministic)
    if inputs.q.shape[-1] == CUDNN_BACKWARD and is_plain:
        return run_backward(CUDNN, dout, inputs, out, lse, segments)
    grads = empty_gradients(inputs)
    given = [x[at] for x in (*inputs[:3], out, dout.contiguous(), lse)]
    dq, dk, dv = (grad[at] for grad in grads)
    options = {"dq": dq, "dk": dk, "dv": dv, "deterministic": deterministic, **_window(inputs)}
    flash4()._flash_attn_bwd(*given, inputs.scale, inputs.causal, **documents, **options)
    return tuple(grads)


def _flash4_form(segments: Segments) -> tuple[Any, dict[str, Tensor | int]]:
    """Return the index that turns packed tensors into what flash4 takes, and the arguments for the documents' bounds.

    One long document is a batch of one instead: bounds cost up to 7% (H200, one document of 32k tokens, 16 heads).
    """
    is_alone = segments.cu_q.numel() == 2 and segments.max_q >= ONE_DOCUMENT
    return (None, {}) if is_alone else (..., _varlen(segments))
