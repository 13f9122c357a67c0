"""Every kernel of this machine against plain float64 attention: values, gradients, packing, refusals."""

import warnings
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests import rows_of
from ulysses.parallel.attention import prove_kernel
from ulysses.parallel.kernels import choice as kernels
from ulysses.parallel.kernels import document as kernels_document
from ulysses.parallel.kernels import short as kernels_short
from ulysses.parallel.kernels.choice import (
    KERNELS,
    kernel_backward,
    kernel_forward,
    resolve_kernel,
)
from ulysses.parallel.kernels.document import ONE_DOCUMENT, Inputs
from ulysses.parallel.layout import DocumentBounds

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}

PACKS = {  # lengths of queries, lengths of keys
    "ragged": ([5, 1, 130, 1, 1, 333, 64],) * 2,
    "one": ([257],) * 2,
    "short": ([5, 1, 60],) * 2,
    "late rows": ([60, 1, 33], [200, 7, 33]),
    "equal": ([64, 64, 64, 9],) * 2,
    "equal late rows": ([64, 64], [200, 200]),
}


@pytest.fixture(params=[True, False], ids=["causal", "full"])
def causal(request):
    return request.param


@pytest.fixture
def torch_switch():
    """Leave torch's switch for deterministic algorithms off."""
    yield
    torch.use_deterministic_algorithms(False)


def naive(q, k, v, lengths, causal, scale, window=None, sink=None):
    """Unfused attention, one document at a time, whole score matrices; the mask is transformers' sliding_window."""
    outs, group = [], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).split(lengths[1]) for x in (k, v))
    for query, key, value in zip(q.split(lengths[0]), k, v):
        scores = torch.einsum("qhe,khe->hqk", query, key) * scale
        if causal:
            q_idx = torch.arange(len(key) - len(query), len(key))[:, None]
            kv_idx = torch.arange(len(key))
            seen = (kv_idx <= q_idx) & (kv_idx > q_idx - (window or len(key)))
            scores = scores.masked_fill(~seen, -torch.inf)
        if sink is not None:
            extra = sink[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1)[..., : len(key)]
        outs.append(torch.einsum("hqk,khe->qhe", weights, value))
    return torch.cat(outs)


def document_bounds(lengths, device="cpu"):
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in lengths)
    return DocumentBounds(cu_q.to(device), cu_k.to(device), max(lengths[0]), max(lengths[1]))


def attended(kernel, upstream, inputs, packed):
    """The kernel's log-sum-exp, output and gradients."""
    out, lse = kernel_forward(kernel, inputs, packed)
    return lse, out, *kernel_backward(kernel, upstream, inputs, out, lse, packed)


def assert_near(kernel, found, wanted, tolerance):
    for name, *both in zip(("out", "dq", "dk", "dv"), found, wanted):
        got, want = (x.cpu().double() for x in both)
        error = (got - want).norm() / (want.norm() or 1)  # under a window of 1 dq is 0
        assert error < tolerance, f"{kernel} {name}: {error:.2e}"


def check(
    kernel,
    device,
    dtype,
    lengths,
    heads,
    head_dim,
    causal=True,
    short=False,
    window=None,
    packed=None,
):
    options, packed = (causal, 0.3, window), packed or document_bounds(lengths, device)
    if short:  # one tensor for queries and keys, as plans have it
        packed = packed._replace(cu_k=packed.cu_q)
    rows, keys = map(sum, lengths)
    shapes = (rows, heads[0]), (keys, heads[1]), (keys, heads[1])
    exact = [torch.randn(*s, head_dim).to(dtype).double().requires_grad_() for s in shapes]
    upstream = torch.randn(rows, heads[0], head_dim).to(dtype)
    wanted = naive(*exact, lengths, *options)
    (wanted * upstream.double()).sum().backward()
    given = [x.detach().to(device, dtype) for x in exact]
    if lengths[0] == lengths[1]:  # strided views of one buffer, as the exchange hands them over
        given = torch.cat(given, 1).split([heads[0], heads[1], heads[1]], 1)
    inputs = Inputs(*given, *options)
    assert kernels_short.usable(inputs, packed) == short
    lse, *found = attended(kernel, upstream.to(device), inputs, packed)
    assert lse.shape == (heads[0], rows)
    assert_near(kernel, found, (wanted, *(x.grad for x in exact)), TOLERANCE[dtype])


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (6, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_kernel_equals_plain_attention_on_cpu(kernel, dtype, heads, pack, causal):
    check(kernel, "cpu", dtype, PACKS[pack], heads, head_dim=8, causal=causal)


@pytest.mark.parametrize("window", [1, 2, 7, 64, 129, 130, 500])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_a_query_sees_itself_and_the_tokens_of_its_window(kernel, pack, window):
    check(kernel, "cpu", torch.float64, PACKS[pack], (6, 2), head_dim=8, window=window)


@pytest.mark.parametrize("window", [3, 70])
def test_reference_tiles_meet_the_keys_of_their_windows_alone(monkeypatch, window):
    monkeypatch.setattr(kernels_document, "LEAST_ROWS", 16)
    shapes, plain = [], kernels_document._to_groups
    monkeypatch.setattr(
        kernels_document,
        "_to_groups",
        lambda x, key: shapes.append(x.shape[2]) or plain(x, key),
    )
    check("reference", "cpu", torch.float64, PACKS["ragged"], (6, 2), 8, window=window)
    assert max(shapes) == max(16, window)


@pytest.mark.parametrize(
    "lengths, is_worth",
    [
        ([1024] * 16, True),
        ([1024] * 16 + [3], True),  # with a tail
        ([1000] * 16, False),
        ([16384 + 7], True),
        ([16384 + 7, 20000, 9], True),
        ([16384 + 7, 900], False),
        ([512, 1024, 512, 1024, 512], False),
        ([20], False),
    ],
)
def test_cudnn_takes_documents_whose_plans_pay(lengths, is_worth):
    packed = document_bounds((lengths,) * 2)
    host = [packed.cu_q.tolist()] * 2
    assert not kernels.is_worth_plans(packed)  # bounds on the device are not waited for
    assert kernels.is_worth_plans(packed._replace(on_host=host)) == is_worth


@pytest.mark.parametrize(
    "elements, name, taken",
    [
        (2**31 - 1, "cudnn", "cudnn"),
        (2**31, "cudnn", "torch"),
        (2**31 - 1, "torch", "cudnn"),
        (2**31, "torch", "torch"),
        (2**31, "flash4", "flash4"),
        (2**31, "reference", "reference"),
    ],
)
@pytest.mark.usefixtures("torch_switch")
def test_cudnn_takes_no_call_for_which_its_gradients_are_wrong(
    monkeypatch, elements, name, taken
):
    machine_without(monkeypatch)
    packed = document_bounds(([1024] * 16,) * 2)
    packed = packed._replace(on_host=[packed.cu_q.tolist()] * 2)
    facts = {"is_cuda": True, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    query = SimpleNamespace(**facts, shape=(16384, 32, 128), numel=lambda: elements)
    inputs = Inputs(query, None, None, True, 0.3)
    assert kernels._kernel_for(name, inputs, packed) == taken
    torch.use_deterministic_algorithms(True)  # cuDNN's backward is not
    assert kernels._kernel_for("torch", inputs, packed) == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [([512] * 3 + [3],) * 2, ([512] * 2, [1536] * 2)])
@pytest.mark.parametrize("head_dim, heads", [(64, (7, 1)), (128, (8, 2)), (256, (4, 1))])
def test_documents_of_one_length_are_a_batch_for_cudnn(head_dim, heads, lengths, causal):
    packed = document_bounds(lengths, "cuda")
    known = packed._replace(on_host=(packed.cu_q.tolist(), packed.cu_k.tolist()))
    check("torch", "cuda", torch.bfloat16, lengths, heads, head_dim, causal, packed=known)
    rows = torch.zeros(1, *heads[:1], head_dim, device="cuda", dtype=torch.half)
    inputs = Inputs(rows, rows, rows, causal, 0.3)
    assert kernels._kernel_for("torch", inputs, known) == "cudnn"
    assert kernels._kernel_for("torch", inputs._replace(window=9), known) == "torch"


@pytest.mark.parametrize("pack", ["short", "late rows"])
def test_cudnn_leaves_short_documents_to_plain_math(pack, causal):
    check("cudnn", "cpu", torch.float64, PACKS[pack], (6, 2), 8, causal)


@pytest.mark.parametrize("pack", ["late rows", "one"])
def test_reference_tiles_do_not_change_the_result(monkeypatch, pack, causal):
    monkeypatch.setattr(kernels_document, "TILE_SCORES", 7 * 6 * 200)
    check("reference", "cpu", torch.float64, PACKS[pack], (6, 2), 8, causal)


def gpu_kernels():
    """The kernels that this machine can run on a GPU."""
    return [name for name in KERNELS if kernels.why_missing(name, torch.device("cuda")) is None]


def need(kernel):
    """Skip a kernel that this machine lacks; asked here and not while collecting, which must not start CUDA."""
    if kernel not in gpu_kernels():
        pytest.skip(f"{kernel} is not on this machine")


@pytest.mark.gpu
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    "head_dim, heads",
    [*product([32, 64, 128], [(4, 4), (7, 1), (8, 2)]), *product([192, 256], [(8, 2)])],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_plain_attention_on_gpu(kernel, heads, head_dim, pack, causal):
    need(kernel)
    check(kernel, "cuda", torch.bfloat16, PACKS[pack], heads, head_dim, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 2, 64, 129, 500])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim, heads", [(64, (8, 2)), (128, (7, 1)), (256, (4, 1))])
@pytest.mark.parametrize("kernel", kernels.VARLEN)
def test_windows_on_gpu(kernel, head_dim, heads, pack, window):
    need(kernel)
    check(kernel, "cuda", torch.bfloat16, PACKS[pack], heads, head_dim, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000, 4096])
@pytest.mark.parametrize(
    "head_dim, heads", [(64, (4, 1)), (128, (4, 1)), (192, (2, 1)), (256, (2, 1))]
)
def test_one_long_document_on_gpu(head_dim, heads, window):
    """It has a form of its own in flash4, and at head dim 256 the backward pass is cuDNN's."""
    need("flash4")
    lengths = [ONE_DOCUMENT + 65]
    check("flash4", "cuda", torch.bfloat16, (lengths,) * 2, heads, head_dim, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (8, 2)])
@pytest.mark.parametrize("kernel", kernels.VARLEN)
def test_short_documents_have_kernels_of_their_own(kernel, heads, head_dim):
    need(kernel)
    lengths = [1, 5, 64, 200, 512, 0]
    check(kernel, "cuda", torch.bfloat16, (lengths, lengths), heads, head_dim, short=True)


@pytest.mark.gpu
def test_prefixes_and_longer_documents_are_left_to_other_kernels():
    inputs = Inputs(*torch.zeros(3, 600, 2, 64, device="cuda", dtype=torch.half), True, 0.3)
    prefix = document_bounds(([5, 60], [500, 100]), "cuda")
    packed = document_bounds(([300, 300],) * 2, "cuda")
    packed = packed._replace(cu_k=packed.cu_q)
    asked = packed, prefix, packed._replace(max_q=513)
    assert [kernels_short.usable(inputs, x) for x in asked] == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256])
def test_what_auto_takes_for_any_head_dim_is_right(head_dim):
    given = torch.bfloat16, 7, 1, head_dim
    prove_kernel("auto", torch.device("cuda"), *given, windows=(None, 128, 4096))


@pytest.mark.parametrize(
    "name, factors",
    [("query", (1.03, 1, 1)), ("key", (1, torch.nan, 1)), ("value", (1, 1, 1.03))],
)
@pytest.mark.parametrize("window", [None, 4096])
def test_a_wrong_gradient_is_refused_by_name(monkeypatch, name, factors, window):

    def wrong(kernel, dout, inputs, *more):
        """Wrong under a window alone, or without one alone."""
        grads = kernel_backward(kernel, dout, inputs, *more)
        if kernel == "reference" or (inputs.window is None) != (window is None):
            return grads
        return [g * factor for g, factor in zip(grads, factors)]

    monkeypatch.setattr("ulysses.parallel.attention.kernel_backward", wrong)
    message = f"torch gives a wrong {name} gradient on cpu: .*; set model.attention to another"
    given = "torch", torch.device("cpu"), torch.bfloat16, 4, 2, 16
    with pytest.raises(FloatingPointError, match=message):
        prove_kernel(*given, windows=(window, None))
    torch.set_warn_always(True)
    with warnings.catch_warnings(action="error"):  # a program of the user's would show them
        prove_kernel(*given, windows=() if window is None else (None,))
    torch.set_warn_always(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "cudnn"])
@pytest.mark.usefixtures("torch_switch")
def test_deterministic_kernels_repeat_bit_for_bit(kernel):
    need(kernel)
    torch.use_deterministic_algorithms(True)
    resolve_kernel(kernel, "cuda", torch.bfloat16, 64)
    packed, options = document_bounds(([700, 1, 323],) * 2, "cuda"), (True, 0.125)
    q, dout, k, v = (
        torch.randn(1024, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 8, 2, 2)
    )
    inputs = Inputs(q, k, v, *options)
    first, *again = (attended(kernel, dout, inputs, packed) for _ in range(6))
    assert all(torch.equal(a, b) for grads in again for a, b in zip(first, grads))


def test_a_kernel_that_is_wrong_for_several_documents_at_once_is_refused(monkeypatch):
    machine_without(monkeypatch)

    def wrong(inputs):
        out, lse = kernels.CPU.forward(inputs)
        return out * (1.03 if len(out) > 1 else 1), lse

    batched = kernels.by_document(kernels.CPU._replace(forward=wrong))
    monkeypatch.setitem(kernels.PACK_KERNELS, "cudnn", batched)
    with pytest.raises(FloatingPointError, match="cudnn gives a wrong output on cpu"):
        prove_kernel("cudnn", torch.device("cpu"), torch.float32, 2, 1, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_two_to_the_31_elements(kernel):
    """What lies before, at and after that offset is what a call on one document computes."""
    need(kernel)
    if torch.cuda.get_device_properties(0).total_memory < 70e9:
        pytest.skip("needs a GPU of 80 GB")
    length, heads, head_dim = 1000, 32, 128
    across = 2**31 // (length * heads * head_dim)  # this document holds element 2^31 of q
    count, options = across + 20, (True, head_dim**-0.5)

    def run(count, q, k, v, dout):
        packed = document_bounds(([length] * count,) * 2, "cuda")
        return attended(kernel, dout, Inputs(q, k, v, *options), packed)

    shapes = [(count * length, h, head_dim) for h in (heads, 8, 8, heads)]
    given = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    lse, *found = run(count, *given)
    for document in (0, across, count - 1):
        at = slice(document * length, (document + 1) * length)
        alone_lse, *alone = run(1, *(x[at] for x in given))
        torch.testing.assert_close(lse[:, at], alone_lse, rtol=1e-4, atol=1e-4)
        assert_near(f"{kernel}, document {document}", [x[at] for x in found], alone, 5e-3)


def choice(name="auto", device="cuda", dtype=torch.bfloat16, head_dim=64, **more):
    return resolve_kernel(name, device, dtype, head_dim, **more)


def machine_without(monkeypatch, *absent, capability=kernels.HOPPER):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(
        kernels, "why_missing", lambda name, device: "absent" if name in absent else None
    )


@pytest.mark.parametrize(
    "warn_only, kernel, other, message",
    [
        (
            False,
            "torch",
            "cudnn",
            "cannot run here .*: cudnn's backward is not deterministic; set",
        ),
        (True, "reference", "torch", "deterministic only under"),
    ],
)
@pytest.mark.usefixtures("torch_switch")
def test_auto_is_deterministic_where_asked(monkeypatch, warn_only, kernel, other, message):
    """Without flash-attn; torch's own kernel looks at torch's switch, and ignores it where it only warns."""
    machine_without(monkeypatch, "flash4")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    assert choice().name == kernel
    with pytest.raises(ValueError, match=message):
        choice(other)


def test_auto_takes_the_fastest_kernel_by_measured_speeds_and_says_why(monkeypatch):
    name, reason = choice(device="cpu", dtype=torch.float64, head_dim=7)
    told = "fastest for float64, head dim 7; flash4 needs a GPU, the device is cpu"
    assert (name, reason) == ("torch", told)
    assert choice("reference", "cpu").reason == "as requested, for bfloat16, head dim 64"
    machine_without(monkeypatch)
    assert choice() == ("flash4", "fastest for bfloat16, head dim 64")
    assert [choice(head_dim=e).name for e in (16, 192, 256)] == ["torch", "flash4", "flash4"]
    assert choice(window=4096).name == "flash4"
    assert choice(dtype=torch.float32).name == "reference"
    machine_without(monkeypatch, "flash4")
    assert choice().name == choice(window=4096).name == "torch"


REFUSED = """
name=flash4 device=cpu => flash4 needs a GPU, the device is cpu; set another kernel or auto
name=cudnn device=cpu => cudnn needs a GPU, the device is cpu; set another kernel or auto
name=flash3 => 'flash3' is unknown; set auto, flash4, cudnn, torch, reference
name=flash4 dtype=torch.float32 => flash4 needs float16 or bfloat16
name=cudnn head_dim=264 => a multiple of 8 and at most 256
name=cudnn window=128 => cudnn has no sliding window, .* of 128 tokens; set
name=flash4 head_dim=96 => for head dims 32, 64, 128, 192, 256
"""


@pytest.mark.parametrize("line, message", rows_of(REFUSED))
def test_kernels_that_cannot_run_are_refused_in_one_sentence(monkeypatch, line, message):
    given = (word.split("=") for word in line.split())
    asked = {k: v if k in ("name", "device") else eval(v) for k, v in given}
    if "device" not in asked:
        machine_without(monkeypatch)
    with pytest.raises(ValueError, match=message):
        choice(**asked)
