"""The varlen attention kernels, and the choice among them.

    forward(inputs, segments)                    -->  out [T, H, E], lse [H, T]
    backward(dout, inputs, out, lse, segments)   -->  dq, dk, dv

    reference   plain matrix products, any device, dtype and head dim, float64 too; the others are measured against it
    torch       torch's own FlashAttention-2: varlen on GPUs (Ampere and newer), document by document on CPUs
    cudnn       cuDNN's fused attention, document by document: for packs of few long documents (Hopper and newer)
    flash4      flash-attn 4 (`flash_attn.cute`; Hopper and Blackwell)

On a GPU, torch and flash4 leave packs of short documents to the kernels of short.py.

Forward and backward are separate, so that a caller may keep (out, lse) and never run the forward kernel again. Causal
masks are aligned bottom-right: the last query of a document sees its last key. With a sliding window a query sees
itself and the window - 1 tokens before it, as transformers counts it.

Letters: T packed tokens, H query heads, K kv heads, E head dim.
"""

import functools
import importlib
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import Segments
from . import short
from .document import (
    CPU,
    CUDNN,
    REFERENCE,
    Gradients,
    Inputs,
    Results,
    empty_gradients,
    run_backward,
    run_forward,
)

VARLEN = ("flash4", "torch")  # on a GPU; the others take document by document
HOPPER = 9  # its major compute capability
HALF = (torch.float16, torch.bfloat16)
ONE_DOCUMENT = 8192  # rows of a document from which on flash4 has kernels for it alone
# The head dim for which cuDNN's backward of one long document is faster than flash4's: 57 and 66 ms (H100, 32k tokens,
# 16 query and 2 kv heads), although its forward takes 12.2 ms and flash4's 10.7.
CUDNN_BACKWARD = 256


class KernelChoice(NamedTuple):
    """A kernel's name, and why it was chosen, for the log."""

    name: str
    reason: str


def resolve_kernel(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    documents: int = 0,
    window: int | None = None,
) -> KernelChoice:
    """Check a requested kernel, or find the fastest one for "auto"; every rank decides the same.

    Under torch.use_deterministic_algorithms the kernel is one that repeats its results bit for bit. "auto" takes cuDNN
    only if `documents` says that the pack has a single one (and perhaps a tail). `window` is a sliding window that cuts
    a document.
    Raises ValueError if the kernel is unknown or cannot compute this case here.
    """
    device = torch.device(device)
    case = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"
    check_name(name)
    why = "fastest" if name == "auto" else "as requested,"
    reasons = [f"{why} for {case}"]
    for candidate in KERNELS if name == "auto" else [name]:
        objection = why_missing(candidate, device) or _why_unfit(
            candidate, device, dtype, head_dim, window
        )
        if name == "auto" and candidate == "cudnn" and documents not in (1, 2):
            objection = objection or "cudnn is for packs of one document"
        if objection is None:
            return KernelChoice(candidate, "; ".join(reasons))
        reasons.append(objection)
    raise ValueError(
        f"attention kernel {name} cannot run here ({case}): {reasons[1]}; set another kernel or auto"
    )


def check_name(name: str) -> None:
    """Raise ValueError unless this is "auto" or the name of a kernel."""
    if name not in ("auto", *KERNELS):
        raise ValueError(
            f"attention kernel {name!r} is unknown; set auto, {', '.join(KERNELS)}"
        )


def why_missing(name: str, device: torch.device) -> str | None:
    """Tell why this machine does not have the kernel; None if it does."""
    capabilities = KERNELS[name].capabilities
    if not capabilities:
        return None
    if device.type != "cuda":
        return f"{name} needs a GPU, the device is {device.type}"
    major = torch.cuda.get_device_capability(device)[0]
    if major not in capabilities:
        return f"{name} does not run on compute capability {major}"
    if name == "cudnn":
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    module = flash4()
    return f"flash4 cannot be imported ({module})" if isinstance(module, str) else None


def _why_unfit(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None
) -> str | None:
    """Tell why the kernel cannot compute this case; None if it can."""
    kernel = KERNELS[name]
    if not kernel.head_dims or device.type != "cuda":
        return None
    if dtype not in HALF:
        return f"{name} needs float16 or bfloat16"
    if name == "cudnn" and window:
        return f"cudnn has no sliding window, and the model has one of {window} tokens"
    head_dims = [*kernel.head_dims]
    if torch.cuda.get_device_capability(device)[0] == HOPPER:
        head_dims += kernel.hopper_head_dims
    if head_dim not in head_dims:
        if name == "flash4":
            dims = ", ".join(map(str, head_dims))
            return f"flash4 is for head dims {dims}, where its gradients are known to be right"
        return f"{name} needs a head dim that is a multiple of 8 and at most {max(head_dims)}"
    deterministic = torch.get_deterministic_debug_mode()  # 1: torch only warns, 2: it raises
    if name == "cudnn" and deterministic:
        return "cudnn's backward is not deterministic"
    if name == "torch" and deterministic == 1:
        return "torch is deterministic only under torch.use_deterministic_algorithms(True), not with warn_only"
    return None


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


# --- forward and backward ----------------------------------------------------------------------------------------


def _varlen(segments: Segments) -> dict[str, Any]:
    """Return the arguments that describe the documents to a varlen kernel, in the order of its parameters."""
    return {
        "cu_seqlens_q": segments.cu_q,
        "cu_seqlens_k": segments.cu_k,
        # told that the longest document has 1 query, flash kernels would lay lse out differently
        "max_seqlen_q": max(2, segments.max_q),
        "max_seqlen_k": segments.max_k,
    }


def _torch_forward(inputs: Inputs, segments: Segments) -> Results:
    if not inputs.q.is_cuda:
        return run_forward(CPU, inputs, segments)
    window, qkv = _window(inputs), inputs[:3]
    given = *qkv, *_varlen(segments).values(), 0.0, inputs.causal and not window, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, scale=inputs.scale, **window)
    return out, lse


def _torch_backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, segments: Segments
) -> Gradients:
    if not dout.is_cuda:
        return run_backward(CPU, dout, inputs, out, lse, segments)
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


def _flash4_form(segments: Segments) -> tuple[Any, dict[str, Any]]:
    """Return the index that turns packed tensors into what flash4 takes, and the arguments for the documents' bounds.

    One long document is a batch of one instead: bounds cost up to 7% (H200, one document of 32k tokens, 16 heads).
    """
    is_alone = segments.cu_q.numel() == 2 and segments.max_q >= ONE_DOCUMENT
    return (None, {}) if is_alone else (..., _varlen(segments))


class Kernel(NamedTuple):
    """A kernel, and what it is for.

    forward(inputs, segments) -> out, lse; backward(dout, inputs, out, lse, segments) -> dq, dk, dv.
    capabilities: the major compute capabilities of the GPUs that it needs; empty if it needs none.
    head_dims: those that it computes on a GPU, in half precision; empty if it computes anything.
    hopper_head_dims: those that it computes on Hopper besides.
    """

    forward: Callable[..., Results]
    backward: Callable[..., Gradients]
    capabilities: Collection[int] = ()
    head_dims: Collection[int] = ()
    hopper_head_dims: Collection[int] = ()


def _or_short(kernel: Kernel) -> Kernel:
    """Return the kernel with packs of short documents left to short.py.

    Milliseconds forward / backward (H200, head dim 64): 256 documents of 256 tokens, 9 query and 3 kv heads, take
    0.133 / 0.363 there and 0.247 / 0.671 with flash4; 16 of 512, 14 and 2 heads, 0.047 / 0.168 and 0.146 / 0.225.
    From 1,024 tokens on, and for head dim 128, flash4 is as fast or faster.
    """

    def forward(inputs: Inputs, segments: Segments) -> Results:
        chosen: Any = short if short.usable(inputs, segments) else kernel
        return chosen.forward(inputs, segments)

    def backward(dout: Tensor, inputs: Inputs, *others: Any) -> Gradients:
        chosen: Any = short if short.usable(inputs, others[-1]) else kernel
        return chosen.backward(dout, inputs, *others)

    return kernel._replace(forward=forward, backward=backward)


# Fastest first. H200, causal, head dim 128, 32k to 128k tokens, forward / backward TFLOP/s: flash4 640-734 / 591-608,
# cudnn 560-656 / 530-552 (one long document), torch 330-357 / 315-324.
# flash4 4.0.0b36 on H200: gradients right for these head dims (2e-3 in bfloat16), wrong by 110% for heads of 8 and 16.
KERNELS = {
    "flash4": _or_short(
        Kernel(_flash4_forward, _flash4_backward, range(9, 12), (32, 64, 128), (192, 256))
    ),
    "cudnn": Kernel(
        partial(run_forward, CUDNN),
        partial(run_backward, CUDNN),
        range(9, 100),
        range(8, 129, 8),
        range(136, 257, 8),
    ),
    "torch": _or_short(Kernel(_torch_forward, _torch_backward, head_dims=range(8, 257, 8))),
    "reference": Kernel(partial(run_forward, REFERENCE), partial(run_backward, REFERENCE)),
}
