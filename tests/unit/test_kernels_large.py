"""Kernels on more than 2^31 elements: what lies before, at and after that offset is what a small call computes."""

import pytest
import torch

from ulysses.parallel.kernels import KernelOptions, available_kernels, varlen_backward, varlen_forward
from ulysses.parallel.layout import Segments

CUDA = torch.cuda.is_available()
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1000, 32, 8, 128
DOCUMENTS = 2**31 // (LENGTH * HEADS * HEAD_DIM) + 20


def segments(count: int) -> Segments:
    bounds = [LENGTH * i for i in range(count + 1)]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    return Segments(cu, cu, LENGTH, LENGTH, (bounds, bounds))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_properties(0).total_memory < 70e9, reason="needs a GPU of 80 GB")
@pytest.mark.parametrize("kernel", available_kernels("cuda") if CUDA else [])
def test_more_than_two_to_the_31_elements(kernel: str) -> None:
    total, options = DOCUMENTS * LENGTH, KernelOptions(True, HEAD_DIM**-0.5)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(total, heads, HEAD_DIM, generator=draw, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    assert q.numel() > 2**31
    out, lse = varlen_forward(kernel, q, k, v, segments(DOCUMENTS), options)
    found = [out, *varlen_backward(kernel, dout, q, k, v, out, lse, segments(DOCUMENTS), options)]
    across = 2**31 // (LENGTH * HEADS * HEAD_DIM)  # this document holds element 2^31 of q
    for document in (0, across, DOCUMENTS - 1):
        at = slice(document * LENGTH, (document + 1) * LENGTH)
        alone, alone_lse = varlen_forward(kernel, q[at], k[at], v[at], segments(1), options)
        wanted = [alone, *varlen_backward(kernel, dout[at], q[at], k[at], v[at], alone, alone_lse, segments(1), options)]
        torch.testing.assert_close(lse[:, at], alone_lse, rtol=1e-4, atol=1e-4)
        for name, whole, part in zip(("out", "dq", "dk", "dv"), found, wanted):
            error = (whole[at].float() - part.float()).norm() / part.float().norm()
            assert error < 5e-3, f"{kernel} {name} of document {document} is off by {float(error):.1e}"
