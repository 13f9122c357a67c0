"""Time and memory of full training steps: forward, backward, gradient clipping and AdamW, on random weights and tokens.

    torchrun --nproc_per_node 8 benchmarks/throughput.py --seq 32768 131072 --recompute none auto
    torchrun --nproc_per_node 8 benchmarks/throughput.py --seq 65536 65536 --recompute block --offload none auto
    python benchmarks/throughput.py --gpus 8 --seq 32768 --peer "alst.py --cudnn"       both stacks in one call

One JSON line per case, then a table. Any of train.py's settings may follow (`--optimizer.reduce_dtype bfloat16`).
`--peer` names another harness that takes --seq, --layers and --steps under torchrun and prints such lines; it runs
after ours on the same GPUs. Model FLOPs: 6 N T + 6 L (H E) sum(length^2): causal attention counted half,
recomputation not at all. `--skip-attention` is fit mode (max_length.py): it measures memory, not a training step.
"""

import json
import os
import shlex
import sys
import time
from statistics import quantiles
from typing import Any

import torch
from common import (
    FIT,
    Bench,
    add_options,
    build,
    changed,
    launch,
    leave,
    measure,
    parser,
    random_pack,
    remember,
    say,
    settings,
    table,
    take_step,
    wait,
)
from torch import Tensor

from ulysses.config.section import ConfigError
from ulysses.parallel.attention import UlyssesAttention
from ulysses.plan.hardware import GIB
from ulysses.watch.watch import Watch
from ulysses.zero.construct import common_store, initialize_distributed

COLUMNS = (
    "engine", "peer", "sp", "seq", "documents", "micro_batches", "recompute", "weights", "graphs",
    "offload", "seconds", "tok_s_gpu", "mfu", "executed", "peak_gib", "host_gib", "ratio", "watch", "note",
)  # fmt: skip
# What only a training step tells.
SPEEDS = "seconds", "tok_s_gpu", "mfu", "executed", "loss"


def main() -> None:
    p = parser(__doc__)
    add_options(
        p,
        seq=([32768], "lengths, one after the other"),
        documents=(
            [1],
            "sequences of that length in each pack: one for all lengths, or one per length",
        ),
        micro_batches=(1, "packs in each step"),
        sp=(0, "Ulysses degree; 0 is all processes"),
        recompute=(["auto"], "one level for all lengths, or one per length"),
        offload=(["none"], "none or auto: one for all lengths, or one per length"),
        steps=(3, "timed after a first step; 0 times the first one, after --warm"),
        warm=(
            0,
            "one step of this length before: compiles kernels, makes the optimizer's states",
        ),
        gpu_memory=(0.0, "GiB of each GPU that may be used, and are planned for; 0 is all"),
        watch=(0, "compare steps without and with the watch that a run has, so many times"),
        peer=("", "another harness and its own arguments"),
    )
    p.add_argument("--skip-attention", action="store_true", help=FIT)
    a, rest = p.parse_known_args()
    if not (a.steps or a.warm):
        p.error(
            "--steps 0 needs --warm: a first step compiles and makes the optimizer's states"
        )
    if "RANK" in os.environ:
        rows = work(a, rest)
        if os.environ["RANK"] == "0":
            print(table(rows, COLUMNS), flush=True)
        leave()
    rows, _ = launch(a.gpus, [__file__, *sys.argv[1:]])
    if a.peer:
        lengths = " ".join(map(str, a.seq))
        same = f"--seq {lengths} --steps {a.steps} --layers {rows[0]['layers']}"
        theirs, _ = launch(a.gpus, [*shlex.split(a.peer), *same.split()])
        speeds = {row["seq"]: row["tok_s_gpu"] for row in theirs if "tok_s_gpu" in row}
        for row in rows:
            if "tok_s_gpu" in row and row["seq"] in speeds:
                row["ratio"] = f"{row['tok_s_gpu'] / speeds[row['seq']]:.2f}x"
        print(table(rows + theirs, COLUMNS))


def work(a: Any, rest: list[str]) -> list[dict[str, Any]]:
    """Measure every length on this rank; a length that is refused or does not fit ends the list."""
    device = initialize_distributed()
    world = torch.distributed.get_world_size()
    if a.gpu_memory:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(a.gpu_memory * GIB / whole, device)
    config = settings(
        a.arch, a.layers, ["--parallel.sequence_parallel_size", str(a.sp or world), *rest]
    )
    given = a.documents, a.recompute, a.offload
    counts, levels, offloads = (x * len(a.seq) if len(x) == 1 else x for x in given)
    cases = [*zip(a.seq, counts, levels, offloads, strict=True)]
    rows: list[dict[str, Any]] = []
    bench = None
    for seq, documents, level, offload in cases:
        try:
            if bench is None:
                # with the host memory that the first case may use
                first = changed(config, "memory", offload=offload)
                tokens, count = max((length * n, n) for length, n, *_ in cases)
                bench = build(first, device, tokens, count, a.micro_batches)
                if a.skip_attention:
                    skip_attention(bench)
                if a.warm:
                    warm = {"micro_batches": a.micro_batches}
                    measure(bench, a.warm, remember(bench, a.warm, **warm), **warm, steps=0)
            memory = changed(bench.config, "memory", recompute=level, offload=offload)
            here = bench._replace(config=memory)
            several = {"documents": documents, "micro_batches": a.micro_batches}
            choice = remember(here, seq * documents, **several)
            row = measure(here, seq, choice, **several, steps=a.steps)
        except ConfigError as error:
            rows.append(
                {"engine": "ours", "seq": seq, "recompute": level, "refused": str(error)}
            )
            say(rows[-1], a.out)
            return rows
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "pin" not in str(error):
                raise
            print(json.dumps({"seq": seq, "oom": str(error).splitlines()[0][:120]}), flush=True)
            os._exit(3)  # the others wait in a collective: torchrun ends them
        if a.watch:
            row["watch"] = cost_of_watch(here, seq, documents, a)
        if a.skip_attention:
            row = {key: value for key, value in row.items() if key not in SPEEDS} | {
                "note": FIT
            }
        rows.append(row)
        say(row, a.out)
    return rows


def cost_of_watch(bench: Bench, seq: int, documents: int, a: Any) -> str:
    """Return what the watch adds to the time of the steps: the median and quartiles of pairs that are taken in turns.

    Choose the steps so that they take seconds: every process writes and reads once a second.
    """
    batch, device = random_pack(bench, seq, documents), bench.engine.device
    count = (seq - 1) * documents * bench.mesh.data_parallel_size
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * a.watch):
        watched = turn % 4 in (1, 2)  # without, with, with, without
        watch = Watch()
        if watched:
            watch.start(common_store)
        wait(device)
        began = time.perf_counter()
        for step in range(a.steps):
            watch.phase("forward", step)
            take_step(bench, batch, count)
        wait(device)
        times[watched].append(time.perf_counter() - began)
        watch.stop()
    shares = [with_it / without - 1 for without, with_it in zip(*times.values())]
    low, middle, high = quantiles(shares, n=4)
    return f"{middle:+.2%} (quartiles {low:+.2%} and {high:+.2%}, {len(shares)} pairs)"


class SkippedKernel(UlyssesAttention):
    """Hand the queries on as if they were the kernel's output."""

    def attend_forward(self, shards: Any, *_: Any) -> tuple[Tensor, Tensor]:
        return shards[0].clone(), shards[0].new_empty(0, 0)

    def attend_backward(self, dout: Tensor, shards: Any, *_: Any) -> Any:
        return (dout, *map(torch.zeros_like, shards[1:])), ()


def skip_attention(bench: Bench) -> None:
    """Let all layers but the last skip their attention kernel; exchanges and every buffer's size stay."""
    shape = bench.shape
    heads = shape.num_attention_heads, shape.num_key_value_heads
    skipped = SkippedKernel(bench.mesh, *heads, shape.head_dim)
    decoder: Any = bench.engine.module.model
    # the last layer's backward comes first, when most is kept
    for layer in decoder.layers[:-1]:
        layer.self_attn.attention = skipped


if __name__ == "__main__":
    main()
