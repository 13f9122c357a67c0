"""What each of our own parts is worth: one step with all of them, then with one changed at a time, in one call.

    torchrun --nproc_per_node 4 benchmarks/ablation.py --seq 32768 --layers 8

Every variant is an engine of its own, made by train.py's settings; some switch off what has no setting. `ratio` is the time
of a step beside the full one's. Prints a JSON line per variant and a table.
"""

import gc
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from common import Bench, build, leave, measure, parser, planned, remember, say, settings, table

from losses import logprobs_triton
from models import fused_triton
from ulysses.parallel import all_to_all
from ulysses.parallel import kernels as attention_kernels
from ulysses.training.build import read_shape
from ulysses.training.memory import check_head_chunks
from ulysses.training.section import ConfigError
from ulysses.zero.construct import initialize_distributed

ZERO = "--deepspeed.zero_optimization."
COLUMNS = (
    "variant",
    "kernel",
    "recompute",
    "offload",
    "seconds",
    "ratio",
    "tok_s_gpu",
    "peak_gib",
    "refused",
)


class Variant(NamedTuple):
    """Name a change by settings, by what stands in for a module's own (module, name, value), or by modules to be called one by one."""

    name: str
    settings: tuple[str, ...] = ()
    instead: tuple[tuple[Any, str, Any], ...] = ()
    fused: bool = True


VARIANTS = (
    Variant("full"),
    Variant("full, again"),
    Variant("recompute keep_exchange", ("--memory.recompute", "keep_exchange")),
    Variant("recompute keep_attention", ("--memory.recompute", "keep_attention")),
    Variant("recompute block", ("--memory.recompute", "block")),
    Variant("recompute pair", ("--memory.recompute", "pair")),
    Variant(
        "recompute block, heads in 2 groups",
        ("--memory.recompute", "block", "--memory.head_chunks", "2"),
    ),
    Variant(
        "recompute block, activations on the host",
        ("--memory.recompute", "block", "--memory.offload", "checkpoints"),
    ),
    Variant("MLP in tiles of 2,048 rows", ("--memory.mlp_tile", "2048")),
    Variant("Triton kernels of the layers off", instead=((fused_triton, "triton", None),)),
    Variant("Triton kernels of the logits off", instead=((logprobs_triton, "triton", None),)),
    Variant(
        "exchanges packed element by element", instead=((all_to_all, "_is_wide", lambda _: False),)
    ),
    Variant(
        "flash4's own backward tiles",
        instead=((attention_kernels, "_with_larger_tiles", lambda flash4: flash4._flash_attn_bwd),),
    ),
    Variant("layer halves not fused", fused=False),
    Variant("next layer not gathered ahead", (ZERO + "stage3_prefetch_bucket_size", "0")),
    Variant("gathering up to 500M ahead", (ZERO + "stage3_prefetch_bucket_size", "500000000")),
    Variant("weights gathered for each pass", ("--memory.gathered_layers", "0")),
    Variant("gradients all-reduced in float32", (ZERO + "reduce_bucket_size", "500000000")),
)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--seq", type=int, default=32768)
    p.add_argument("--sp", type=int, default=0, help="Ulysses degree; 0 is all processes")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument(
        "--only", default="", help="variants whose name holds this text, and the full one"
    )
    a, rest = p.parse_known_args()
    device = initialize_distributed()
    names = attention_kernels.available_kernels(device)
    kernels = [
        Variant(f"kernel {name}", ("--model.attention", name))
        for name in names
        if name != "reference"
    ]
    rows: list[dict[str, Any]] = []
    for variant in (*VARIANTS, *kernels):
        if variant.name == "full" or a.only in variant.name:
            row = {"variant": variant.name, **run(a, rest, variant, device)}
            if rows and row.get("seconds"):
                row["ratio"] = f"{row['seconds'] / rows[0]['seconds']:.2f}x"
            rows.append(row)
            say(row, a.out)
    if dist.get_rank() == 0:
        print(table(rows, COLUMNS), flush=True)
    leave()


def run(a: Any, rest: list[str], variant: Variant, device: torch.device) -> dict[str, Any]:
    """Build the variant's engine, time it and take it down again."""
    world = dist.get_world_size()
    given = [
        "--memory.recompute",
        "none",
        "--parallel.sequence_parallel_size",
        str(a.sp or world),
        *rest,
    ]
    if "--memory.recompute" in variant.settings:
        given = given[2:]
    config = settings(a.arch, a.layers, [*given, *variant.settings])
    shape, _ = read_shape(config)
    try:
        check_head_chunks(config, shape)
        bench = build(
            config, device, gathered_layers=planned(config, shape, device, a.seq).gathered_layers
        )
    except ConfigError as error:
        return {"refused": str(error)}
    if not variant.fused:
        watch(bench)
    try:
        with ExitStack() as stack:
            for module, name, value in variant.instead:
                stack.enter_context(mock.patch.object(module, name, value))
            return measure(bench, a.seq, steps=a.steps, choice=remember(bench, a.seq))
    finally:
        bench.engine.destroy()
        del bench
        gc.collect()


def watch(bench: Bench) -> None:
    """Hook every projection: the halves of a layer then call their modules one by one."""
    for name, module in bench.engine.module.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda *_: None)


if __name__ == "__main__":
    main()
