"""The varlen attention kernels, and the choice among them.

    kernel_forward(name, inputs, documents)                    -->  out [T, H, E], lse [H, T]
    kernel_backward(name, dout, inputs, out, lse, documents)   -->  dq, dk, dv

    reference   plain matrix products, any device, dtype and head dim, float64 too; the others are measured against it
    torch       torch's own FlashAttention-2: varlen on GPUs (Ampere and newer), document by document on CPUs
    cudnn       cuDNN's fused attention, one call for all documents of one length (Hopper and newer)
    flash4      flash-attn 4 (`flash_attn.cute`; Hopper and Blackwell)

On a GPU torch and flash4 are varlen.py's. The kernels of short.py take packs of short documents in their place, and
cudnn takes from torch what is worth its plans (`is_worth_plans`).

Forward and backward are separate, so that a caller may keep (out, lse) and never run the forward kernel again. Causal
masks are aligned bottom-right: the last query of a document sees its last key. With a sliding window a query sees
itself and the window - 1 tokens before it, as transformers counts it.

Letters: T packed tokens, H query heads, K kv heads, E head dim.
"""

from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import DocumentBounds
from . import short, varlen
from .document import (
    CPU,
    CUDNN,
    CUDNN_ELEMENTS,
    REFERENCE,
    InputGradients,
    Inputs,
    PackKernel,
    Results,
    by_document,
    document_runs,
)

VARLEN = ("flash4", "torch")  # on a GPU; the other kernels work document by document
HOPPER = 9  # the major compute capability of Hopper GPUs
HALF = (torch.float16, torch.bfloat16)
# cuDNN makes a plan for each length, which takes the host 0.1 s (forward and backward): as long as the layers of an 8B
# model gain by it with a document of 8,192 tokens. It pays where the length will come again, as that of rows cut to one
# length does, or where there are so many scores of queries and keys.
RECURRING = 512  # lengths that are multiples of it come again
LONG_SCORES = 16384**2
MOST_RUNS = 4  # calls for more runs of documents would wait for the host


class Limits(NamedTuple):
    """The cases that a kernel computes.

    capabilities: the major compute capabilities of the GPUs that it runs on; empty if it needs no GPU.
    head_dims: the head dims that it computes on a GPU, in half precision; empty if it computes every case.
    hopper_head_dims: further head dims that it computes on Hopper.
    """

    capabilities: Collection[int] = ()
    head_dims: Collection[int] = ()
    hopper_head_dims: Collection[int] = ()


# Fastest first. H200, causal, head dim 128, 32k to 128k tokens, forward / backward TFLOP/s: flash4 640-734 / 591-608,
# cudnn 560-656 / 530-552, torch 330-357 / 315-324. Milliseconds of 16 documents of 1,024 tokens, 32 query and 8 kv
# heads: cudnn 0.288 / 1.114, torch 0.610 / 1.790.
# flash4 4.0.0b36 on H200: gradients right for these head dims (2e-3 in bfloat16), wrong by 110% for heads of 8 and 16.
KERNELS = {
    "flash4": Limits(range(9, 12), (32, 64, 128), (192, 256)),
    "cudnn": Limits(range(9, 100), range(8, 129, 8), range(136, 257, 8)),
    "torch": Limits((), range(8, 257, 8)),
    "reference": Limits(),
}


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
    window: int | None = None,
) -> KernelChoice:
    """Check a requested kernel, or find the fastest one for "auto"; every rank decides the same.

    Under torch.use_deterministic_algorithms the kernel is one that repeats its results bit for bit. "auto" leaves cuDNN
    to torch, which knows the documents. `window` is a sliding window that cuts a document.
    Raises ValueError if the kernel is unknown or cannot compute this case here.
    """
    device = torch.device(device)
    case = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"
    check_name(name)
    candidates, why = [name], "as requested,"
    if name == "auto":
        candidates, why = [k for k in KERNELS if k != "cudnn"], "fastest"
    objections: list[str] = []
    for candidate in candidates:
        objection = _why_not(candidate, device, dtype, head_dim, window)
        if objection is None:
            return KernelChoice(candidate, "; ".join([f"{why} for {case}", *objections]))
        objections.append(objection)
    raise ValueError(
        f"attention kernel {name} cannot run here ({case}): {objections[0]}; set another kernel or auto"
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
    module = varlen.flash4()
    return f"flash4 cannot be imported ({module})" if isinstance(module, str) else None


def _why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None
) -> str | None:
    """Tell why the kernel cannot compute this case here; None if it can."""
    if missing := why_missing(name, device):
        return missing
    limits = KERNELS[name]
    if not limits.head_dims or device.type != "cuda":
        return None
    if dtype not in HALF:
        return f"{name} needs float16 or bfloat16"
    if name == "cudnn" and window:
        return f"cudnn has no sliding window, and the model has one of {window} tokens"
    head_dims = [*limits.head_dims]
    if torch.cuda.get_device_capability(device)[0] == HOPPER:
        head_dims += limits.hopper_head_dims
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


# --- forward and backward ----------------------------------------------------------------------------------------


def is_worth_plans(documents: DocumentBounds) -> bool:
    """Return whether cuDNN's plans for these documents pay; those in which it has no part make none."""
    if documents.on_host is None:
        return False
    runs = [*islice(document_runs(documents), MOST_RUNS + 1)]
    plans = [run for run in runs if min(run.rows, run.keys) >= CUDNN.shortest]
    return (
        0 < len(plans)
        and len(runs) <= MOST_RUNS
        and all(
            run.rows % RECURRING == run.keys % RECURRING == 0
            or run.rows * run.keys >= LONG_SCORES
            for run in plans
        )
    )


# What runs on a pack, by name. "torch" is torch's kernel on a GPU, "cpu" the one on a CPU.
PACK_KERNELS = {
    "flash4": PackKernel(varlen.flash4_forward, varlen.flash4_backward),
    "torch": PackKernel(varlen.torch_forward, varlen.torch_backward),
    "short": PackKernel(short.forward, short.backward),
    "cudnn": by_document(CUDNN),
    "cpu": by_document(CPU),
    "reference": by_document(REFERENCE),
}


def _kernel_for(name: str, inputs: Inputs, documents: DocumentBounds) -> str:
    """Return which of PACK_KERNELS computes this call when the kernel of that name was chosen."""
    q = inputs.q
    if not q.is_cuda:
        return "cpu" if name == "torch" else name
    if q.numel() >= CUDNN_ELEMENTS:
        name = "torch" if name == "cudnn" else name
    elif name == "torch" and is_worth_plans(documents):
        if not _why_not("cudnn", q.device, q.dtype, q.shape[-1], inputs.window):
            name = "cudnn"
    return "short" if name in VARLEN and short.usable(inputs, documents) else name


def kernel_forward(name: str, inputs: Inputs, documents: DocumentBounds) -> Results:
    """Run a kernel's forward on every document."""
    return PACK_KERNELS[_kernel_for(name, inputs, documents)].forward(inputs, documents)


def kernel_backward(
    name: str, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, documents: DocumentBounds
) -> InputGradients:
    """Run a kernel's backward on every document; out and lse may be joint ones of further keys."""
    kernel = PACK_KERNELS[_kernel_for(name, inputs, documents)]
    return kernel.backward(dout, inputs, out, lse, documents)
