"""linear_logprobs against the naive computation with whole logits."""

import pytest
import torch
from torch import nn

from losses import LogProbs, linear_logprobs

M, D, V = 11, 6, 17


def naive(hidden, weight, targets, temperature=1.0, bias=None):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits / temperature
    p = logits.softmax(-1)
    lse = torch.log(torch.exp(logits - logits.max()).sum(-1)) + logits.max()
    logps = torch.stack([row[max(t, 0)] for row, t in zip(logits, targets.tolist())]) - lse
    logps = torch.where(targets >= 0, logps, torch.zeros_like(logps))
    return LogProbs(logps, -(p * (logits - lse[:, None])).sum(-1), lse, logits.mean(-1))


def inputs(m=M, d=D, v=V, dtype=torch.float64, seed=0, ignored=(3,)):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(m, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(v, (m,), generator=g)
    for i in ignored:
        if i < m:
            targets[i] = -100
    return hidden, weight, targets


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
    ours = linear_logprobs(
        *with_bias(hidden, weight, bias),
        targets,
        entropy=True,
        lse=True,
        mean_logit=True,
        temperature=temperature,
        tile_rows=tile_rows,
    )
    theirs = naive(hidden, weight, targets, temperature, bias)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    ours_grad = torch.autograd.grad(ours[:4], [hidden, weight, bias], upstream)
    theirs_grad = torch.autograd.grad(theirs[:4], [hidden, weight, bias], upstream)
    for a, b in zip(ours_grad, theirs_grad):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("which", ["logps", "entropy", "lse", "mean_logit"])
def test_each_output_alone_has_exact_gradients(which):
    hidden, weight, targets = inputs(seed=2)
    upstream = torch.randn(M, dtype=torch.float64)
    ours = getattr(
        linear_logprobs(
            hidden, weight, targets, entropy=True, lse=True, mean_logit=True, tile_rows=3
        ),
        which,
    )
    theirs = getattr(naive(hidden, weight, targets), which)
    for a, b in zip(
        torch.autograd.grad(ours, [hidden, weight], upstream),
        torch.autograd.grad(theirs, [hidden, weight], upstream),
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("flags", [{}, {"entropy": True}, {"lse": True, "mean_logit": True}])
def test_gradcheck(flags):
    hidden, weight, targets = inputs(5, 3, 7, seed=3)
    assert torch.autograd.gradcheck(
        lambda h, w: tuple(
            t
            for t in linear_logprobs(h, w, targets, tile_rows=2, temperature=1.3, **flags)
            if t is not None
        ),
        (hidden, weight),
    )


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 64])
def test_weight_gradient_follows_the_upstream_scale(scale):
    hidden, weight, targets = inputs(seed=4)
    unscaled = torch.autograd.grad(
        -linear_logprobs(hidden, weight, targets).logps.sum(), [hidden, weight]
    )
    scaled = torch.autograd.grad(
        -linear_logprobs(hidden, weight, targets).logps.sum() * scale, [hidden, weight]
    )
    for a, b in zip(scaled, unscaled):
        torch.testing.assert_close(a, b * scale, rtol=1e-12, atol=0)


def test_no_rows_still_connect_both_inputs():
    hidden, weight, targets = inputs(0, ignored=())
    out = linear_logprobs(hidden, weight, targets, entropy=True)
    assert out.logps.shape == (0,) and out.entropy.shape == (0,)
    (out.logps.sum() + out.entropy.sum()).backward()
    assert hidden.grad.shape == (0, D) and torch.equal(
        weight.grad, torch.zeros(V, D, dtype=torch.float64)
    )


def test_ignored_targets_give_zero_value_and_gradient():
    hidden, weight, targets = inputs()
    targets.fill_(-100)
    out = linear_logprobs(hidden, weight, targets)
    assert torch.equal(out.logps, torch.zeros(M, dtype=torch.float64))
    out.logps.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_one_token():
    hidden, weight, targets = inputs(1, ignored=())
    torch.testing.assert_close(
        linear_logprobs(hidden, weight, targets).logps, naive(hidden, weight, targets).logps
    )


def test_huge_logits_stay_finite():
    hidden, weight, targets = inputs(ignored=())
    hidden = (hidden.detach().float() * 1e4).requires_grad_()
    weight = weight.detach().float().requires_grad_()
    out = linear_logprobs(hidden, weight, targets, entropy=True, lse=True)
    (out.logps.sum() + out.entropy.sum() + out.lse.sum()).backward()
    assert all(
        torch.isfinite(t).all()
        for t in (out.logps, out.entropy, out.lse, hidden.grad, weight.grad)
    )
    exact = (
        (hidden.detach().double() @ weight.detach().double().t())
        .log_softmax(-1)
        .gather(1, targets[:, None])[:, 0]
    )
    torch.testing.assert_close(out.logps.double(), exact, rtol=1e-6, atol=2e-2)


def test_tile_size_changes_nothing_beyond_rounding():
    hidden, weight, targets = inputs(64, 8, 50, torch.float64)
    results = []
    for rows in (1, 7, 64):
        out = linear_logprobs(hidden, weight, targets, tile_rows=rows).logps
        results.append((out, *torch.autograd.grad(out.sum(), [hidden, weight])))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bfloat16_inputs_keep_float32_log_probabilities():
    """A bfloat16 log-softmax is off by whole units in such a sum; ours keeps float32 throughout."""
    g = torch.Generator().manual_seed(0)
    m, d, v = 256, 32, 16_032
    hidden = torch.randn(m, d, generator=g).bfloat16().requires_grad_()
    weight = (0.5 * torch.randn(v, d, generator=g)).bfloat16().requires_grad_()
    targets = torch.randint(v, (m,), generator=g)
    exact_logits = hidden.detach().double() @ weight.detach().double().t()
    exact = exact_logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    ours = linear_logprobs(hidden, weight, targets).logps
    assert ours.dtype == torch.float32
    assert abs(ours.double().sum() - exact) < 1e-3
    coarse = exact_logits.bfloat16().log_softmax(-1).gather(1, targets[:, None]).double().sum()
    assert abs(coarse - exact) > 0.1  # what the rule protects from
    grad_hidden, grad_weight = torch.autograd.grad(ours.sum(), [hidden, weight])
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    difference = torch.zeros(m, v, dtype=torch.float64).scatter_(
        1, targets[:, None], 1.0
    ) - exact_logits.softmax(-1)
    for got, want in (
        (grad_hidden, difference @ weight.detach().double()),
        (grad_weight, difference.t() @ hidden.detach().double()),
    ):
        assert (got.double() - want).norm() < 3e-3 * want.norm()


def emulate_wide_products(monkeypatch):
    """Give CPU what GPUs have: products of half-precision matrices that come out in float32."""
    plain_mm = torch.mm

    def mm(a, b, *, out_dtype=None):
        return plain_mm(a, b) if out_dtype is None else (a.float() @ b.float()).to(out_dtype)

    def addmm(total, a, b, *, out_dtype, out):
        assert (
            a.dtype == torch.bfloat16
            and out_dtype == out.dtype == torch.float32
            and out is total
        )
        return out.add_(a.float() @ b.float())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr("losses.logprobs.has_wide_products", lambda weight: True)


@pytest.mark.parametrize("flags", [{}, {"entropy": True, "lse": True}])
def test_half_precision_tiles_with_float32_products(monkeypatch, flags):
    emulate_wide_products(monkeypatch)
    hidden, weight, targets = inputs(40, 16, 300, torch.bfloat16)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    ours, exact = (
        linear_logprobs(hidden, weight, targets, tile_rows=16, **flags),
        naive(*exact_inputs, targets),
    )
    upstream = torch.randn(40, dtype=torch.float64)
    pairs = [(a, b) for a, b in zip(ours, exact) if a is not None]
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)
    got = torch.autograd.grad(
        [a for a, _ in pairs], [hidden, weight], [upstream.float()] * len(pairs)
    )
    want = torch.autograd.grad([b for _, b in pairs], exact_inputs, [upstream] * len(pairs))
    for a, b in zip(got, want):
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() < 5e-3 * b.norm()


def test_bfloat16_weight_gradient_is_accumulated_in_float32():
    """Every tile adds less than half a bfloat16 unit of the total: bfloat16 accumulation would lose it."""
    rows = 512
    hidden = torch.ones(rows, 1).bfloat16()
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    logps = linear_logprobs(
        hidden, weight, torch.zeros(rows, dtype=torch.long), tile_rows=1
    ).logps
    (grad,) = torch.autograd.grad(logps.sum(), weight)
    assert grad.flatten().tolist() == [rows / 2, -rows / 2]
    targets = torch.zeros(rows, dtype=torch.long)
    nll = linear_logprobs(
        hidden, weight, targets, loss_weights=torch.ones(rows), tile_rows=1
    ).nll
    (grad,) = torch.autograd.grad(nll / 128, weight)
    assert grad.flatten().tolist() == [-rows / 256, rows / 256]


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
    hidden, weight, targets = inputs()
    loss_weights = random_weights()
    options = {"temperature": temperature, "tile_rows": tile_rows}
    ours = linear_logprobs(hidden, weight, targets, loss_weights=loss_weights, **options)
    plain = linear_logprobs(hidden, weight, targets, **options)
    theirs = naive_nll(hidden, weight, targets, loss_weights, temperature)
    torch.testing.assert_close(ours.nll, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours.logps, plain.logps) and not ours.logps.requires_grad
    for upstream in (
        1.0,
        8 / 1234,
        -0.3,
        0.0,
    ):  # another backward pass finds the gradients as they were
        got = torch.autograd.grad(ours.nll * upstream, [hidden, weight], retain_graph=True)
        want = torch.autograd.grad(theirs * upstream, [hidden, weight], retain_graph=True)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck_of_nll():
    hidden, weight, targets = inputs(5, 3, 7, seed=3)
    options = {"loss_weights": random_weights(5), "tile_rows": 2, "temperature": 1.3}
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, **options).nll ** 2, (hidden, weight)
    )


def test_nll_of_tied_embeddings():
    _, weight, targets = inputs()
    tokens, loss_weights = targets.roll(1).clamp(min=0), random_weights()
    ours = linear_logprobs(
        weight[tokens].tanh(), weight, targets, loss_weights=loss_weights, tile_rows=4
    ).nll
    theirs = naive_nll(weight[tokens].tanh(), weight, targets, loss_weights)
    got, want = (torch.autograd.grad(3 * loss, weight)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("m", [0, M])
def test_nll_without_a_target_connects_both_inputs(m):
    hidden, weight, targets = inputs(m, ignored=range(m))
    out = linear_logprobs(hidden, weight, targets, loss_weights=torch.ones(m))
    assert out.nll == 0 and out.logps.shape == (m,) and not out.logps.any()
    (out.nll * 2).backward()
    assert hidden.grad.shape == (m, D) and not hidden.grad.any()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("frozen", "products"), [((), 3), ((0,), 2), ((1,), 2), ((0, 1), 1), ("no_grad", 1)]
)
def test_nll_computes_the_logits_once_and_no_gradient_that_is_not_needed(frozen, products):
    *tensors, targets = inputs()
    loss_weights, made = random_weights(), 0
    want = torch.autograd.grad(naive_nll(*tensors, targets, loss_weights), tensors)

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal made
            made += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
            return func(*args, **(kwargs or {}))

    trained = [x for i, x in enumerate(tensors) if frozen != "no_grad" and i not in frozen]
    for x in tensors:
        x.requires_grad_(frozen == "no_grad" or any(x is y for y in trained))
    with Count(), torch.set_grad_enabled(frozen != "no_grad"):
        nll = linear_logprobs(*tensors, targets, loss_weights=loss_weights, tile_rows=4).nll
        assert nll.requires_grad == bool(trained)
        if trained:
            nll.backward()
    assert made == 3 * products  # 3 tiles
    for x, gradient in zip(tensors, want):
        if any(x is y for y in trained):
            torch.testing.assert_close(x.grad, gradient)
        else:
            assert x.grad is None


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("upstream", [1 / 3, 1 + 2**-8])  # the second would round to 1
def test_bfloat16_gradients_of_nll(monkeypatch, wide, upstream):
    if wide:
        emulate_wide_products(monkeypatch)
    hidden, weight, targets = inputs(40, 16, 300, torch.bfloat16)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss_weights = random_weights(40)
    ours = linear_logprobs(hidden, weight, targets, loss_weights=loss_weights, tile_rows=16).nll
    exact = naive_nll(*exact_inputs, targets, loss_weights)
    assert ours.dtype == torch.float32 and abs(ours - exact) < 1e-5 * abs(exact)
    got = torch.autograd.grad(ours * upstream, [hidden, weight])
    for a, b in zip(got, torch.autograd.grad(exact * upstream, exact_inputs)):
        assert (
            a.dtype == torch.bfloat16
            and (a.double() - b).norm() < (5e-3 if wide else 3e-3) * b.norm()
        )


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D))

    def forward(self, hidden, targets):
        return linear_logprobs(hidden, self.weight, targets, tile_rows=4)


def test_parameter_data_may_be_replaced_between_forward_and_backward():
    """A partitioning engine frees the weight after forward and gathers it again, elsewhere, before backward."""
    torch.manual_seed(0)
    head, hidden, targets = (
        Head(),
        torch.randn(M, D, requires_grad=True),
        torch.randint(V, (M,)),
    )
    want = torch.autograd.grad(
        naive(hidden, head.weight, targets).logps.sum(), [hidden, head.weight]
    )
    logps = head(hidden, targets).logps
    full = head.weight.data.clone()
    head.weight.data = torch.empty(0)
    head.weight.data = full
    logps.sum().backward()
    torch.testing.assert_close(hidden.grad, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, want[1], rtol=1e-5, atol=1e-5)


def test_frozen_weight_and_frozen_hidden():
    hidden, weight, targets = inputs()
    want = torch.autograd.grad(naive(hidden, weight, targets).logps.sum(), [hidden, weight])
    linear_logprobs(hidden, weight.detach(), targets).logps.sum().backward()
    torch.testing.assert_close(hidden.grad, want[0])
    assert weight.grad is None
    linear_logprobs(hidden.detach(), weight, targets).logps.sum().backward()
    torch.testing.assert_close(weight.grad, want[1])
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, targets).logps.requires_grad


def test_logits_never_exist_whole():
    """The largest tensor that autograd or the computation holds is one tile."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] == 997:
                    largest = max(largest, t.shape[0])
            return out

    hidden, weight, targets = inputs(300, 4, 997, torch.float32)
    with Watch():
        linear_logprobs(
            hidden, weight, targets, tile_rows=32, entropy=True
        ).logps.sum().backward()
        linear_logprobs(
            hidden, weight, targets, tile_rows=32, loss_weights=torch.ones(300)
        ).nll.backward()
    assert largest == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden is \[2, 3, 4\]"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"must be int64 \[2\]"),
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
    arguments = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.zeros(2, dtype=torch.long),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_logprobs(
            arguments.pop("hidden"),
            arguments.pop("weight"),
            arguments.pop("targets"),
            **arguments,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "scale"), [(V, 1.0), (4096, 30.0), (9001, 1.0), (128256, 1.0)]
)
def test_gpu_tiles_equal_float64(dtype, vocabulary, scale):
    """Where only log-probabilities are asked for, tiles go through the kernels of logprobs_triton.py."""
    hidden, weight, targets = (x.detach().to("cuda") for x in inputs(m=300, v=vocabulary))
    hidden, weight = (
        (x * factor).to(dtype).requires_grad_()
        for x, factor in ((hidden, scale), (weight, 1.0))
    )
    upstream = torch.randn(300, generator=torch.Generator().manual_seed(1)).to("cuda")
    ours = linear_logprobs(hidden, weight, targets, lse=True, tile_rows=128)
    theirs = naive(hidden.detach().double(), weight.detach().double(), targets)
    for mine, exact in zip(ours[:1] + ours[2:3], theirs[:1] + theirs[2:3]):
        assert (mine.double() - exact).norm() < 1e-6 * exact.norm()
    grads = torch.autograd.grad((ours.logps * upstream).sum(), (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad((naive(*wide, targets).logps * upstream.double()).sum(), wide)
    for mine, want in zip(grads, exact):
        assert (mine.double() - want).norm() < (
            1e-5 if dtype == torch.float32 else 8e-3
        ) * want.norm()
    fused = linear_logprobs(hidden, weight, targets, loss_weights=-upstream, tile_rows=128)
    torch.testing.assert_close(fused.logps, ours.logps)
    for mine, want in zip(torch.autograd.grad(fused.nll / 3, (hidden, weight)), exact):
        assert (mine.double() * 3 - want).norm() < (
            1e-5 if dtype == torch.float32 else 8e-3
        ) * want.norm()


@pytest.mark.gpu
def test_gpu_tiles_take_masked_words():
    """A bias of -inf rules words out; a kernel's first block may hold nothing else."""
    hidden, weight, _ = (x.detach().float().to("cuda") for x in inputs(v=9001))
    bias = torch.zeros(9001, device="cuda")
    bias[:8500] = -torch.inf
    targets = torch.full((M,), 9000, device="cuda")
    exact = torch.log_softmax(hidden.double() @ weight.double().t() + bias, -1)[:, 9000]
    torch.testing.assert_close(
        linear_logprobs(*with_bias(hidden, weight, bias), targets).logps.double(),
        exact,
        rtol=1e-5,
        atol=1e-5,
    )
