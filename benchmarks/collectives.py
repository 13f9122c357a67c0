"""Speed of the collectives at training sizes, and the bytes that a layer sends, counted from its real calls.

    torchrun --nproc_per_node 8 benchmarks/collectives.py                  bandwidths, then the count
    torchrun --nproc_per_node 8 benchmarks/collectives.py --cpu --count    the count alone, on any machine

Bandwidth: bytes that leave one rank per second, on the slowest rank; host copies run on all ranks at once, from pinned memory.

The count compares two exact ways to split one decoder layer over n ranks, forward and backward, output and input
gradient checked against each other:

    Ulysses    every rank has the layer's weights and its tokens; heads travel          2 all-to-alls, and their adjoints
    tensor     every rank has 1/n of every matrix, norms are cut by tokens (Megatron-LM's sequence parallelism,
               arXiv 2205.05198); tokens travel    all-gather, reduce-scatter around attention and MLP, and their adjoints

Ring algorithms: an all-gather sends n - 1 times its shard, a reduce-scatter too; an all-to-all what others get.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import leave, parser, say, table
from torch import Tensor

from models.arch import ModelConfig, architecture
from models.decoder import init_parameter
from models.layers import DecoderLayer
from models.rope import inverse_frequencies, rotary_table
from ulysses.parallel.attention import UlyssesAttention
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import gather_tokens

MIB = 1 << 20


def main() -> None:
    p = parser(__doc__)
    p.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[8192, 32768],
        help="on each rank, for the exchanges' sizes",
    )
    p.add_argument("--count", action="store_true", help="count bytes only")
    p.add_argument(
        "--counted-tokens",
        type=int,
        default=64,
        help="on each rank; bytes are proportional to them",
    )
    p.add_argument("--repeat", type=int, default=10)
    p.add_argument("--cpu", action="store_true")
    a = p.parse_args()
    cuda = torch.cuda.is_available() and not a.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    shape = architecture(a.arch)
    rows = (
        []
        if a.count
        else [
            speed(name, size, call, a.repeat, device)
            for name, size, call in cases(shape, a.tokens, device)
        ]
    )
    counted = count(shape, a.counted_tokens, device, torch.bfloat16)
    for row in [*rows, *counted]:
        say(row, a.out)
    if dist.get_rank() == 0:
        if rows:
            print(table(rows, ("collective", "mib_sent", "ms", "gb_s")))
        print(table(counted, ("layer", "ranks", "calls", "bytes_per_token", "ratio")))
    leave()


# --- bandwidth -----------------------------------------------------------------------------------------------------


def cases(
    shape: ModelConfig, tokens: list[int], device: torch.device
) -> list[tuple[str, float, Callable[[], Any]]]:
    """Return (what, bytes a rank sends, call) of a training step's collectives."""
    n, dtype = dist.get_world_size(), torch.bfloat16
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    matrices = 2 * shape.hidden_size * (q + k) + 3 * shape.hidden_size * shape.intermediate_size
    found: list[tuple[str, float, Callable[[], Any]]] = []
    for S in tokens:
        sent, got = (
            torch.zeros(S // n * n, q + 2 * k, device=device, dtype=dtype) for _ in range(2)
        )
        whole = sent.nbytes * (n - 1) / n

        def one(sent: Tensor = sent, got: Tensor = got) -> None:
            dist.all_to_all_single(got, sent)

        def three(sent: Tensor = sent, got: Tensor = got) -> None:
            for width in (q, k, k):
                part = sent.numel() // (q + 2 * k) * width
                dist.all_to_all_single(got.view(-1)[:part], sent.view(-1)[:part])

        found += [
            (f"all-to-all of q, k, v, {S:,} tokens", whole, one),
            ("the same in three", whole, three),
        ]
    shard = torch.zeros(matrices // n, device=device, dtype=dtype)
    layer, reduced = shard.new_empty(shard.numel() * n), torch.zeros(shard.numel(), device=device)
    grads = torch.zeros(shard.numel() * n, device=device)
    found.append(
        (
            "all-gather of a layer",
            shard.nbytes * (n - 1),
            lambda: dist.all_gather_into_tensor(layer, shard),
        )
    )
    found.append(
        (
            "reduce-scatter, float32",
            reduced.nbytes * (n - 1),
            lambda: dist.reduce_scatter_tensor(reduced, grads),
        )
    )
    if device.type == "cuda":
        host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=device)
        found.append(
            ("copy to the host", host.nbytes, lambda: host.copy_(there, non_blocking=True))
        )
        found.append(
            ("copy from the host", host.nbytes, lambda: there.copy_(host, non_blocking=True))
        )
    return found


def speed(
    name: str, size: float, call: Callable[[], Any], repeat: int, device: torch.device
) -> dict[str, Any]:
    """Time a call on the slowest rank."""
    for _ in range(2):
        call()
    _ready(device)
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    _ready(device, together=False)
    seconds = torch.tensor((time.perf_counter() - began) / repeat, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {
        "collective": name, "gpus": dist.get_world_size(), "mib_sent": round(size / MIB, 1),
        "ms": round(float(seconds) * 1e3, 3), "gb_s": round(size / float(seconds) / 1e9, 1),
    }  # fmt: skip


def _ready(device: torch.device, together: bool = True) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if together:
        dist.barrier()


# --- bytes of a layer ----------------------------------------------------------------------------------------------


class Count:
    """Stand in for the collectives of torch.distributed: pass every call on, and add up what it makes this rank send."""

    def __init__(self) -> None:
        self.bytes, self.calls = 0.0, Counter[str]()
        self.real = {
            name: getattr(dist, name)
            for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
        }

    def __enter__(self) -> "Count":
        self.patches = [mock.patch.object(dist, name, getattr(self, name)) for name in self.real]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()

    def _add(self, name: str, sent: float, *args: Any, **kwargs: Any) -> Any:
        self.bytes += sent
        self.calls[name] += 1
        return self.real[name](*args, **kwargs)

    def all_to_all_single(self, out: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        group, splits = kwargs.get("group"), args[1] if len(args) > 1 else None
        mine = (
            given.nbytes / dist.get_world_size(group)
            if splits is None
            else splits[dist.get_rank(group)] * given.element_size()
        )
        return self._add("all_to_all_single", given.nbytes - mine, out, given, *args, **kwargs)

    def all_gather_into_tensor(self, out: Tensor, given: Tensor, **kwargs: Any) -> Any:
        return self._add("all_gather_into_tensor", out.nbytes - given.nbytes, out, given, **kwargs)

    def reduce_scatter_tensor(self, out: Tensor, given: Tensor, **kwargs: Any) -> Any:
        return self._add("reduce_scatter_tensor", given.nbytes - out.nbytes, out, given, **kwargs)


def count(
    shape: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Run one layer both ways and return what each sends; the results must agree."""
    mesh, n = (
        ParallelMesh(dist.get_world_size(), num_heads=shape.num_attention_heads),
        dist.get_world_size(),
    )
    batch = pack_shard(
        [Sequence(torch.zeros(n * tokens, dtype=torch.uint8), torch.ones(n * tokens))], mesh, device
    )
    attention = UlyssesAttention(
        mesh, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    )
    layer = DecoderLayer(shape, attention).to(device, dtype)
    weights = {}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            drawn = init_parameter(name, parameter.shape, shape, 0, device=device, dtype=dtype)
            weights[name] = parameter.copy_(drawn).detach()
    rope = rotary_table(batch.positions, inverse_frequencies(shape, device))
    draw = torch.Generator(device).manual_seed(mesh.rank)
    hidden, upstream = (
        torch.randn(tokens, shape.hidden_size, generator=draw, device=device).to(dtype)
        for _ in range(2)
    )
    rows, results = [], []
    for level in ("none", "block"):
        layer.recompute = level
        rows.append(
            _counted(
                f"Ulysses, recompute {level}",
                results,
                hidden,
                upstream,
                lambda x: layer(x, rope, batch.attention_plan),
            )
        )
    rows.append(
        _counted(
            "tensor", results, hidden, upstream, lambda x: tensor_layer(x, weights, shape, batch)
        )
    )
    for row in rows[:2]:
        row["ratio"] = f"{rows[2]['bytes_per_token'] / row['bytes_per_token']:.1f}x fewer"
    for ours, other in zip(results[0], results[2]):
        error = float((ours.float() - other.float()).norm() / ours.float().norm())
        if error > (0.1 if dtype == torch.bfloat16 else 1e-4):
            raise SystemExit(
                f"the two layers differ by {error:.1e}: the count compares different things"
            )
    return rows


def _counted(
    name: str, results: list[Any], hidden: Tensor, upstream: Tensor, run: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    leaf = hidden.detach().requires_grad_()
    with Count() as counted:
        out = run(leaf)
        out.backward(upstream)
    results.append(
        (out.detach() - hidden, leaf.grad - upstream)
    )  # without the residual stream, which is the same anyway
    calls = ", ".join(
        f"{number} {name.split('_into')[0].split('_single')[0]}"
        for name, number in counted.calls.items()
    )
    return {
        "layer": name,
        "ranks": dist.get_world_size(),
        "calls": calls,
        "bytes_per_token": round(counted.bytes / hidden.shape[0]),
    }


class _Gather(torch.autograd.Function):
    """Gather tokens [S, D] -> [T, D]; backward sums and scatters. `reverse` is the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reverse: bool) -> Tensor:
        ctx.reverse = reverse
        return _scatter_sum(x) if reverse else _gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (_gather(grad) if ctx.reverse else _scatter_sum(grad)), None


def _gather(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def _scatter_sum(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def tensor_layer(
    hidden: Tensor, weights: dict[str, Tensor], shape: ModelConfig, batch: ShardedBatch
) -> Tensor:
    """Run the layer with 1/n of every matrix on each rank: columns of the first, rows of the second of each half."""
    n, r, E = dist.get_world_size(), dist.get_rank(), shape.head_dim

    def half(
        x: Tensor, norm: str, first: tuple[str, ...], second: str, inner: Callable[..., Tensor]
    ) -> Tensor:
        whole = _Gather.apply(F.rms_norm(x, x.shape[1:], weights[norm], shape.rms_norm_eps), False)
        parts = [F.linear(whole, weights[name].chunk(n)[r].requires_grad_()) for name in first]
        return x + _Gather.apply(
            F.linear(inner(*parts), weights[second].chunk(n, 1)[r].requires_grad_()), True
        )

    def attend(*parts: Tensor) -> Tensor:
        q, k, v = (x.unflatten(1, (-1, E)) for x in parts)
        cos, sin = (
            x[:, None]
            for x in rotary_table(
                gather_tokens(batch.positions, batch), inverse_frequencies(shape, x.device)
            )
        )
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(v.dtype)
            for a, b in (y.float().chunk(2, -1) for y in (q, k))
        )
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
            .transpose(0, 1)
            .flatten(1)
        )

    x = hidden
    x = half(
        x,
        "input_layernorm.weight",
        tuple(f"self_attn.{p}_proj.weight" for p in "qkv"),
        "self_attn.o_proj.weight",
        attend,
    )
    mlp = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    return half(
        x,
        "post_attention_layernorm.weight",
        mlp,
        "mlp.down_proj.weight",
        lambda gate, up: F.silu(gate) * up,
    )


if __name__ == "__main__":
    main()
