"""The varlen attention kernels behind one pair of functions, and the choice among them.

    varlen_forward(kernel, q, k, v, segments, causal, scale)                   -->  out [T, H, E], lse [H, T]
    varlen_backward(kernel, dout, q, k, v, out, lse, segments, causal, scale)  -->  dq, dk, dv

    reference   plain matrix products, any device, dtype and head dim, float64 too; the others are measured against it
    torch       torch's own FlashAttention-2: varlen on GPUs (Ampere and newer), document by document on CPUs
    cudnn       cuDNN's fused attention, document by document: for packs of few long documents (Hopper and newer)
    flash4      flash-attn 4 (`flash_attn.cute`; Hopper and Blackwell)

Forward and backward are separate, so that a caller may keep (out, lse) and never run the forward kernel again. Causal
masks are aligned bottom-right: the last query of a document sees its last key.

Letters: T packed tokens, H query heads, K kv heads, E head dim.
"""

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels_document import CPU, CUDNN, REFERENCE, DocumentKernel, run_backward, run_forward
from .layout import Segments

# Fastest first. H200, causal, head dim 128, 32k to 128k tokens, forward / backward TFLOP/s: flash4 640-734 / 591-608,
# cudnn 560-656 / 530-552 (one long document), torch 330-357 / 315-324.
KERNELS = ("flash4", "cudnn", "torch", "reference")
VARLEN = ("flash4", "torch")  # on a GPU; the others take document by document
OLDEST_GPU = 9  # the major compute capability that flash4 and cudnn need
HALF = (torch.float16, torch.bfloat16)
# flash4 4.0.0b36 on H200: gradients right for these (2e-3 in bfloat16), wrong by 110% for heads of 8 and 16
FLASH4_HEAD_DIMS = (32, 64, 128)
ONE_DOCUMENT = (
    8192  # rows of a single document from which on flash4 has kernels of its own for it
)


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
    documents: int | None = None,
) -> KernelChoice:
    """Check a requested kernel, or find the fastest one for "auto"; every rank decides the same.

    Under torch.use_deterministic_algorithms the kernel is one that repeats its results bit for bit. "auto" takes cuDNN
    only if `documents` says that the pack has a single one (and perhaps a tail).
    Raises ValueError if the kernel is unknown or cannot compute this case here.
    """
    device = torch.device(device)
    case = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"
    if name not in ("auto", *KERNELS):
        raise ValueError(
            f"attention kernel {name!r} is unknown; set auto, {', '.join(KERNELS)} or give a callable"
        )
    why = "fastest" if name == "auto" else "as requested,"
    reasons = [f"{why} for {case}"]
    for candidate in KERNELS if name == "auto" else [name]:
        objection = why_missing(candidate, device) or _why_unfit(
            candidate, device, dtype, head_dim
        )
        if name == "auto" and candidate == "cudnn" and documents not in (1, 2):
            objection = objection or "cudnn is for packs of one document"
        if objection is None:
            return KernelChoice(candidate, "; ".join(reasons))
        reasons.append(objection)
    raise ValueError(
        f"attention kernel {name} cannot run here ({case}): {reasons[1]}; set another kernel or auto"
    )


def why_missing(name: str, device: torch.device) -> str | None:
    """Tell why this machine does not have the kernel; None if it does."""
    if name not in ("flash4", "cudnn"):
        return None
    if device.type != "cuda":
        return f"{name} needs a GPU, the device is {device.type}"
    major = torch.cuda.get_device_capability(device)[0]
    if major < OLDEST_GPU or (name == "flash4" and major > 11):
        return f"{name} does not run on compute capability {major}"
    if name == "cudnn":
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    module = flash4()
    return f"flash4 cannot be imported ({module})" if isinstance(module, str) else None


def _why_unfit(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Tell why the kernel cannot compute this case; None if it can."""
    if name == "reference" or (name == "torch" and device.type != "cuda"):
        return None
    if dtype not in HALF:
        return f"{name} needs float16 or bfloat16"
    if name == "flash4" and head_dim not in FLASH4_HEAD_DIMS:
        dims = ", ".join(map(str, FLASH4_HEAD_DIMS))
        return f"flash4 is for head dims {dims}, where its gradients are known to be right"
    limit = 128 if name == "cudnn" else 256
    if head_dim % 8 or head_dim > limit:
        return f"{name} needs a head dim that is a multiple of 8 and at most {limit}"
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


def varlen_forward(
    kernel: str | Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a kernel's forward: q [Tq, H, E], k and v [Tk, K, E] -> out [Tq, H, E], lse [H, Tq] float32 or float64.

    A callable kernel has no lse, and an empty one is returned.
    """
    documents = _varlen(segments)
    if callable(kernel):
        out = kernel(q, k, v, **documents, causal=causal, softmax_scale=scale)
        return out, q.new_empty(0, 0)
    by_document = _document_kernel(kernel, q)
    if by_document is not None:
        return run_forward(by_document, q, k, v, segments, causal, scale)
    if kernel == "torch":
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *documents.values(), 0.0, causal, False, scale=scale
        )
    elif _is_one_document(segments):
        q, k, v = (x[None] for x in (q, k, v))
        out, lse, *_ = flash4()._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=causal, return_lse=True
        )
        return out[0], lse[0]
    else:
        out, lse, *_ = flash4()._flash_attn_fwd(
            q, k, v, **documents, softmax_scale=scale, causal=causal, return_lse=True
        )
    return out, lse


def varlen_backward(
    kernel: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel's backward from its saved out and lse: dq [Tq, H, E], dk and dv [Tk, K, E]."""
    by_document = _document_kernel(kernel, q)
    if by_document is not None:
        return run_backward(by_document, dout, q, k, v, out, lse, segments, causal, scale)
    documents = _varlen(segments)
    dout = dout.contiguous()
    if kernel == "torch":
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *documents.values(),
            0.0,
            causal,
            no_dropout,
            unused,
            scale=scale,
        )
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    inputs, grads = [q, k, v, out, dout, lse], {"dq": dq, "dk": dk, "dv": dv}
    if _is_one_document(segments):
        inputs, documents = [x[None] for x in inputs], {}
        grads = {name: grad[None] for name, grad in grads.items()}
    deterministic = torch.are_deterministic_algorithms_enabled()
    flash4()._flash_attn_bwd(
        *inputs, scale, causal, **documents, **grads, deterministic=deterministic
    )
    return dq, dk, dv


def _is_one_document(segments: Segments) -> bool:
    """Tell whether flash4 runs without bounds, which cost it up to 7% (H200, one document of 32k tokens, 16 heads)."""
    return segments.cu_q.numel() == 2 and segments.max_q >= ONE_DOCUMENT


def _document_kernel(kernel: str, q: Tensor) -> DocumentKernel | None:
    """Return the functions of a kernel that works document by document; None for a varlen kernel."""
    if kernel == "torch" and not q.is_cuda:
        return CPU
    return {"reference": REFERENCE, "cudnn": CUDNN}.get(kernel)


def _varlen(segments: Segments) -> dict[str, Any]:
    """Return the arguments that describe the documents to a varlen kernel, in the order of its parameters."""
    return {
        "cu_seqlens_q": segments.cu_q,
        "cu_seqlens_k": segments.cu_k,
        # told that the longest document has 1 query, flash kernels would lay lse out differently
        "max_seqlen_q": max(2, segments.max_q),
        "max_seqlen_k": segments.max_k,
    }
