"""Time and memory of full training steps: torchrun --nproc_per_node 8 benchmarks/throughput.py --seq 32768 131072

Random weights and tokens, real forward, backward, gradient clipping and AdamW. Prints one JSON line per case and a
table at the end; `--peer FILE` runs another harness's command with the same shape afterwards for a ratio in one call.
Model FLOPs: 6 N T + 6 L (H E) sum(length^2) (causal attention counted half, recomputation not at all).
Executed FLOPs: what the recompute level really runs.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

from models.arch import architecture
from models.decoder import CausalLM
from models.layers import DecoderLayer
from ulysses.gradients.policy import StepContext
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.kernels import resolve_kernel
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import RandomWeights, matrix_sizes
from ulysses.training.config import OptimizerConfig
from ulysses.training.gradient_config import GradientsConfig
from ulysses.training.metrics import device_peak_flops, model_flops
from ulysses.training.optim import adamw
from ulysses.zero.construct import build_partitioned, initialize_distributed
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", default="llama3-8b")
    p.add_argument("--layers", type=int, default=0, help="use only so many layers; 0 uses all")
    p.add_argument("--seq", type=int, nargs="+", default=[32768])
    p.add_argument("--sp", type=int, default=0, help="Ulysses degree; 0 is the world size")
    p.add_argument("--recompute", nargs="+", default=["block"], help="one level for all lengths, or one per length")
    p.add_argument("--offload", default="none")
    p.add_argument("--attention", default="auto")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--profile", default="", help="write a trace of one step of the last length into this folder")
    return p.parse_args()


def main() -> None:
    a = parse()
    device = initialize_distributed()
    world = dist.get_world_size()
    shape = architecture(a.arch)
    if a.layers:
        shape = type(shape).from_hf({**shape.to_hf(), "num_hidden_layers": a.layers})
    mesh = ParallelMesh(a.sp or world, num_heads=shape.num_attention_heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = derive(dtype=dtype, **matrix_sizes(shape))
    model = build_partitioned(lambda: CausalLM(shape, mesh, attention=a.attention), settings, RandomWeights(shape, 0))
    engine = ZeroEngine(model.train(), settings, adamw(model, OptimizerConfig(lr=1e-6), on_gpu=device.type == "cuda"), (DecoderLayer,))
    policies = GradientsConfig().chain()
    levels = a.recompute * len(a.seq) if len(a.recompute) == 1 else a.recompute
    rows = []
    if dist.get_rank() == 0:
        print(resolve_kernel(a.attention, device, dtype, shape.head_dim, documents=1).reason, flush=True)
    for seq, level in zip(a.seq, levels, strict=True):
        try:
            rows.append(measure(a, engine, policies, shape, mesh, seq, level, world))
        except torch.OutOfMemoryError:
            rows.append({"seq": seq, "recompute": level, "oom": True})
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
        if rows[-1].get("oom"):
            break
    dist.barrier()
    os._exit(0)


def measure(a, engine, policies, shape, mesh, seq, level, world):
    device = engine.device
    engine.module.model.set_memory(level)
    generator = torch.Generator().manual_seed(1 + mesh.dp_rank)
    tokens = torch.randint(0, shape.vocab_size, (seq,), generator=generator)
    batch = pack_shard([Sequence(tokens, torch.ones(seq))], mesh, device)
    count = (seq - 1) * mesh.data_parallel_size
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, loss, norm = [], 0.0, 0.0
    for step in range(a.steps + 1):
        _wait(device)
        began = time.perf_counter()
        loss_sum = -engine(batch).logps.sum()
        engine.backward(loss_sum * (world / count), last=True)
        context = StepContext(step=step, total_steps=a.steps + 1, loss=0.0, lr=1e-6, seed=0)
        norm = policies.apply(engine.gradients(), context)
        engine.step([1e-6] * len(engine.zero.optimizer.param_groups))
        _wait(device)
        times.append(time.perf_counter() - began)
    if a.profile and seq == a.seq[-1]:
        profile(a, engine, policies, batch, world / count)
    total = loss_sum.detach().clone()
    dist.all_reduce(total)
    loss = float(total) / count
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    width = shape.num_attention_heads * shape.head_dim
    flops = model_flops(shape.num_parameters(), shape.num_hidden_layers, width, seq, float(seq) ** 2) * mesh.data_parallel_size
    peak = device_peak_flops()
    return {
        "engine": "ours", "arch": a.arch, "layers": shape.num_hidden_layers, "gpus": world,
        "sp": mesh.sequence_parallel_size, "seq": seq, "recompute": level,
        "step_s": round(seconds, 3), "first_s": round(times[0], 2), "tok_s_gpu": round(seq * mesh.data_parallel_size / seconds / world),
        "model_tflops_gpu": round(flops / seconds / world / 1e12, 1), "mfu": round(flops / seconds / world / peak, 3) if peak else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "loss": round(loss, 4), "report": norm,
    }  # fmt: skip


def profile(a, engine, policies, batch, scale):
    """Trace one step; rank 0 prints the kernels that take longest and writes the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        engine.backward(-engine(batch).logps.sum() * scale, last=True)
        policies.apply(engine.gradients(), StepContext(step=1, total_steps=9, loss=0.0, lr=1e-6, seed=0))
        engine.step([1e-6] * len(engine.zero.optimizer.param_groups))
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        os.makedirs(a.profile, exist_ok=True)
        trace.export_chrome_trace(os.path.join(a.profile, "step.json.gz"))
        averages = trace.key_averages()
        print(averages.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))
        print(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main()
