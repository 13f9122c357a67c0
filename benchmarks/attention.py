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
from torch.autograd import grad

from ulysses import ParallelMesh, Sequence, ShardedBatch, UlyssesAttention, pack_shard
from ulysses.parallel import gather_tokens
from ulysses.parallel.kernels.choice import KERNELS, resolve_kernel
from ulysses.zero.construct import initialize_distributed

CHECKED_HEADS = [(14, 2), (12, 2), (28, 4), (24, 8), (40, 8), (32, 8), (16, 2)]
CHECKED_LENGTHS = [333, 1, 1000, 1, 64, 2048, 517]
REPEATS = 5


def main() -> None:
    p = plain_parser(__doc__)
    p.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    p.add_argument("--check", action="store_true", help="compare with one process and exit")
    add_options(
        p,
        heads=(32, "query heads"),
        kv_heads=(8, "key-value heads"),
        head_dim=(128, "width of a head"),
        documents=(1, "equal documents in the pack"),
        tokens=([32768, 131072], "lengths of packs"),
    )
    a, device = p.parse_args(), initialize_distributed()
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = product(a.kernels, [(a.heads, a.kv_heads)], [half], a.tokens)
    if a.check:
        cases = product(a.kernels, CHECKED_HEADS, (torch.float32, torch.bfloat16), [0])
    world = dist.get_world_size()
    for kernel, heads, dtype, tokens in cases:
        lengths = [tokens // a.documents] * a.documents if tokens else CHECKED_LENGTHS
        batch, alone = (packed(lengths, ranks, heads, device) for ranks in (world, 1))
        case = f"{kernel} {heads} {str(dtype).removeprefix('torch.')} on {world} ranks"
        try:
            resolve_kernel(kernel, device, dtype, a.head_dim)
        except ValueError as refusal:
            found = str(refusal)
        else:
            attention = UlyssesAttention(batch.mesh, *heads, a.head_dim, kernel)
            if a.check:
                found = check(attention, batch, alone, dtype)
            else:
                found = measure(attention, batch, dtype, lengths)
        if batch.mesh.is_main:
            print(f"{case}: {found}", flush=True)
    dist.destroy_process_group()


def packed(
    lengths: list[int], ranks: int, heads: tuple[int, int], device: torch.device
) -> ShardedBatch:
    rows = [Sequence(torch.zeros(n, dtype=torch.uint8), torch.ones(n)) for n in lengths]
    return pack_shard(rows, ParallelMesh(ranks, num_heads=heads[0]), device)


def check(
    attention: UlyssesAttention, batch: ShardedBatch, alone: ShardedBatch, dtype: torch.dtype
) -> str:
    """Compare the kernel on all ranks with itself on one; a wrong tensor ends the program."""
    heads, key_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    device = batch.tokens.device
    draw = torch.Generator(device).manual_seed(0)
    # of the whole pack: query, key, value, and the gradient of the output
    full = [
        torch.randn(batch.num_tokens, h, width, generator=draw, device=device).to(dtype)
        for h in (heads, key_heads, key_heads, heads)
    ]
    # in the pack, tail included
    indices = batch.cu_seqlens[batch.sequence_ids] + batch.positions
    tail = batch.attention_plan.total - batch.num_tokens
    mine = [torch.cat([x, x.new_zeros(tail, *x.shape[1:])])[indices] for x in full]
    single = UlyssesAttention(None, heads, key_heads, width, attention.kernel)
    many, one = (
        out_and_gradients(attention, mine, batch),
        out_and_gradients(single, full, alone),
    )
    errors = {}
    for name, x, wanted in zip(("out", "dq", "dk", "dv"), many, one):
        errors[name] = float((gather_tokens(x, batch) - wanted).norm() / wanted.norm())
    told = ", ".join(f"{name} is off by {error:.1e}" for name, error in errors.items())
    # In bfloat16 the sums over copies of keys and values round once more.
    if max(errors.values()) > (1e-5 if dtype == torch.float32 else 1e-2):
        raise SystemExit(f"{attention.kernel} {heads}/{key_heads} heads {dtype}: {told}")
    return told


def out_and_gradients(
    attention: UlyssesAttention, inputs: list[Tensor], batch: ShardedBatch
) -> list[Tensor]:
    *leaves, upstream = (x.detach().requires_grad_() for x in inputs)
    out = attention(*leaves, plan=batch.attention_plan)
    return [out.detach(), *grad(out, leaves, upstream.detach())]


def measure(
    attention: UlyssesAttention, batch: ShardedBatch, dtype: torch.dtype, lengths: list[int]
) -> str:
    """Return milliseconds of each stage on the slowest rank, and TFLOP/s."""
    plan, local, device = batch.attention_plan, batch.tokens.numel(), batch.tokens.device
    heads, width = (attention.num_heads, attention.num_kv_heads), attention.head_dim
    q, k, v, upstream = (
        torch.randn(local, h, width, device=device, dtype=dtype, requires_grad=True)
        for h in (*heads, heads[1], heads[0])
    )
    rounds = []
    for _ in range(REPEATS + 2):
        times: dict[str, float] = {}

        def timed(
            name: str, function: Callable[..., Any], *inputs: Any, times: Any = times
        ) -> Any:
            wait(device)
            began = time.perf_counter()
            result = function(*inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name] = time.perf_counter() - began
            return result

        exchange = attention.exchange(plan)
        with torch.no_grad():
            shards = timed("exchange_qkv", exchange.to_heads, (q, k, v))
            kept = timed("attend", attention.attend_forward, shards, plan)
            timed("exchange_out", exchange.to_tokens, kept[0])
            saved = torch.ones_like(kept[0]), shards, kept, plan
            grads, _ = timed("attend_backward", attention.attend_backward, *saved)
            timed("exchange_qkv_backward", exchange.to_heads_backward, grads)
        del shards, kept, saved, grads
        timed("all", lambda: grad(attention(q, k, v, plan=plan), (q, k, v), upstream))
        rounds.append([*times.values()])
    # the first ones compile and warm up
    slowest = torch.tensor(rounds[2:], device=device).amin(0)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    stages = dict(zip(times, slowest.tolist()))
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    work = 4 * pairs * heads[0] * width / dist.get_world_size() / 1e12
    return (
        f"{sum(lengths)} tokens  "
        + "  ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in stages.items())
        + f"  kernel {work / stages['attend']:.0f} / {2.5 * work / stages['attend_backward']:.0f} TFLOP/s,"
        f" with exchanges {3.5 * work / stages['all']:.0f}"
    )


if __name__ == "__main__":
    main()
