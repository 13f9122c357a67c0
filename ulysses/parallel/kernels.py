"""Varlen attention kernels behind one call, and the choice among them.

    attention stage  -->  varlen_forward(kernel, q, k, v, segments)  -->  out [T, H, E], lse [H, T]
                          varlen_backward(kernel, dout, q, k, v, out, lse, segments)  -->  dq, dk, dv

    reference   plain matrix products, any device, dtype, head dim and window; float64 too; the measure of the others
    torch       torch's own flash attention: varlen on GPU, document by document on CPU
    flash2      flash-attn 2.x (Ampere and newer)
    cudnn       cuDNN's fused attention, document by document: for packs of few long documents (Hopper and newer)
    flash4      flash-attn 4 (`flash_attn.cute`; Hopper and Blackwell)

Forward and backward are separate, so that a caller may keep (out, lse) and never run the forward kernel again. Causal
is bottom-right: the last query of a document sees its last key.

Letters: T packed tokens, H query heads, K kv heads, E head dim.
"""

import functools
import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels_document as by_document
from .kernels_document import Window, visible
from .layout import Segments

# Fastest first. H200, causal, head dim 128, 32k to 128k tokens, forward / backward TFLOP/s: flash4 640-734 / 591-608,
# cudnn 560-656 / 530-552 (one long document), flash2 and torch 330-357 / 315-324.
KERNELS = ("flash4", "cudnn", "flash2", "torch", "reference")
HALF = (torch.float16, torch.bfloat16)
# flash4 4.0.0b36 on H200: gradients right for these (2e-3 in bfloat16), wrong by 110% for heads of 8 and 16
FLASH4_HEAD_DIMS = (32, 64, 128)
PROOF = (
    129,
    1,
    300,
)  # lengths of prove_kernel's documents: several tiles, none of them full, and a single token
PROOF_ERROR = 2e-2  # of a tensor's norm; half-precision kernels come to 2e-3 to 4e-3


class KernelChoice(NamedTuple):
    """A kernel's name, and why it was taken: one sentence for the log."""

    name: str
    reason: str


class Options(NamedTuple):
    """What to compute: softmax(q k^T * scale) v, masked by `causal` and `window` (left, right; -1 = no limit)."""

    causal: bool
    scale: float
    window: Window | None = None
    deterministic: bool = False


def available_kernels(device: torch.device | str) -> list[str]:
    """Name the kernels that this machine can run on the device, fastest first."""
    return [name for name in KERNELS if _missing(name, torch.device(device)) is None]


def resolve_kernel(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: Window | None = None,
    deterministic: bool = False,
    documents: int | None = None,
) -> KernelChoice:
    """Check a requested kernel, or find the fastest exact one for "auto"; every rank decides the same.

    `documents` of a pack, if known, lets "auto" take cuDNN for a single long one. Raises ValueError: what was
    asked, what is required, what to change.
    """
    device = torch.device(device)
    case = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"

    def objection(candidate: str) -> str | None:
        missing = _missing(candidate, device)
        return missing or _unfit(candidate, device, dtype, head_dim, window, deterministic)

    if name == "auto":
        passed_over: list[str] = []
        for candidate in KERNELS:
            reason = objection(candidate)
            if (
                reason is None and candidate == "cudnn" and documents not in (1, 2)
            ):  # two: one and the tail
                reason = "cudnn is for packs of one document"
            if reason is None:
                return KernelChoice(
                    candidate, f"attention kernel {candidate} ({case}); " + "; ".join(passed_over)
                )
            passed_over.append(reason)
    if name == "flash3":
        raise ValueError(
            "attention kernel flash3 is not supported; set flash4, which runs on Hopper too, or auto"
        )
    if name not in KERNELS:
        raise ValueError(
            f"attention kernel {name!r} is unknown; set auto, {', '.join(KERNELS)} or give a callable"
        )
    reason = objection(name)
    if reason is not None:
        raise ValueError(
            f"attention kernel {name} cannot run here ({case}): {reason}; set another kernel or auto"
        )
    return KernelChoice(name, f"attention kernel {name} ({case}), as requested")


def _missing(name: str, device: torch.device) -> str | None:
    """Why this machine lacks the kernel."""
    if name in ("reference", "torch"):
        return None
    if device.type != "cuda":
        return f"{name} needs a GPU, the device is {device.type}"
    major = torch.cuda.get_device_capability(device)[0]
    needed = {"flash4": 9, "cudnn": 9, "flash2": 8}[name]
    if major < needed or (name == "flash4" and major > 11):
        return f"{name} does not run on compute capability {major}"
    if name == "cudnn":
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    module = {"flash4": "flash_attn.cute.interface", "flash2": "flash_attn.flash_attn_interface"}[
        name
    ]
    error = _load(module)[1]
    if (
        error is None
        and name == "flash2"
        and not hasattr(_flash2(), "_wrapped_flash_attn_varlen_forward")
    ):
        return "flash2 needs flash-attn 2.7 or newer"
    return None if error is None else f"{name} cannot be imported ({error})"


def _unfit(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: Window | None,
    deterministic: bool,
) -> str | None:
    """Why the kernel cannot compute this case."""
    left, right = visible(False, window)
    windowed = left is not None or right is not None
    if name == "reference":
        return None
    if name == "torch" and device.type != "cuda":
        return "torch's CPU kernel knows no window" if windowed else None
    if dtype not in HALF:
        return f"{name} needs float16 or bfloat16"
    if name == "flash4" and head_dim not in FLASH4_HEAD_DIMS:
        return f"flash4 is for head dims {', '.join(map(str, FLASH4_HEAD_DIMS))}, where its gradients are known to be right"
    limit = 128 if name == "cudnn" else 256
    if head_dim % 8 or head_dim > limit:
        return f"{name} needs a head dim that is a multiple of 8 and at most {limit}"
    if name == "cudnn" and windowed:
        return "cudnn knows no window"
    if name == "cudnn" and deterministic:
        return "cudnn's backward is not deterministic"
    strict = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if name == "torch" and deterministic and not strict:
        return "torch is deterministic only under torch.use_deterministic_algorithms(True), not with warn_only"
    return None


@functools.cache
def _load(module: str) -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(module), None
    except (
        ImportError,
        OSError,
        AttributeError,
        RuntimeError,
    ) as error:  # also a build for another torch or driver
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__


def _flash2() -> Any:
    return _load("flash_attn.flash_attn_interface")[0]


def _flash4() -> Any:
    return _load("flash_attn.cute.interface")[0]


@functools.cache
def _with_larger_tiles(flash4: Any) -> Callable[..., Any]:
    """Return flash4's backward as a function that reads a table of tiles of ours; flash4 itself stays as it is.

    On Hopper its table says 64 rows for causal attention with heads of 128 and 80 for other: on H200 80 are 2 to 3% faster for
    causal too (128k and 256k tokens: 597 and 614 TFLOP/s, 4.0.0b36), and it takes no argument for that.
    """
    backward, table = flash4._flash_attn_bwd, getattr(flash4, "_tile_size_bwd_sm90", None)
    if table is None or not isinstance(backward, FunctionType):
        return backward

    def larger(head_dim: int, head_dim_v: int, causal: bool, *rest: Any, **named: Any) -> Any:
        return table(head_dim, head_dim_v, causal and head_dim != 128, *rest, **named)

    names = {**backward.__globals__, "_tile_size_bwd_sm90": larger}
    ours = FunctionType(
        backward.__code__, names, backward.__name__, backward.__defaults__, backward.__closure__
    )
    ours.__kwdefaults__ = backward.__kwdefaults__
    return ours


def varlen_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
) -> tuple[Tensor, Tensor]:
    """Run a kernel's forward: q [Tq, H, E], k and v [Tk, K, E] -> out [Tq, H, E], lse [H, Tq] float32 or float64."""
    causal, scale, window, _ = options
    cu = segments.cu_q, segments.cu_k
    longest = (
        max(2, segments.max_q),
        segments.max_k,
    )  # flash kernels lay lse out differently when told 1
    left, right = visible(causal, window)
    if kernel == "reference":
        return by_document.reference_forward(
            q, k, v, segments, causal=causal, scale=scale, window=window
        )
    if kernel == "cudnn":
        return by_document.fused_forward(
            by_document.cudnn_forward, q, k, v, segments, causal=causal, scale=scale
        )
    if kernel == "torch" and not q.is_cuda:
        return by_document.fused_forward(
            by_document.cpu_forward, q, k, v, segments, causal=causal, scale=scale
        )
    if kernel == "torch":
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *cu, *longest, 0.0, causal, False,
            scale=scale, window_size_left=_or_minus_one(left), window_size_right=_or_minus_one(right),
        )  # fmt: skip
    elif kernel == "flash2":
        out, lse, *_ = _flash2()._flash_attn_varlen_forward(
            q, k, v, *cu, *longest, 0.0, scale,
            causal=causal, window_size_left=_or_minus_one(left), window_size_right=_or_minus_one(right),
        )  # fmt: skip
    elif kernel == "flash4":
        out, lse, *_ = _flash4()._flash_attn_fwd(
            q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=longest[0], max_seqlen_k=longest[1],
            softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right, return_lse=True,
        )  # fmt: skip
    else:
        raise ValueError(
            f"attention kernel {kernel!r} is unknown; resolve_kernel names the kernels"
        )
    return out, lse


def varlen_backward(
    kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Segments, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a kernel's backward from its saved out and lse: dq [Tq, H, E], dk and dv [Tk, K, E]."""
    causal, scale, window, deterministic = options
    cu = segments.cu_q, segments.cu_k
    longest = (
        max(2, segments.max_q),
        segments.max_k,
    )  # flash kernels lay lse out differently when told 1
    left, right = visible(causal, window)
    saved = dout, q, k, v, out, lse
    if kernel == "reference":
        return by_document.reference_backward(
            *saved, segments, causal=causal, scale=scale, window=window
        )
    if kernel == "cudnn":
        return by_document.fused_backward(
            by_document.cudnn_backward, *saved, segments, causal=causal, scale=scale
        )
    if kernel == "torch" and not q.is_cuda:
        return by_document.fused_backward(
            by_document.cpu_backward, *saved, segments, causal=causal, scale=scale
        )
    dout = dout.contiguous()
    if kernel == "torch":
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *cu, *longest, 0.0, causal, no_dropout, torch.empty(0, device=q.device),
            scale=scale, window_size_left=_or_minus_one(left), window_size_right=_or_minus_one(right),
        )  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if kernel == "flash2":
        _flash2()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, *cu, *longest, 0.0, scale,
            causal=causal, window_size_left=_or_minus_one(left), window_size_right=_or_minus_one(right),
            softcap=0.0, alibi_slopes=None, deterministic=deterministic,
        )  # fmt: skip
    elif kernel == "flash4":
        backward = _flash4()._flash_attn_bwd if deterministic else _with_larger_tiles(_flash4())
        backward(
            q, k, v, out, dout, lse, scale, causal, window_size_left=left, window_size_right=right,
            cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=longest[0], max_seqlen_k=longest[1],
            deterministic=deterministic, dq=dq, dk=dk, dv=dv,
        )  # fmt: skip
    else:
        raise ValueError(
            f"attention kernel {kernel!r} is unknown; resolve_kernel names the kernels"
        )
    return dq, dk, dv


def kernels_of(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool
) -> list[str]:
    """Name what `resolve_kernel` may take, whatever the pack: "auto" has another one for a single long document."""
    found = (
        resolve_kernel(name, device, dtype, head_dim, deterministic=deterministic, documents=n).name
        for n in (None, 1)
    )
    return list(dict.fromkeys(found))


def prove_kernel(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Compare a kernel's values and gradients on a small pack with plain attention in float64.

    Kernels are other projects' code, compiled for this GPU by this driver: a wrong gradient makes no noise. Raises
    FloatingPointError: which tensor is wrong, by how much, what to change.
    """
    draw = torch.Generator().manual_seed(0)
    tokens, cu = sum(PROOF), torch.tensor([0, *PROOF]).cumsum(0).int()
    segments = Segments(
        cu.to(device), cu.to(device), max(PROOF), max(PROOF), (cu.tolist(), cu.tolist())
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = Options(True, head_dim**-0.5, deterministic=deterministic)
    widths = (heads, kv_heads, kv_heads)
    buffer = torch.randn(tokens, sum(widths), head_dim, generator=draw).to(
        device, dtype
    )  # strided, as the exchange leaves them
    dout = torch.randn(tokens, heads, head_dim, generator=draw).to(device, dtype)

    def run(name: str, dout: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        q, k, v = buffer.split(widths, 1)
        out, lse = varlen_forward(name, q, k, v, segments, options)
        return out, lse, *varlen_backward(name, dout, q, k, v, out, lse, segments, options)

    found, exact = run(name, dout, buffer), run("reference", dout.double(), buffer.double())
    for what, got, wanted in zip(
        ("output", "log-sum-exp", "query gradient", "key gradient", "value gradient"), found, exact
    ):
        error = float((got.double() - wanted).norm() / wanted.norm())
        if not error < PROOF_ERROR:
            raise FloatingPointError(
                f"attention kernel {name} gives a wrong {what} on {device} ({heads}/{kv_heads} heads of {head_dim}, "
                f"{str(dtype).removeprefix('torch.')}): off by {error:.1%} of its norm; set model.attention to another "
                "kernel, or install another version of this one"
            )


def _or_minus_one(side: int | None) -> int:
    return -1 if side is None else side
