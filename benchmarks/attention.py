"""Attention under sequence parallelism: right on this machine, and how fast.

    python benchmarks/attention.py                                          every kernel, one device
    torchrun --nproc_per_node 8 benchmarks/attention.py --heads 28 --kv-heads 4 --tokens 131072
    torchrun --nproc_per_node 8 benchmarks/attention.py --check             against one process, then exit

Prints, per kernel and length, milliseconds of each stage on the slowest rank and the TFLOP/s per device of forward and
backward: causal attention counts 2 * T^2 * H * E operations forward and 2.5 times that backward, over all documents.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from common import add_options, plain_parser, wait
from torch import Tensor

from ulysses import ParallelMesh, Sequence, ShardedBatch, UlyssesAttention, pack_shard
from ulysses.parallel import gather_tokens
from ulysses.parallel.exchange import (
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)
from ulysses.parallel.kernels import KERNELS, resolve_kernel
from ulysses.zero.construct import initialize_distributed

CHECKED_HEADS = [(14, 2), (12, 2), (28, 4), (24, 8), (40, 8), (32, 8), (16, 2)]
STAGES = (
    "exchange_qkv",
    "attend",
    "exchange_out",
    "attend_backward",
    "exchange_qkv_backward",
    "all",
)
CHECKED_LENGTHS = [333, 1, 1000, 1, 64, 2048, 517]


def main() -> None:
    p = plain_parser(__doc__)
    p.add_argument(
        "--kernels", nargs="*", help="names from ulysses/parallel/kernels.py; all that run here"
    )
    add_options(
        p,
        heads=(32, "query heads"),
        kv_heads=(8, "key-value heads"),
        head_dim=(128, "width of a head"),
        documents=(1, "equal documents in the pack"),
        repeat=(5, "timed repetitions"),
    )
    p.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072])
    p.add_argument(
        "--check", action="store_true", help="compare out, dq, dk, dv with one process and exit"
    )
    p.add_argument(
        "--lengths", type=int, nargs="+", default=CHECKED_LENGTHS, help="documents of --check"
    )
    options, device = p.parse_args(), initialize_distributed()
    kernels = options.kernels or KERNELS
    if options.check:
        for case in product(kernels, CHECKED_HEADS, (torch.float32, torch.bfloat16)):
            check(*case, options, device)
    else:
        for tokens, kernel in product(options.tokens, kernels):
            measure(kernel, options, tokens, device)
    dist.destroy_process_group()


def runs(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernel runs here; if not, the reason is printed."""
    try:
        resolve_kernel(kernel, device, dtype, head_dim)
    except ValueError as refusal:
        say(str(refusal))
        return False
    return True


def make(
    lengths: list[int], world: int, heads: tuple[int, int], device: torch.device
) -> ShardedBatch:
    mesh = ParallelMesh(world, num_heads=heads[0])
    return pack_shard(
        [Sequence(torch.zeros(n, dtype=torch.uint8), torch.ones(n)) for n in lengths],
        mesh,
        device,
    )


def check(
    kernel: str,
    heads: tuple[int, int],
    dtype: torch.dtype,
    options: Any,
    device: torch.device,
) -> None:
    """Compare the kernel on all ranks with plain float64 attention on one."""
    head_dim, lengths, world = options.head_dim, options.lengths, dist.get_world_size()
    if not runs(kernel, device, dtype, head_dim):
        return
    batch = make(lengths, world, heads, device)
    draw = torch.Generator(device).manual_seed(0)
    full = [
        torch.randn(batch.num_tokens, h, head_dim, generator=draw, device=device).to(dtype)
        for h in (heads[0], heads[1], heads[1], heads[0])
    ]
    # in the pack, tail included
    indices = batch.cu_seqlens[batch.sequence_ids] + batch.positions
    tail = batch.attention_plan.total - batch.num_tokens
    mine = [torch.cat([x, x.new_zeros(tail, *x.shape[1:])])[indices] for x in full]
    attention = UlyssesAttention(batch.mesh, *heads, head_dim, kernel)
    got = out_and_gradients(lambda *x: attention(*x, plan=batch.attention_plan), mine)
    got = [gather_tokens(x, batch) for x in got]
    alone = make(lengths, 1, heads, device).attention_plan
    plain, one_rank = (
        UlyssesAttention(None, *heads, head_dim, name) for name in ("reference", kernel)
    )
    exact = out_and_gradients(lambda *x: plain(*x, plan=alone), [x.double() for x in full])
    single = out_and_gradients(lambda *x: one_rank(*x, plan=alone), full)
    for name, many, one, want in zip(("out", "dq", "dk", "dv"), got, single, exact):
        error, one_error = (
            float((x.double() - want).norm() / want.norm()) for x in (many, one)
        )
        # In bfloat16 the sums over copies of keys and values round once more.
        floor = 1e-5 if dtype == torch.float32 else 5e-3
        if error > max(floor, 1.5 * one_error):
            raise SystemExit(
                f"{kernel} {heads} {dtype} on {world} ranks: {name} is off by {error:.1e}, one rank by {one_error:.1e}"
            )
    say(
        f"{kernel} {heads} {str(dtype).removeprefix('torch.')} on {world} ranks: dv is off by {error:.1e}"
    )


def out_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    *leaves, upstream = (x.detach().requires_grad_() for x in inputs)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.detach())]


def measure(kernel: str, options: Any, tokens: int, device: torch.device) -> None:
    heads, world = (options.heads, options.kv_heads), dist.get_world_size()
    lengths = [tokens // options.documents] * options.documents
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if not runs(kernel, device, dtype, options.head_dim):
        return
    batch = make(lengths, world, heads, device)
    plan, local = batch.attention_plan, batch.tokens.numel()
    attention = UlyssesAttention(batch.mesh, *heads, options.head_dim, kernel)
    shapes = [(local, h, options.head_dim) for h in (heads[0], heads[1], heads[1])]
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    )
    upstream = torch.randn(shapes[0], device=device, dtype=dtype)
    rounds = []
    for _ in range(options.repeat + 2):
        with torch.no_grad():
            shards, to_heads = timed(lambda: exchange_qkv_forward(q, k, v, plan), device)
            kept, forward = timed(lambda x=shards: attention.attend_forward(*x, plan), device)
            _, to_tokens = timed(lambda x=kept[0]: exchange_out_forward(x, plan), device)
            dout = torch.ones_like(kept[0])
            saved = (dout, *shards, *kept, plan)
            grads, backward = timed(lambda x=saved: attention.attend_backward(*x), device)
            _, adjoint = timed(lambda x=grads: exchange_qkv_backward(*x, plan, *heads), device)
        del shards, kept, saved, dout, grads
        step = timed(
            lambda: torch.autograd.grad(attention(q, k, v, plan=plan), (q, k, v), upstream),
            device,
        )[1]
        rounds.append((to_heads, forward, to_tokens, backward, adjoint, step))
    slowest = torch.tensor(rounds[2:], device=device).amin(
        0
    )  # the first ones compile and warm up
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    stages = dict(zip(STAGES, slowest.tolist()))
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    work = 4 * pairs * heads[0] * options.head_dim / world / 1e12
    say(
        f"{kernel:9} {tokens:8} tokens {heads[0]}/{heads[1]} heads {batch.mesh.head_parallel_size}x"
        f"{batch.mesh.row_parallel_size} ranks  "
        + "  ".join(f"{name} {value * 1e3:.2f} ms" for name, value in stages.items())
        + f"  kernel {work / stages['attend']:.0f} / {2.5 * work / stages['attend_backward']:.0f} TFLOP/s,"
        f" with exchanges {3.5 * work / stages['all']:.0f}"
    )


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait(device)
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
