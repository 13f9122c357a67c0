"""Every kernel of this machine against plain float64 attention: values, gradients, packing, refusals."""

from types import ModuleType

import pytest
import torch

from ulysses.parallel import kernels
from ulysses.parallel.kernels import (
    KERNELS,
    Options,
    available_kernels,
    resolve_kernel,
    varlen_backward,
    varlen_forward,
)
from ulysses.parallel.layout import Segments

ON_CPU = [("reference", torch.float64), ("reference", torch.float32), ("reference", torch.bfloat16)]
ON_CPU += [("torch", torch.float64), ("torch", torch.float32), ("torch", torch.bfloat16)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}

PACKS = {  # lengths of queries, lengths of keys
    "ragged": ([5, 1, 130, 1, 1, 333, 64], [5, 1, 130, 1, 1, 333, 64]),
    "one": ([257], [257]),
    "late rows": ([60, 1, 33], [200, 7, 33]),
}


def naive(q, k, v, lengths, causal, scale, window):
    """Unfused attention, one document at a time, whole score matrices."""
    outs, at_q, at_k, group = [], 0, 0, q.shape[1] // k.shape[1]
    for nq, nk in zip(*lengths):
        query = q[at_q : at_q + nq]
        key, value = (x[at_k : at_k + nk].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhe,khe->hqk", query, key) * scale
        distance = torch.arange(nk) - (torch.arange(nq) + nk - nq)[:, None]
        hidden = (distance > 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (distance < -window[0]) | ((distance > window[1]) if window[1] >= 0 else False)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        outs.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), value))
        at_q, at_k = at_q + nq, at_k + nk
    return torch.cat(outs)


def segments(lengths, device):
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in lengths)
    bounds = cu_q.tolist(), cu_k.tolist()
    return Segments(cu_q.to(device), cu_k.to(device), max(lengths[0]), max(lengths[1]), bounds)


class VarlenAttention(torch.autograd.Function):
    """A kernel's forward and backward, joined for autograd: kernel, q, k, v, segments, options -> out, lse."""

    @staticmethod
    def forward(ctx, kernel, q, k, v, segments, options):
        out, lse = varlen_forward(kernel, q, k, v, segments, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = kernel, segments, options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        kernel, *call = ctx.arguments
        return None, *varlen_backward(kernel, dout, *ctx.saved_tensors, *call), None, None


def check(kernel, device, dtype, lengths, heads, head_dim, causal=True, window=None):
    draw = torch.Generator().manual_seed(0)
    options = Options(causal, 0.3, window)
    shapes = [(sum(lengths[0]), heads[0]), (sum(lengths[1]), heads[1]), (sum(lengths[1]), heads[1])]
    exact = [torch.randn(*s, head_dim, generator=draw).to(dtype).double().requires_grad_() for s in shapes]
    upstream = torch.randn(sum(lengths[0]), heads[0], head_dim, generator=draw).to(dtype)
    wanted = naive(*exact, lengths, causal, options.scale, window)
    (wanted * upstream.double()).sum().backward()
    # strided views of one buffer, as the exchange hands them over
    if lengths[0] == lengths[1]:
        buffer = torch.cat([x.detach() for x in exact], 1).to(device, dtype)
        given = buffer.split([heads[0], heads[1], heads[1]], 1)
    else:
        given = [x.detach().to(device, dtype) for x in exact]
    given = [x.requires_grad_() if x.is_leaf else x.detach().requires_grad_() for x in given]
    out, lse = VarlenAttention.apply(kernel, *given, segments(lengths, device), options)
    (out * upstream.to(device)).sum().backward()
    assert lse.shape == (heads[0], sum(lengths[0])) and not lse.requires_grad
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), (out, *(x.grad for x in given)), (wanted, *(x.grad for x in exact))
    ):
        error = (got.detach().cpu().double() - want).norm() / want.norm()
        assert error < TOLERANCE[dtype], f"{kernel} {name}: {error:.2e}"


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (6, 2)])
@pytest.mark.parametrize(("kernel", "dtype"), ON_CPU)
def test_kernel_equals_plain_attention_on_cpu(kernel, dtype, heads, pack):
    check(kernel, "cpu", dtype, PACKS[pack], heads, head_dim=8)


@pytest.mark.parametrize(("kernel", "dtype"), ON_CPU[:2] + ON_CPU[3:5])
def test_kernel_without_causal_on_cpu(kernel, dtype):
    check(kernel, "cpu", dtype, PACKS["ragged"], (4, 2), 16, causal=False)


@pytest.mark.parametrize("pack", [([5, 1, 60], [5, 1, 60]), ([60, 1, 33], [200, 7, 33])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cudnn_leaves_short_documents_to_plain_math(dtype, pack):
    check("cudnn", "cpu", dtype, pack, (6, 2), 8)
    check("cudnn", "cpu", dtype, pack, (6, 2), 8, causal=False)


@pytest.mark.parametrize("window", [(1, -1), (3, -1), (16, 4), (-1, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_reference_window(window, causal):
    if window[0] < 0:
        window = (10**6, window[1])
    check("reference", "cpu", torch.float64, PACKS["ragged"], (4, 2), 8, causal, window)


def need(kernel):
    """Skip a kernel that this machine lacks; asked here and not while collecting, which must not start CUDA."""
    if kernel not in available_kernels("cuda"):
        pytest.skip(f"{kernel} is not on this machine")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (8, 2)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_plain_attention_on_gpu(kernel, heads, head_dim, pack, causal):
    need(kernel)
    check(kernel, "cuda", torch.bfloat16, PACKS[pack], heads, head_dim, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 80, 96, 128, 256])
def test_what_auto_takes_for_any_head_dim_is_right(head_dim):
    for documents in (None, 1):
        name = resolve_kernel("auto", "cuda", torch.bfloat16, head_dim, documents=documents).name
        kernels.prove_kernel(name, torch.device("cuda"), torch.bfloat16, 7, 1, head_dim)


def test_all_kernels_that_a_setting_may_take_are_named(monkeypatch):
    monkeypatch.setattr(kernels, "_missing", lambda name, device: "absent" if name.startswith("flash") else None)
    case = torch.device("cuda"), torch.bfloat16, 64
    assert kernels.kernels_of("auto", *case, deterministic=False) == ["torch", "cudnn"]
    assert kernels.kernels_of("cudnn", *case, deterministic=False) == ["cudnn"]
    assert kernels.kernels_of("auto", *case, deterministic=True) == ["reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_right_kernels_prove_themselves(name, dtype):
    kernels.prove_kernel(name, torch.device("cpu"), dtype, 4, 2, 16)


@pytest.mark.parametrize(("index", "name"), enumerate(("query", "key", "value")))
@pytest.mark.parametrize("factor", [1.03, torch.nan])
def test_a_wrong_gradient_is_refused_by_name(monkeypatch, index, name, factor):
    real = kernels.varlen_backward

    def wrong(kernel, *arguments):
        grads = list(real(kernel, *arguments))
        if kernel == "torch":
            grads[index] = grads[index] * factor
        return tuple(grads)

    monkeypatch.setattr(kernels, "varlen_backward", wrong)
    with pytest.raises(FloatingPointError, match=f"kernel torch gives a wrong {name} gradient on cpu .*; set model.attention to another"):
        kernels.prove_kernel("torch", torch.device("cpu"), torch.bfloat16, 4, 2, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "cudnn"])
def test_kernel_window_on_gpu(kernel):
    need(kernel)
    check(kernel, "cuda", torch.bfloat16, PACKS["ragged"], (8, 2), 64, True, (50, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "cudnn"])
def test_deterministic_kernels_repeat_bit_for_bit(kernel):
    need(kernel)
    torch.use_deterministic_algorithms(True)
    try:
        resolve_kernel(kernel, "cuda", torch.bfloat16, 64, deterministic=True)
        lengths = ([700, 1, 323], [700, 1, 323])
        q, dout = (torch.randn(1024, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(1024, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        options = Options(True, 0.125, None, deterministic=True)
        out, lse = varlen_forward(kernel, q, k, v, segments(lengths, "cuda"), options)
        first = varlen_backward(kernel, dout, q, k, v, out, lse, segments(lengths, "cuda"), options)
        for _ in range(5):
            again = varlen_backward(kernel, dout, q, k, v, out, lse, segments(lengths, "cuda"), options)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("warn_only", "kernel"), [(False, "torch"), (True, "reference")])
def test_auto_is_deterministic_where_asked(monkeypatch, warn_only, kernel):
    """Without flash-attn; torch's own kernel looks at torch's switch, and ignores it where it only warns."""
    monkeypatch.setattr(kernels, "_missing", lambda name, device: "absent" if name.startswith("flash") else None)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        choice = resolve_kernel("auto", "cuda", torch.bfloat16, 64, deterministic=True, documents=1)
        assert choice.name == kernel and "cudnn's backward is not deterministic" in choice.reason
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_kernels_are_told_to_be_deterministic(monkeypatch):
    told = {}

    class Flash:
        @staticmethod
        def _flash_attn_varlen_backward(*_, **options):
            told["flash2"] = options["deterministic"]

        @staticmethod
        def _flash_attn_bwd(*_, **options):
            told["flash4"] = options["deterministic"]

    monkeypatch.setattr(kernels, "_flash2", Flash)
    monkeypatch.setattr(kernels, "_flash4", Flash)
    q, k = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    packed = segments(([6], [6]), "cpu")
    for deterministic in (True, False):
        for name in ("flash2", "flash4"):
            varlen_backward(name, q, q, k, k, q, torch.ones(4, 6), packed, Options(True, 0.5, deterministic=deterministic))
        assert told == {"flash2": deterministic, "flash4": deterministic}


def test_flash4_backward_reads_a_table_of_ours_and_its_module_stays_as_it_is(monkeypatch):
    flash4 = ModuleType("flash4")
    exec(  # a module with its own globals, as flash4's functions have
        """
asked = []

def _tile_size_bwd_sm90(head_dim, head_dim_v, causal, local, sparse_block_size_q=None):
    return 64 if causal or local else 80

def _flash_attn_bwd(q, k, v, out, dout, lse, scale, causal=False, *, window_size_left=None, deterministic=False, **rest):
    local = window_size_left is not None
    asked.append(_tile_size_bwd_sm90(q.shape[-1], v.shape[-1], causal and not local, local, sparse_block_size_q=None))
""",
        flash4.__dict__,
    )
    before = dict(vars(flash4))
    monkeypatch.setattr(kernels, "_flash4", lambda: flash4)
    packed = segments(([6], [6]), "cpu")
    cases = [(128, Options(True, 0.5)), (128, Options(True, 0.5, deterministic=True)), (128, Options(True, 0.5, (3, 0))),
             (128, Options(False, 0.5)), (64, Options(True, 0.5))]  # fmt: skip
    for head_dim, options in cases:
        q, k = torch.ones(6, 4, head_dim), torch.ones(6, 2, head_dim)
        varlen_backward("flash4", q, q, k, k, q, torch.ones(4, 6), packed, options)
    assert flash4.asked == [80, 64, 64, 80, 64]
    assert dict(vars(flash4)) == before


def test_reference_gradients_by_finite_differences():
    q, k, v = (torch.randn(7, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    packed = segments(([1, 4, 2], [1, 4, 2]), "cpu")
    torch.autograd.gradcheck(lambda *x: VarlenAttention.apply("reference", *x, packed, Options(True, 0.5))[0], (q, k, v))


def test_reference_tiles_do_not_change_the_result(monkeypatch):
    from ulysses.parallel import kernels_document

    q, k, v = (torch.randn(50, h, 4, dtype=torch.float64) for h in (4, 2, 2))
    packed, options = segments(([20, 30], [20, 30]), "cpu"), Options(True, 0.5, (9, -1))
    out, lse = varlen_forward("reference", q, k, v, packed, options)
    grads = varlen_backward("reference", out, q, k, v, out, lse, packed, options)
    monkeypatch.setattr(kernels_document, "TILE_SCORES", 7 * 4 * 30)
    tiled, tiled_lse = varlen_forward("reference", q, k, v, packed, options)
    tiled_grads = varlen_backward("reference", out, q, k, v, tiled, tiled_lse, packed, options)
    for a, b in zip((out, lse, *grads), (tiled, tiled_lse, *tiled_grads)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_backward_never_runs_the_forward_kernel(monkeypatch):
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    out, _ = VarlenAttention.apply("torch", q, k, v, segments(([4, 5], [4, 5]), "cpu"), Options(True, 0.5))
    monkeypatch.setattr(kernels, "varlen_forward", None)
    monkeypatch.setattr(kernels.by_document, "cpu_forward", None)
    out.sum().backward()
    assert q.grad is not None


def test_auto_takes_the_fastest_exact_kernel_and_says_why():
    assert resolve_kernel("auto", "cpu", torch.float32, 64).name == "torch"
    choice = resolve_kernel("auto", "cpu", torch.float64, 7, window=(3, 0))
    assert choice.name == "reference" and "torch's CPU kernel knows no window" in choice.reason
    assert resolve_kernel("reference", "cpu", torch.float32, 64).reason.endswith("as requested")


def test_kernels_that_cannot_run_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="flash3 is not supported; set flash4"):
        resolve_kernel("flash3", "cpu", torch.bfloat16, 64)
    with pytest.raises(ValueError, match=r"'flash5' is unknown; set auto, flash4, cudnn, flash2, torch, reference"):
        resolve_kernel("flash5", "cpu", torch.bfloat16, 64)
    for name in ("flash2", "flash4", "cudnn"):
        with pytest.raises(ValueError, match=f"{name} needs a GPU, the device is cpu; set another kernel or auto"):
            resolve_kernel(name, "cpu", torch.bfloat16, 64)
    with pytest.raises(ValueError, match="knows no window"):
        resolve_kernel("torch", "cpu", torch.float32, 64, window=(128, 0))


def test_gpu_limits_are_checked_without_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "_missing", lambda name, device: None)
    with pytest.raises(ValueError, match="flash4 needs float16 or bfloat16"):
        resolve_kernel("flash4", "cuda", torch.float32, 64)
    with pytest.raises(ValueError, match="a multiple of 8 and at most 128"):
        resolve_kernel("cudnn", "cuda", torch.bfloat16, 256)
    for head_dim in (8, 16, 96, 256):
        with pytest.raises(ValueError, match="flash4 is for head dims 32, 64, 128, where its gradients are known to be right; set"):
            resolve_kernel("flash4", "cuda", torch.bfloat16, head_dim)
    assert resolve_kernel("auto", "cuda", torch.bfloat16, 16).name == "flash2"
    with pytest.raises(ValueError, match="deterministic only under"):
        resolve_kernel("torch", "cuda", torch.bfloat16, 64, deterministic=True)
    with pytest.raises(ValueError, match="attention kernel cudnn cannot run here .*: cudnn's backward is not deterministic; set another"):
        resolve_kernel("cudnn", "cuda", torch.bfloat16, 64, deterministic=True)
    assert resolve_kernel("auto", "cuda", torch.bfloat16, 256).name == "flash2"
    assert resolve_kernel("auto", "cuda", torch.float32, 64).name == "reference"
    assert resolve_kernel("auto", "cuda", torch.bfloat16, 128, documents=1).name == "flash4"
    monkeypatch.setattr(kernels, "_missing", lambda name, device: "absent" if name == "flash4" else None)
    for documents, name in ((1, "cudnn"), (2, "cudnn"), (3, "flash2"), (None, "flash2")):  # the order of measured speeds
        assert resolve_kernel("auto", "cuda", torch.bfloat16, 128, documents=documents).name == name
    monkeypatch.setattr(kernels, "_missing", lambda name, device: "absent" if name.startswith("flash") else None)
    assert resolve_kernel("auto", "cuda", torch.bfloat16, 128, documents=1).name == "cudnn"
    assert resolve_kernel("auto", "cuda", torch.bfloat16, 128, documents=9).name == "torch"
