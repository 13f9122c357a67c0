"""linear_logprobs against the naive computation with whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

from losses import LogProbs, linear_logprobs
from tests.operations import Operations

M, D, V = 11, 6, 17
EVERYTHING = dict.fromkeys(("entropy", "lse", "mean_logit"), True)


def naive(hidden, weight, targets, temperature=1.0, bias=0.0):
    logits = (hidden @ weight.t() + bias) / temperature
    p = logits.softmax(-1)
    lse = torch.log(torch.exp(logits - logits.max()).sum(-1)) + logits.max()
    logps = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] - lse
    logps = logps.masked_fill(targets < 0, 0)
    return LogProbs(logps, -(p * (logits - lse[:, None])).sum(-1), lse, logits.mean(-1))


def inputs(m=M, d=D, v=V, dtype=torch.float64, seed=0, ignored=(3,)):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (m, v)
    )
    targets = torch.randint(v, (m,), generator=g)
    targets[[i for i in ignored if i < m]] = -100
    return hidden, weight, targets


def in_float64(*tensors):
    """Leaves of the same values."""
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_near(found, exact, tolerance, dtype):
    """Tensors of one dtype whose errors are measured by their size."""
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == dtype and (got.double() - want).norm() < tolerance * want.norm()


def assert_same_gradients(ours, theirs, inputs, upstream=None):
    """`upstream` are the gradients of the outputs, ones if left out."""
    found, exact = (grad(x, inputs, upstream, retain_graph=True) for x in (ours, theirs))
    assert_close(found, exact, rtol=1e-11, atol=1e-12)


def with_bias(hidden, weight, bias):
    """A bias is one more column: of ones in hidden, and its own in the weight."""
    ones = hidden.new_ones(len(hidden), 1)
    return torch.cat([hidden, ones], 1), torch.cat([weight, bias[:, None]], 1)


@pytest.mark.parametrize("tile_rows", [1, 4, M, 64, "auto"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_outputs_and_gradients_equal_naive(tile_rows, temperature):
    hidden, weight, targets = inputs()
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(M, generator=g, dtype=torch.float64) for _ in range(4)]
    given = with_bias(hidden, weight, bias)
    options = {"temperature": temperature, "tile_rows": tile_rows}
    ours = linear_logprobs(*given, targets, **EVERYTHING, **options)[:4]
    theirs = naive(hidden, weight, targets, temperature, bias)[:4]
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(ours, theirs, [hidden, weight, bias], upstream)


@pytest.mark.parametrize("which", ["logps", "entropy", "lse", "mean_logit"])
def test_each_output_alone_has_exact_gradients(which):
    given = inputs(seed=2)
    upstream = torch.randn(M, dtype=torch.float64)
    both = linear_logprobs(*given, **EVERYTHING, tile_rows=3), naive(*given)
    ours, theirs = (getattr(outputs, which) for outputs in both)
    assert_same_gradients(ours, theirs, given[:2], upstream)


@pytest.mark.parametrize("flags", [{}, {"entropy": True}, {"lse": True, "mean_logit": True}])
def test_gradcheck(flags):
    *tensors, targets = inputs(5, 3, 7, seed=3)

    def outputs(*tensors):
        found = linear_logprobs(*tensors, targets, tile_rows=2, temperature=1.3, **flags)
        return tuple(t for t in found if t is not None)

    assert gradcheck(outputs, tensors)


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 64])
def test_weight_gradient_follows_the_upstream_scale(scale):
    *tensors, targets = inputs(seed=4)
    unscaled, scaled = (
        grad(-linear_logprobs(*tensors, targets).logps.sum() * factor, tensors)
        for factor in (1, scale)
    )
    assert_close(scaled, tuple(x * scale for x in unscaled), rtol=1e-12, atol=0)


def test_no_rows_still_connect_both_inputs():
    hidden, weight, targets = inputs(0, ignored=())
    out = linear_logprobs(hidden, weight, targets, entropy=True)
    assert out.logps.shape == (0,) and out.entropy.shape == (0,)
    (out.logps.sum() + out.entropy.sum()).backward()
    assert hidden.grad.shape == (0, D) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_ignored_targets_give_zero_value_and_gradient():
    hidden, weight, targets = inputs()
    targets.fill_(-100)
    out = linear_logprobs(hidden, weight, targets)
    assert out.logps.tolist() == [0] * M
    out.logps.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_one_token():
    given = inputs(1, ignored=())
    assert_close(linear_logprobs(*given).logps, naive(*given).logps)


def test_huge_logits_stay_finite():
    hidden, weight, targets = inputs(ignored=())
    hidden = (hidden.detach().float() * 1e4).requires_grad_()
    weight = weight.detach().float().requires_grad_()
    out = linear_logprobs(hidden, weight, targets, entropy=True, lse=True)
    (out.logps.sum() + out.entropy.sum() + out.lse.sum()).backward()
    assert all(t.isfinite().all() for t in (*out[:3], hidden.grad, weight.grad))
    hidden, weight = in_float64(hidden, weight)
    exact = -F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    assert_close(out.logps.double(), exact, rtol=1e-6, atol=2e-2)


def test_tile_size_changes_nothing_beyond_rounding():
    *tensors, targets = inputs(64, 8, 50, torch.float32)

    def result(rows):
        out = linear_logprobs(*tensors, targets, tile_rows=rows).logps
        return out, *grad(out.sum(), tensors)

    for rows in (7, 64):
        assert_close(result(rows), result(1), rtol=2e-6, atol=2e-6)


def test_bfloat16_inputs_keep_float32_log_probabilities():
    """A bfloat16 log-softmax is off by whole units in such a sum; ours keeps float32 throughout."""
    g = torch.Generator().manual_seed(0)
    m, d, v = 256, 32, 16_032
    hidden = torch.randn(m, d, generator=g).bfloat16().requires_grad_()
    weight = (0.5 * torch.randn(v, d, generator=g)).bfloat16().requires_grad_()
    targets = torch.randint(v, (m,), generator=g)
    exact_inputs = in_float64(hidden, weight)
    logits = exact_inputs[0] @ exact_inputs[1].t()
    exact = -F.cross_entropy(logits, targets, reduction="sum")
    ours = linear_logprobs(hidden, weight, targets).logps
    assert ours.dtype == torch.float32
    assert abs(ours.double().sum() - exact) < 1e-3
    coarse = logits.bfloat16().log_softmax(-1).gather(1, targets[:, None]).double().sum()
    assert abs(coarse - exact) > 0.1  # what the rule protects from
    gradients = grad(ours.sum(), [hidden, weight])
    assert_near(gradients, grad(exact, exact_inputs), 3e-3, torch.bfloat16)


def emulate_wide_products(monkeypatch):
    """Give CPU what GPUs have: products of half-precision matrices that come out in float32."""
    plain_mm = torch.mm

    def mm(a, b, *, out_dtype=None):
        return plain_mm(a, b) if out_dtype is None else (a.float() @ b.float()).to(out_dtype)

    def addmm(total, a, b, *, out_dtype, out):
        assert a.dtype == torch.bfloat16 and out_dtype == out.dtype == torch.float32
        assert out is total
        return out.add_(a.float() @ b.float())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr("losses.logprobs.has_wide_products", lambda weight: True)


@pytest.mark.parametrize("flags", [{}, {"entropy": True, "lse": True}])
def test_half_precision_tiles_with_float32_products(monkeypatch, flags):
    emulate_wide_products(monkeypatch)
    hidden, weight, targets = inputs(40, 16, 300, torch.bfloat16)
    exact_inputs = in_float64(hidden, weight)
    outputs = linear_logprobs(hidden, weight, targets, tile_rows=16, **flags)
    upstream = torch.randn(40, dtype=torch.float64)
    pairs = zip(outputs, naive(*exact_inputs, targets))
    ours, exact = zip(*(pair for pair in pairs if pair[0] is not None))
    assert_close([x.double() for x in ours], [*exact], rtol=1e-6, atol=1e-5)
    got = grad(ours, [hidden, weight], [upstream.float()] * len(ours))
    want = grad(exact, exact_inputs, [upstream] * len(ours))
    assert_near(got, want, 5e-3, torch.bfloat16)


def test_bfloat16_weight_gradient_is_accumulated_in_float32():
    """Every tile adds less than half a bfloat16 unit of the total: bfloat16 accumulation would lose it."""
    rows = 512
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    given = torch.ones(rows, 1).bfloat16(), weight, torch.zeros(rows).long()
    logps = linear_logprobs(*given, tile_rows=1).logps
    assert grad(logps.sum(), weight)[0].flatten().tolist() == [rows / 2, -rows / 2]
    nll = linear_logprobs(*given, loss_weights=torch.ones(rows), tile_rows=1).nll
    assert grad(nll / 128, weight)[0].flatten().tolist() == [-rows / 256, rows / 256]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("flags", [{}, {"lse": True}, {"loss_weights": -torch.ones(1)}])
def test_confident_rows_keep_their_small_gradient(monkeypatch, wide, flags):
    """1 - p is far below a bfloat16 unit of p; it must not round to zero."""
    if wide:
        emulate_wide_products(monkeypatch)
    hidden = torch.tensor([[1.0]]).bfloat16().requires_grad_()
    weight = torch.tensor([[10.0], [0.0]]).bfloat16()
    out = linear_logprobs(hidden, weight, torch.tensor([0]), **flags)
    total = out.logps.sum() if out.nll is None else out.nll
    (total + 0.0 * sum(t.sum() for t in out if t is not None)).backward()
    want = 10 / (1 + torch.e**10)
    assert abs(hidden.grad.item() - want) < 1e-2 * want


def naive_nll(hidden, weight, targets, loss_weights, temperature=1.0):
    return -(naive(hidden, weight, targets, temperature).logps * loss_weights.double()).sum()


def random_weights(m=M, seed=1):
    """Some negative, some zero."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, generator=g) * (torch.rand(m, generator=g) < 0.8)


@pytest.mark.parametrize("tile_rows", [1, 4, M, "auto"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_nll_and_its_gradients_equal_naive(tile_rows, temperature):
    given, loss_weights = inputs(), random_weights()
    options = {"temperature": temperature, "tile_rows": tile_rows}
    ours = linear_logprobs(*given, loss_weights=loss_weights, **options)
    plain = linear_logprobs(*given, **options)
    theirs = naive_nll(*given, loss_weights, temperature)
    assert_close(ours.nll, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours.logps, plain.logps) and not ours.logps.requires_grad
    # another backward pass finds the gradients as they were
    for upstream in (1.0, 8 / 1234, -0.3, 0.0):
        assert_same_gradients(ours.nll * upstream, theirs * upstream, given[:2])


def test_gradcheck_of_nll():
    *tensors, targets = inputs(5, 3, 7, seed=3)
    options = {"loss_weights": random_weights(5), "tile_rows": 2, "temperature": 1.3}
    assert gradcheck(lambda *x: linear_logprobs(*x, targets, **options).nll ** 2, tensors)


def test_nll_of_tied_embeddings():
    _, weight, targets = inputs()
    tokens, loss_weights = targets.roll(1).clamp(min=0), random_weights()
    given = weight[tokens].tanh(), weight, targets
    ours = linear_logprobs(*given, loss_weights=loss_weights, tile_rows=4).nll
    assert_same_gradients(3 * ours, 3 * naive_nll(*given, loss_weights), weight)


@pytest.mark.parametrize("m", [0, M])
def test_nll_without_a_target_connects_both_inputs(m):
    hidden, weight, targets = inputs(m, ignored=range(m))
    out = linear_logprobs(hidden, weight, targets, loss_weights=torch.ones(m))
    assert out.nll == 0 and out.logps.shape == (m,) and not out.logps.any()
    (out.nll * 2).backward()
    assert hidden.grad.shape == (m, D) and not hidden.grad.any()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize(
    "trained, enabled, products",
    [
        ((True, True), True, 3),
        ((False, True), True, 2),
        ((True, False), True, 2),
        ((False, False), True, 1),
        ((True, True), False, 1),
    ],
)
def test_nll_computes_the_logits_once_and_no_gradient_that_is_not_needed(
    trained, enabled, products
):
    *tensors, targets = inputs()
    loss_weights, aten = random_weights(), torch.ops.aten
    want = grad(naive_nll(*tensors, targets, loss_weights), tensors)
    for x, needed in zip(tensors, trained):
        x.requires_grad_(needed)
    with Operations() as operations, torch.set_grad_enabled(enabled):
        nll = linear_logprobs(*tensors, targets, loss_weights=loss_weights, tile_rows=4).nll
        assert nll.requires_grad == (enabled and any(trained))
        if nll.requires_grad:
            nll.backward()
    made = map(operations.called.count, (aten.mm.default, aten.addmm_.default))
    assert sum(made) == 3 * products  # 3 tiles
    for x, needed, gradient in zip(tensors, trained, want):
        if enabled and needed:
            assert_close(x.grad, gradient)
        else:
            assert x.grad is None


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("upstream", [1 / 3, 1 + 2**-8])  # the second would round to 1
def test_bfloat16_gradients_of_nll(monkeypatch, wide, upstream):
    if wide:
        emulate_wide_products(monkeypatch)
    hidden, weight, targets = inputs(40, 16, 300, torch.bfloat16)
    exact_inputs = in_float64(hidden, weight)
    loss_weights = random_weights(40)
    ours = linear_logprobs(hidden, weight, targets, loss_weights=loss_weights, tile_rows=16).nll
    exact = naive_nll(*exact_inputs, targets, loss_weights)
    assert ours.dtype == torch.float32 and abs(ours - exact) < 1e-5 * abs(exact)
    got, want = grad(ours * upstream, [hidden, weight]), grad(exact * upstream, exact_inputs)
    assert_near(got, want, 5e-3 if wide else 3e-3, torch.bfloat16)


def test_parameter_data_may_be_replaced_between_forward_and_backward():
    """A partitioning engine frees the weight after forward and gathers it again, elsewhere, before backward."""
    weight, hidden = nn.Parameter(torch.randn(V, D)), torch.randn(M, D, requires_grad=True)
    targets, tensors = torch.randint(V, (M,)), (hidden, weight)
    want = grad(naive(*tensors, targets).logps.sum(), tensors)
    logps = linear_logprobs(*tensors, targets, tile_rows=4).logps
    full = weight.data.clone()
    weight.data = torch.empty(0)
    weight.data = full
    assert_close(grad(logps.sum(), tensors), want, rtol=1e-5, atol=1e-5)


def test_frozen_weight_and_frozen_hidden():
    hidden, weight, targets = inputs()
    want = grad(naive(hidden, weight, targets).logps.sum(), [hidden, weight])
    linear_logprobs(hidden, weight.detach(), targets).logps.sum().backward()
    assert_close(hidden.grad, want[0])
    assert weight.grad is None
    linear_logprobs(hidden.detach(), weight, targets).logps.sum().backward()
    assert_close(weight.grad, want[1])
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, targets).logps.requires_grad


def test_logits_never_exist_whole():
    """The largest tensor that autograd or the computation holds is one tile."""
    given = inputs(300, 4, 997, torch.float32)
    with Operations() as operations:
        linear_logprobs(*given, tile_rows=32, entropy=True).logps.sum().backward()
        linear_logprobs(*given, tile_rows=32, loss_weights=torch.ones(300)).nll.backward()
    tiles = [shape[0] for shape in operations.shapes if len(shape) == 2 and shape[1] == 997]
    assert max(tiles) == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden is \[2, 3, 4\]"),
        ({"targets": torch.zeros(3).long()}, r"must be int64 \[2\]"),
        ({"targets": torch.zeros(2)}, "torch.float32"),
        ({"targets": torch.tensor([0, 5])}, r"targets hold 5 but must lie in 0\.\.4"),
        ({"targets": torch.tensor([0, -1])}, "targets hold -1"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, "one floating dtype"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"tile_rows": 0}, "tile_rows is 0"),
        ({"tile_rows": "big"}, "tile_rows is 'big'"),
        ({"loss_weights": torch.ones(3)}, r"loss_weights are \[3\] but must be \[2\]"),
        (
            {"loss_weights": torch.ones(2), "lse": True},
            "gradient of nll alone; leave them out, or entropy, lse",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    hidden, weight, targets = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2).long()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "scale"), [(V, 1.0), (4096, 30.0), (9001, 1.0), (128256, 1.0)]
)
def test_gpu_tiles_equal_float64(dtype, vocabulary, scale):
    """Where only log-probabilities are asked for, tiles go through the kernels of logprobs_triton.py."""
    hidden, weight, targets = (x.detach().to("cuda") for x in inputs(m=300, v=vocabulary))
    hidden, weight = (
        (x * c).to(dtype).requires_grad_() for x, c in ((hidden, scale), (weight, 1))
    )
    upstream = torch.randn(300, generator=torch.Generator().manual_seed(1)).to("cuda")
    ours = linear_logprobs(hidden, weight, targets, lse=True, tile_rows=128)
    wide = in_float64(hidden, weight)
    theirs = naive(*wide, targets)
    assert_near((ours.logps, ours.lse), (theirs.logps, theirs.lse), 1e-6, torch.float32)
    exact = grad((theirs.logps * upstream.double()).sum(), wide)
    fused = linear_logprobs(hidden, weight, targets, loss_weights=-upstream, tile_rows=128)
    assert_close(fused.logps, ours.logps)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    for loss, factor in ((ours.logps * upstream).sum(), 1), (fused.nll / 3, 1 / 3):
        wanted = [x * factor for x in exact]
        assert_near(grad(loss, (hidden, weight)), wanted, tolerance, dtype)


@pytest.mark.gpu
def test_gpu_tiles_take_masked_words():
    """A bias of -inf rules words out; a kernel's first block may hold nothing else."""
    hidden, weight, _ = (x.detach().float().to("cuda") for x in inputs(v=9001))
    bias = torch.zeros(9001, device="cuda")
    bias[:8500] = -torch.inf
    targets = torch.full((M,), 9000, device="cuda")
    exact = torch.log_softmax(hidden.double() @ weight.double().t() + bias, -1)[:, 9000]
    found = linear_logprobs(*with_bias(hidden, weight, bias), targets)
    assert_close(found.logps.double(), exact, rtol=1e-5, atol=1e-5)
