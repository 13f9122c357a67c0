# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""The Triton kernel of logprobs.py, which reads a tile of float32 logits from memory once.

Shapes: R rows of the tile, V vocabulary. Row offsets are 64-bit. Without atomics every run gives the same bits.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

if triton is not None:

    @triton.jit
    def _log_softmax_at_kernel(
        logits, targets, target_logits, lse, logps, out, width, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0)
        offset = row.to(tl.int64) * width
        target = tl.load(targets + row)
        target_logit = tl.load(target_logits + row)
        top = target_logit
        others = 0.0  # sum of exp(x - top) over all tokens but the target
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offset + column, mask=column < width, other=-float("inf"))
            x = tl.where(column == target, -float("inf"), x)
            higher = tl.maximum(top, tl.max(x, axis=0))
            # while all tokens so far are masked, the maximum is -inf and cannot be subtracted
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            others = others * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
            top = higher
        total = others + tl.exp(target_logit - top)
        log_total = tl.log(total)
        tl.store(lse + row, top + log_total)
        tl.store(logps + row, target_logit - top - log_total)
        if out is not None:
            last = (width - 1) // BLOCK * BLOCK
            for start in range(0, width, BLOCK):  # backwards: the end was read last
                column = last - start + tl.arange(0, BLOCK)
                mask = column < width
                x = tl.load(logits + offset + column, mask=mask, other=0.0)
                p = tl.exp(x - top - log_total)
                # p - 1 would lose 1 - p where p is close to 1
                p = tl.where(column == target, -others / total, p)
                tl.store(out + offset + column, p.to(out.dtype.element_ty), mask=mask)


def log_softmax_at(
    logits: Tensor, targets: Tensor, lse: Tensor, logps: Tensor, dtype: torch.dtype | None
) -> Tensor | None:
    """Write each row's log-sum-exp into lse [R] and its target's log-probability into logps [R].

    The logits are float32 [R, V] on a GPU. With a `dtype`, return p - onehot(target) [R, V] in that dtype; if it is
    float32, the result overwrites the logits.
    """
    rows, width = logits.shape
    # gather reports a target outside the vocabulary; a kernel would read other memory
    target_logits = logits.gather(1, targets[:, None])
    out, size = None, {"BLOCK": 4096, "num_warps": 8}
    if dtype is not None:
        out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        # few rows at a time, so that a row is still in the cache when it is read again
        size = {"BLOCK": 16384, "num_warps": 16}
    with torch.cuda.device(logits.device):
        _log_softmax_at_kernel[(rows,)](
            logits, targets, target_logits, lse, logps, out, width, **size
        )
    return out
