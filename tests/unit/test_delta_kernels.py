"""The kernels of linear attention: fla-core's, proven before a run, and ours, which equal plain torch."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from models.families import Delta
from models.ops import delta_compile, delta_kernels, delta_rule
from ulysses.parallel.recurrence import Recurrence

HEADS = 2, 6, 16, 24, 4  # key and value heads, their widths, and the convolution's


def stand_in(wrong=0.0):
    """Return a rule with fla-core's arguments and shapes, in plain torch; `wrong` is added to what it returns."""

    def rule(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert q.shape[:2] == g.shape[:2] == (1, int(cu_seqlens[-1]))
        level = Recurrence(cu_seqlens.tolist(), {}, q.device).tree_levels[0]
        given = (x[0] for x in (q, k, v, g, beta))
        out, last = delta_rule.delta_rule(*given, level, initial_state)
        return out[None] + wrong, last if output_final_state else None

    return rule


@pytest.mark.parametrize("shares", [False, True])
def test_right_kernels_are_proven_and_wrong_ones_refused(shares, monkeypatch):
    case = "rule", torch.device("cpu"), shares, *HEADS
    monkeypatch.setattr(delta_kernels, "convolve", delta_rule.convolve)
    monkeypatch.setattr(delta_kernels, "load", stand_in)
    delta_kernels.prove_rule(*case)
    monkeypatch.setattr(delta_kernels, "load", lambda: stand_in(0.02))
    with pytest.raises(
        FloatingPointError, match="rule: the kernels of fla-core give a wrong output"
    ):
        delta_kernels.prove_rule(*case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be kernels")
def test_what_is_not_installed_is_named():
    with pytest.raises(ValueError, match=r"install them with pip install -e .\.\[hybrid\]"):
        delta_kernels.load()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(4, 8, 128, 128, 4), (3, 6, 128, 128, 4), (16, 32, 128, 128, 4)]
)
def test_the_kernels_are_as_near_to_float64_as_their_dtype(heads):
    pytest.importorskip("fla")
    delta_kernels.prove_rule("rule", torch.device("cuda"), True, *heads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "prefixes", [{}, {2: [(0, 60)], 3: [(0, 60), (131, 133)]}], ids=["whole", "shared"]
)
def test_the_convolution_equals_plain_torch(prefixes):
    """Documents that end inside a program's rows, and one that goes on in the next program."""
    pytest.importorskip("fla")
    widths, device = [48, 48, 150], torch.device("cuda")
    recurrence = Recurrence([0, 61, 131, 300, 302], prefixes, device)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(302, 246, generator=draw), torch.randn(246, 4, generator=draw)]
    upstream, found = torch.randn(302, 246, generator=draw).to(device), []
    for kernels in delta_rule, delta_kernels:
        inputs = [x.to(device).requires_grad_() for x in given]
        out = torch.cat(kernels.convolve(*inputs, recurrence, widths), 1)
        found.append([out, *torch.autograd.grad((out * upstream).sum(), inputs)])
    for wanted, got in zip(*found):
        assert float((got - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 6, 24, 16, 4), (4, 4, 128, 128, 4), (1, 2, 8, 40, 3)])
def test_a_step_of_decoding_equals_plain_torch(heads):
    shape, draw = Delta(*heads), torch.Generator().manual_seed(0)
    _, H, E, V, taps = heads
    columns = sum(shape.widths)
    sizes = (3, taps - 1, columns), (3, H, E, V), (3, columns), (3, H), (3, H), (columns, taps)
    given = [torch.randn(size, generator=draw) for size in sizes]
    given += [torch.linspace(-6, 3, H), torch.linspace(-4, 25, H)]
    results = []
    for kernels in delta_rule, delta_kernels:
        inputs, memory, *others = (x.cuda().clone() for x in given)
        outs = [kernels.mix_step(shape, inputs, memory, *others) for _ in range(3)]
        results.append([*outs, inputs, memory])
    for wanted, got in zip(*results):
        assert float((got - wanted).norm() / wanted.norm()) < 1e-6


class Kernel:
    """Stands in for tilelang's JITImpl, which makes kernels and keeps them, and counts what is done with them."""

    def __init__(self, broken=(), source=""):
        self.broken, self.func_source, self._kernel_cache = broken, source, {}
        self.traced, self.compiled, self.linked, self.ran = [], [], [], []
        self.func = self

    def parse_args(self, *args, **kwargs):
        return (args, str(kwargs)), {}

    def get_tir(self, *args, **kwargs):
        self.traced.append(args)

    def compile(self, *args, **kwargs):
        if args in self.broken:
            raise RuntimeError("nvcc fails")
        assert args in self.traced
        self.compiled.append(args)
        kernel = mock.Mock(side_effect=lambda *tensors: self.ran.append((args, tensors)))
        executable = SimpleNamespace(jit=lambda: self.linked.append(args))
        kernel.adapter.get_exportable_executable = lambda: executable
        return kernel

    def __call__(self, *args, **kwargs):
        key, _ = self.parse_args(*args, **kwargs)
        return self._kernel_cache.get(key) or self.compile(*args, **kwargs)


@pytest.fixture
def tilelang(monkeypatch):
    module = ModuleType("tilelang.jit")
    module.JITImpl = Kernel
    monkeypatch.setitem(sys.modules, "tilelang", ModuleType("tilelang"))
    monkeypatch.setitem(sys.modules, "tilelang.jit", module)


def test_kernels_are_compiled_side_by_side_and_none_of_them_runs(tilelang):
    kernel = Kernel()

    def compute():
        for width in (64, 128, 64):
            kernel(width, varlen=True)(torch.ones(3))
        raise RuntimeError("what it computes means nothing")

    delta_compile.compile_side_by_side([compute, lambda: kernel(256)(1)], [compute])
    compiled = [(64,), (128,), (256,)]
    assert sorted(kernel.compiled) == sorted(kernel.linked) == compiled and not kernel.ran
    kernel(64, varlen=True)(1)
    assert len(kernel.compiled) == 3 and kernel.ran == [((64,), (1,))]


def test_the_kernel_of_the_longest_source_is_first(tilelang):
    kernels, traced = [Kernel(source="x" * length) for length in (2, 30, 4)], []
    for kernel in kernels:
        kernel.get_tir = lambda width, kernel=kernel: traced.append(
            (len(kernel.func_source), width)
        )
        kernel.compile = mock.Mock()
    found = [
        lambda kernel=kernel, width=width: kernel(width)(1)
        for kernel in kernels
        for width in (64, 128)
    ]
    delta_compile.compile_side_by_side(found, [])
    assert traced == [(30, 64), (30, 128), (4, 64), (4, 128), (2, 64), (2, 128)]


def test_a_kernel_that_does_not_compile_does_so_when_it_is_called(tilelang):
    kernel = Kernel(broken={(64,)})
    delta_compile.compile_side_by_side([lambda: kernel(64)(1), lambda: kernel(128)(1)], [])
    assert kernel.compiled == [(128,)]
    with pytest.raises(RuntimeError, match="nvcc fails"):
        kernel(64)


@pytest.mark.parametrize("shares", [False, True])
def test_flash_qla_is_called_beforehand_as_it_is_later(shares, monkeypatch):
    """The same shapes and dtypes, on which its kernels depend, and states at the same places."""
    calls, rule = [], stand_in()

    def flash_qla(q, k, v, g, beta, **kwargs):
        given = (q, k, v, g, beta, kwargs["initial_state"], kwargs["cu_seqlens"])
        calls[-1].append([x if x is None else (x.shape, x.dtype) for x in given])
        calls[-1].append(kwargs["output_final_state"])
        always = {"use_qk_l2norm_in_kernel": True, "cu_seqlens_cpu": kwargs["cu_seqlens"]}
        return rule(q, k, v, g, beta, **kwargs | always)

    package = ModuleType("flash_qla")
    package.chunk_gated_delta_rule = flash_qla
    monkeypatch.setitem(sys.modules, "flash_qla", package)
    monkeypatch.setattr(delta_kernels, "convolve", delta_rule.convolve)
    monkeypatch.setattr(delta_kernels, "load", lambda: flash_qla)
    properties = SimpleNamespace(multi_processor_count=24)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(delta_kernels, "LONG", 200)
    delta = Delta(*HEADS)
    for kernels in delta_compile, delta_kernels:
        calls.append([])
        for pack in delta_kernels._packs(delta, torch.device("cpu"), shares):
            delta_kernels._computed(delta, pack, kernels)
    assert calls[0] == calls[1] and len(calls[0]) == (2 * (4 + 3 * 3) if shares else 2 * 4)
