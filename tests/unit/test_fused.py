"""The elementwise passes against autograd in float64, on CPU and, where there is a GPU, as Triton kernels."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from models.ops.experts import (
    ExpertStacks,
    Order,
    SparseMLP,
    Stack,
)
from models.ops.gated_mlp import ACTIVATIONS, GatedMLP, SecondHalf, activate
from models.ops.linear import (
    Adapter,
    GradientSums,
    Matrix,
    Products,
    recorded,
    stacked,
    trained,
)
from models.ops.norm import NormRule, rms_norm, rms_norm_backward
from models.ops.rotary import Projection, rotate_pair

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
each_device = pytest.mark.parametrize("device", ["cpu", GPU])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
apart_and_together = pytest.mark.parametrize(
    "together", [False, True], ids=["apart", "together"]
)
RULE = NormRule(1e-5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def near(found, exact, dtype, stored=None, factor=1.0):
    """As near as computing in `dtype` can be, and of the dtype `stored`."""
    assert found.dtype == (stored or dtype) and found.isfinite().all()
    error = (found.double() - exact).norm() / exact.norm()
    assert error < factor * TOLERANCE[dtype], float(error)


def all_near(found, exact, dtype, factor=1.0):
    for mine, want in zip(found, exact):
        near(mine, want, dtype, factor=factor)


def in_float64(function, inputs, *grads):
    """The function's values, and the gradients of its inputs."""
    exact = [t.double().requires_grad_() for t in inputs]
    values = function(*exact)
    gradients = torch.autograd.grad(values, exact, [g.double() for g in grads])
    return *(values if isinstance(values, tuple) else [values]), *gradients


def assert_half(half, x, weights, grad, wanted, dtype):
    """What `half` makes is right as a whole and in tiles, and so are autograd's gradients and its own."""
    exact, *gradients = wanted
    factor = 1.0 if dtype == torch.float32 else 4.0  # several bfloat16 roundings in a row
    (out,) = recorded(half(), x)
    for found in (out, half().add_tiles(x)):
        near(found, exact, dtype, factor=factor)
    all_near(torch.autograd.grad(out, [x, *weights], grad), gradients, dtype, factor)
    of_rows, of_weights = half().gradients(x, grad)
    all_near((of_rows, *of_weights), gradients, dtype, factor)


def draw(*shapes, dtype=torch.float32, device="cpu"):
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def neighbours(*tensors):
    """Leaves that lie one after the other in memory."""
    parts = torch.cat([t.flatten() for t in tensors]).split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors)]


def turns(rows, pairs, device):
    angles = torch.rand(rows, pairs).to(device) * 7
    return angles.cos(), angles.sin()


def turned(x, cos, sin):
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def normalised(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 96), (20_001, 128), (1037, 896), (300, 3584), (5, 8192)])
def test_norm_gradient(device, dtype, shape):
    x, grad, residual, weight = draw(shape, shape, shape, shape[1:], dtype=dtype, device=device)
    exact, grad_x, grad_w = in_float64(normalised, (x, weight), grad)
    near(rms_norm(x, weight, RULE), exact, dtype)
    mine_x, mine_w = rms_norm_backward(grad.clone(), x, weight, RULE)
    near(mine_x, grad_x, dtype)
    near(mine_w, grad_w, dtype, torch.promote_types(dtype, torch.float32))
    mine_x, _ = rms_norm_backward(grad, x, weight, RULE, residual)
    near(mine_x, grad_x + residual.double(), dtype)


@each_device
@each_dtype
@pytest.mark.parametrize("heads, width", [((4, 2), 64), ((28, 4), 128), ((14, 2), 96)])
def test_rotation(device, dtype, heads, width):
    q, k = draw((19, heads[0], width), (19, 2 * heads[1], width), dtype=dtype, device=device)
    k = k[:, : heads[1]]  # rows that are not dense, like a view of an exchange buffer
    cos, sin = turns(19, width // 2, device)
    back, wanted = ([turned(x, cos, way) for x in (q, k)] for way in (-sin, sin))
    all_near(rotate_pair(q, k, cos, sin, back=True), back, dtype)
    inside = rotate_pair(q, k, cos, sin, out=(q, k))
    assert [x.data_ptr() for x in inside] == [q.data_ptr(), k.data_ptr()]
    all_near(inside, wanted, dtype)


@each_device
@each_dtype
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms of heads"])
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 2, 16), (32, 8, 128), (3, 1, 12)])
@apart_and_together
def test_projecting_half(device, dtype, normed, heads, kv_heads, width, together):
    rows, kv = heads * width, kv_heads * width
    matrices, biases = [(rows, 32), (kv, 32), (kv, 32)], [(rows,), (kv,), (kv,)]
    shapes = [(40, 32), (32,), *matrices, *biases, *[(width,)] * (2 * normed)]
    inputs = draw(*shapes, dtype=dtype, device=device)
    if together:
        inputs[2:5] = neighbours(*inputs[2:5])
    assert len(stacked(inputs[2:5])) == (1 if together else 3)
    upstream = (40, heads, width), (40, 2 * kv_heads, width), (40, kv_heads, width), (40, 32)
    grads = draw(*upstream, dtype=dtype, device=device)
    grads[1] = grads[1][:, :kv_heads]  # as the exchange hands it back
    cos, sin = turns(40, width // 2, device)

    def exact(hidden, norm, *rest):
        rows = normalised(hidden, norm)
        linear = map(F.linear, [rows] * 3, rest, rest[3:])
        q, k, v = (x.unflatten(1, (-1, width)) for x in linear)
        if normed:
            q, k = normalised(q, rest[6]), normalised(k, rest[7])
        return turned(q, cos, sin), turned(k, cos, sin), v, hidden

    wanted = in_float64(exact, inputs, *grads)
    x, *weights = (t.requires_grad_() for t in inputs)
    matrices = Products(*map(Matrix, weights[1:4], weights[4:7]))
    own = Projection(matrices, width, RULE, weights[0], weights[7:], cos, sin)
    found = recorded(own, x)
    factor = 2.0 if dtype == torch.float32 else 4.0  # several roundings in a row
    all_near((*found, *torch.autograd.grad(found, inputs, grads)), wanted, dtype, factor)


@each_device
@each_dtype
@pytest.mark.parametrize("tile", [40, 16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("factor_of_sum", [1.0, 0.22])
@apart_and_together
@pytest.mark.parametrize("has_norm_after", [True, False])
def test_feed_forward_half(device, dtype, tile, together, kind, factor_of_sum, has_norm_after):
    # not whole blocks of the kernels
    shapes = [(40, 32)] * 2 + [(32,), (97, 32), (97, 32), (32, 97), (32,)]
    grad, *inputs = draw(*shapes, dtype=dtype, device=device)
    if together:
        inputs[2:4] = neighbours(*inputs[2:4])
    assert len(stacked(inputs[2:4])) == (1 if together else 2)

    def half(v, norm, gate, up, down, *after):
        rows = normalised(v, norm)
        product = (ACTIVATIONS[kind](rows @ gate.t()) * (rows @ up.t())) @ down.t()
        return v + factor_of_sum * (normalised(product, *after) if after else product)

    if not has_norm_after:
        inputs.pop()
    wanted = in_float64(half, inputs, grad)
    x, *weights = (t.detach().requires_grad_() for t in inputs)
    norm, gate, up, down, after, *_ = *weights, None

    def fused():
        mlp = GatedMLP(Products(Matrix(gate), Matrix(up)), Products(Matrix(down)), kind)
        return SecondHalf(norm, mlp, after, trained(weights), RULE, factor_of_sum, tile)

    assert_half(fused, x, weights, grad, wanted, dtype)
    for frozen in (norm, *weights[2:]):
        frozen.requires_grad_(False)
    _, (of_gate,) = fused().gradients(x, grad)
    near(of_gate, wanted[3], dtype, factor=1.0 if dtype == torch.float32 else 4.0)


@pytest.mark.parametrize("has_norm_after", [False, True])
def test_gate_and_up_are_freed_before_the_products_that_follow(has_norm_after):
    grad, x, norm, gate, up, down = draw(
        *[(40, 32)] * 2, (32,), *[(97, 32)] * 2, (32, 97), dtype=torch.float32, device="cpu"
    )
    pair, after = Products(Matrix(gate), Matrix(up)), norm if has_norm_after else None
    forward, back, made, alive = pair.forward, pair.back, [], []

    def noted(rows):
        results = forward(rows)
        made.extend(map(weakref.ref, results))
        return results

    def look(to_results):
        alive.append([ref() is not None for ref in made])
        return back(to_results)

    pair.forward, pair.back = noted, look
    half = SecondHalf(norm, GatedMLP(pair, Products(Matrix(down))), after, [], RULE)
    half.gradients(x, grad)
    assert alive == [[False, False]]


@each_device
@each_dtype
@pytest.mark.parametrize("tile", [40, 16])
@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("adapted", [(1, 1, 1), (0, 1, 0), (1, 0, 1)], ids=str)
def test_feed_forward_half_with_adapters(device, dtype, tile, rank, adapted):
    """Adapters of gate, up and down, or of some of them; matrices and norm are frozen."""
    sizes = (97, 32), (97, 32), (32, 97)
    grad, x, norm, *matrices = draw(
        (40, 32), (40, 32), (32,), *sizes, dtype=dtype, device=device
    )
    pairs = [
        [t / 4 for t in draw((rank, D), (N, rank), dtype=dtype, device=device)] if has else []
        for (N, D), has in zip(sizes, adapted)
    ]

    def half(v, *trained):
        left, wide = [*trained], [m.double() for m in matrices]
        for number, has in enumerate(adapted):
            if has:
                a, b = left.pop(0), left.pop(0)
                wide[number] = wide[number] + 0.7 * b @ a
        rows = normalised(v, norm.double())
        return v + (F.silu(rows @ wide[0].t()) * (rows @ wide[1].t())) @ wide[2].t()

    trained = [t for pair in pairs for t in pair]
    wanted = in_float64(half, [x, *trained], grad)
    for tensor in (x, *trained):
        tensor.requires_grad_()
    own = [Matrix(m, adapter=Adapter(*p, 0.7) if p else None) for m, p in zip(matrices, pairs)]

    def fused():
        mlp = GatedMLP(Products(*own[:2]), Products(own[2]))
        return SecondHalf(norm, mlp, None, trained, RULE, tile=tile)

    assert_half(fused, x, trained, grad, wanted, dtype)


def test_dropout_is_of_the_inputs_of_adapters_alone():
    x, weight, a, b, grad = draw((40, 32), (24, 32), (4, 32), (24, 4), (40, 24))
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(40, 32), 0.4).double()
    assert 0.3 < (mask == 0).double().mean() < 0.5

    def exact(x, a, b):
        return x @ weight.double().t() + 2.0 * (x * mask) @ a.t() @ b.t()

    wanted = in_float64(exact, (x, a, b), grad)
    trained = [t.requires_grad_() for t in (x, a, b)]
    torch.manual_seed(3)
    adapted = Matrix(weight, adapter=Adapter(a, b, 2.0, 0.4))
    (found,) = recorded(Products(adapted), x)
    all_near((found, *torch.autograd.grad(found, trained, grad)), wanted, torch.float32)


@each_dtype
@apart_and_together
def test_adapters_of_projections_that_read_the_same_rows(dtype, together):
    """Three products, of which two are adapted and one is of some rows of its matrix."""
    shapes = (40, 32), (24, 32), (16, 32), (48, 32), *[(4, 32)] * 2, (24, 4), (48, 4)
    x, *weights = draw(*shapes, dtype=dtype)
    if together:
        weights[3:5] = neighbours(*weights[3:5])
    chosen = torch.arange(47, 0, -3)
    grads = draw((40, 24), (40, 16), (40, 16), dtype=dtype)

    def exact(x, first, second, third, a, c, b, d):
        third = (third + 2.0 * d @ c)[chosen]
        return x @ (first + 2.0 * b @ a).t(), x @ second.t(), x @ third.t()

    wanted = in_float64(exact, (x, *weights), *grads)
    x, first, second, third, a, c, b, d = inputs = [t.requires_grad_() for t in (x, *weights)]
    matrices = (
        Matrix(first, adapter=Adapter(a, b, 2.0)),
        Matrix(second),
        Matrix(third, adapter=Adapter(c, d, 2.0), row_index=chosen),
    )
    found = recorded(Products(*matrices), x)
    factor = 1.0 if dtype == torch.float32 else 2.0
    all_near((*found, *torch.autograd.grad(found, inputs, grads)), wanted, dtype, factor)


class NoRecord:
    """Notes nothing."""

    def note(self, *_):
        pass


@each_device
@each_dtype
@pytest.mark.parametrize("tile", [40, 16])
@pytest.mark.parametrize("kind", ["silu", "normalised", "clamped"])
def test_experts_half(device, dtype, tile, kind):
    """Six experts of which one gets no row; the router's margins are larger than rounding."""
    shapes = (40, 32), (40, 32), (32,), (6, 32), (6, 48, 32), (6, 32, 24)
    clamped, normalise = kind == "clamped", kind != "silu"
    if clamped:  # matrices the other way round, with biases, as the router has one
        shapes = *shapes[:4], (6, 32, 48), (6, 48), (6, 24, 32), (6, 32), (6,)
    grad, *inputs = draw(*shapes, dtype=dtype, device=device)
    with torch.no_grad():
        inputs[2].mul_(0.1)[5] = 0
        # every row prefers two of the first five clearly, and not so much that the router's gradient is rounding alone
        inputs[2][:5, :5] = torch.eye(5) * 4
        inputs[0][:, :5] = torch.stack([torch.randperm(5) for _ in range(40)]).add(1).to(dtype)
    inputs[1].fill_(1.0)

    def of_clamped(x, gate_up, of_both, down, of_down):
        both = torch.einsum("sd,ndf->snf", x, gate_up) + of_both
        gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
        return (
            torch.einsum("snf,nfd->snd", (up + 1) * gate * torch.sigmoid(1.702 * gate), down)
            + of_down
        )

    def half(v, norm, router, *matrices):
        x = normalised(v, norm)
        logits = x @ router.t()
        if clamped:
            weights, chosen = (logits + matrices[-1]).topk(2)
            weights = weights.softmax(-1)
            every = of_clamped(x, *matrices[:-1])
        else:
            weights, chosen = logits.softmax(-1).topk(2)
            if normalise:
                weights = weights / weights.sum(-1, keepdim=True)
            gate, up = torch.einsum("sd,nfd->snf", x, matrices[0]).chunk(2, -1)
            every = torch.einsum("snf,ndf->snd", F.silu(gate) * up, matrices[1])
        mine = every.gather(1, chosen[..., None].expand(-1, -1, v.shape[1]))
        return v + (weights[..., None] * mine).sum(1)

    exact, *exact_grads = in_float64(half, inputs, grad)
    x, norm, router, *matrices = (t.requires_grad_() for t in inputs)
    bias = [matrices.pop()] if clamped else []
    pairs = list(map(Stack, matrices))
    if clamped:
        pairs = [
            Stack(m, bias=b, transposed=True) for m, b in zip(matrices[::2], matrices[1::2])
        ]
    stacks = ExpertStacks(*pairs, "clamped" if clamped else "silu")
    experts = SparseMLP([router, *bias], stacks, 2, normalise, NoRecord(), 0)
    fused = SecondHalf(norm, experts, None, inputs[1:], RULE, tile=tile)
    (out,) = recorded(fused, x)
    factor = 1.0 if dtype == torch.float32 else 4.0
    with torch.no_grad():
        in_tiles = fused.add_tiles(x)
    for found in (out, in_tiles):
        near(found, exact, dtype, factor=factor)
    of_rows, of_weights = fused.gradients(x, grad)
    found = torch.autograd.grad(out, inputs, grad), (of_rows, *of_weights)
    for mine, want in (pair for each in found for pair in zip(each, exact_grads)):
        least = 1e-2 * exact_grads[0].norm()
        error = (mine.double() - want).norm() / max(want.norm(), least)
        assert error < 4 * factor * TOLERANCE[dtype]
    assert not of_weights[2][5].any()


class Copied:
    """Bytes that stand for themselves."""

    def __init__(self, matrices):
        self.shape = matrices.shape

    def unpack(self, data, dtype, out):
        return out.copy_(data)


@each_device
@each_dtype
@pytest.mark.parametrize("form", ["dense", "packed", "packed transposed"])
def test_adapters_of_experts(device, dtype, form):
    """Rank 3 in room for 8; the matrices are frozen."""
    shapes = (
        (64, 32),
        (64, 32),
        (6, 48, 32),
        (6, 32, 24),
        (6, 3, 32),
        (6, 48, 3),
        (6, 3, 24),
        (6, 32, 3),
    )
    grad, x, gate_up, down, *adapters = draw(*shapes, dtype=dtype, device=device)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(64)]).to(device)
    weights = torch.rand(64, 2).to(device)

    def sums(x, weights, a, b, c, d):
        both = torch.einsum("sd,nfd->snf", x, gate_up.double() + 0.5 * b @ a)
        gate, up = both.chunk(2, -1)
        every = torch.einsum("snf,ndf->snd", F.silu(gate) * up, down.double() + 0.5 * d @ c)
        return (weights[..., None] * every.gather(1, chosen[..., None].expand(-1, -1, 32))).sum(
            1
        )

    wanted = in_float64(sums, (x, weights, *adapters), grad)
    x, weights, a, b, c, d = trained = [t.requires_grad_() for t in (x, weights, *adapters)]
    turned = "transposed" in form
    matrices = [m.mT.contiguous() if turned else m for m in (gate_up, down)]
    stacks = [
        Stack(m, None if form == "dense" else Copied(m), Adapter(*own, 0.5), None, turned)
        for m, own in zip(matrices, ((a, b), (c, d)))
    ]
    experts = ExpertStacks(*stacks)
    order, sums = Order.of(chosen, 6), GradientSums(whole=True)
    with torch.no_grad():
        both, found = experts.forward(x, weights, order)
        of_x, of_weights = experts.backward(grad, x, weights, order, sums, both)
    factor = 2.0 if dtype == torch.float32 else 4.0
    grads = of_x, of_weights, *sums.of(trained[2:])
    for mine, want in zip((found, *grads), wanted):
        near(mine, want, dtype, mine.dtype, factor)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_kernels_run_where_the_current_device_is_another():
    drawn = draw((40, 96), (40, 96), (40, 96), (96,))

    def run(device):
        x, up, grad, weight = (tensor.to(device) for tensor in drawn)
        q, angles = x.view(40, 2, 48), up[:, :24]
        found = (
            rms_norm(x, weight, RULE),
            rms_norm_backward(grad.clone(), x, weight, RULE)[0],
            activate(x, up)[0],
            *activate(x, up, grad=grad),
            *rotate_pair(q, q, angles.cos(), angles.sin()),
        )
        return [tensor.cpu() for tensor in found]

    all_near(run("cuda:1"), run("cpu"), torch.float32)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, width = 2**31 // 4096 + 100, 4096
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(rows, 64, device="cuda")
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def rotated(x, angles):
        q = x.view(-1, 32, 128)
        return rotate_pair(q, q[:, :1], angles.cos(), angles.sin())[0]

    for compute in (
        lambda x, _: activate(x, x)[0],
        lambda x, _: activate(*x.chunk(2, 1), grad=x[:, :2048])[1],
        rotated,
        lambda x, _: rms_norm(x, weight, RULE),
        lambda x, _: rms_norm_backward(x.clone(), x, weight, RULE)[0],
    ):
        assert torch.equal(compute(x, angles)[-64:], compute(x[-64:], angles[-64:]))
