"""What it costs when the degree does not divide the heads: python benchmarks/degrees.py --gpus 4

The degree is U ranks that exchange heads times R groups that split the query rows (ulysses/parallel/layout.py). A case
is ARCH[:H/K][@U]: a shape, other query and key-value head counts for it, and a number that U must divide, which splits
the rows of a model whose heads would allow more.

    llama3-8b          on 4 ranks 4 x 1, plain Ulysses: the measure of the others
    llama3-8b@2        the same model and work, 2 x 2
    llama3-8b:16/4     on 4 ranks 4 x 1: a rank attends with the heads and rows that 32/8 gives it on 8 ranks
    qwen2.5-7b:14/2    on 4 ranks 2 x 2: a rank attends with the heads and rows that 28/4 gives it on 8 ranks (4 x 2)

Full training steps as in throughput.py, one sequence over all processes; a torchrun for each case, all in one call. One
JSON line per case and length, then a table; `share` is the MFU as a share of the first case's at that length. Any of
train.py's settings may follow.
"""

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from common import build, launch, leave, measure, parser, remember, say, settings, table

from models.arch import architecture
from ulysses.training.section import ConfigError
from ulysses.zero.construct import initialize_distributed

CASES = (
    "llama3-8b",
    "llama3-8b@2",
    "llama3-8b@1",
    "qwen2.5-7b",
    "qwen2.5-7b@2",
    "llama3-8b:16/4",
    "qwen2.5-7b:14/2",
    "qwen2.5-0.5b",
)
COLUMNS = (
    "case",
    "heads",
    "ranks",
    "tokens",
    "recompute",
    "seconds",
    "tok_s_gpu",
    "model_tflops_gpu",
    "mfu",
    "share",
    "peak_gib",
    "note",
)


def main() -> None:
    p = parser(__doc__)
    p.set_defaults(layers=8)
    p.add_argument("--cases", nargs="+", default=list(CASES))
    p.add_argument("--seq", type=int, nargs="+", default=[65536, 131072])
    p.add_argument("--steps", type=int, default=2, help="timed after a first step of every length")
    a, rest = p.parse_known_args()
    cases = [(case, *read_case(case)) for case in a.cases]
    if "RANK" in os.environ:
        measure_case(*cases[0], a, rest)
        leave()
    same = [
        "--seq",
        *map(str, a.seq),
        "--steps",
        str(a.steps),
        "--layers",
        str(a.layers),
        *(["--out", a.out] if a.out else []),
        *rest,
    ]
    rows: list[dict[str, Any]] = []
    for case in a.cases:
        rows += launch(a.gpus, [__file__, "--cases", case, *same])[0]
    print(table([with_share(row, rows) for row in rows], COLUMNS), flush=True)


def read_case(case: str) -> tuple[str, int, int, int]:
    """Return ARCH[:H/K][@U] as shape, query heads, key-value heads and the forced U; 0 where left out."""
    found = re.fullmatch(r"([^:@]+)(?::(\d+)/(\d+))?(?:@(\d+))?", case)
    if found is None:
        raise SystemExit(
            f"case {case!r} is not ARCH[:H/K][@U], such as llama3-8b, llama3-8b@2 or qwen2.5-7b:14/2"
        )
    arch, *numbers = found.groups()
    heads, kv_heads, split = (int(n or 0) for n in numbers)
    return arch, heads, kv_heads, split


def measure_case(
    case: str, arch: str, heads: int, kv_heads: int, split: int, a: Any, rest: list[str]
) -> None:
    """Measure every length of one case on this rank; a length that does not fit ends it."""
    device = initialize_distributed()
    given = [
        "--parallel.sequence_parallel_size",
        str(dist.get_world_size()),
        "--memory.recompute",
        "none",
        *rest,
    ]
    if heads:
        for name, value in (
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", architecture(arch).head_dim),
        ):
            given += [f"--model.config.{name}", str(value)]
    bench = build(settings(arch, a.layers, given), device, (split,) if split else ())
    labels = {
        "case": case, "heads": f"{bench.shape.num_attention_heads}/{bench.shape.num_key_value_heads}",
        "ranks": f"{bench.mesh.head_parallel_size} x {bench.mesh.row_parallel_size}",
    }  # fmt: skip
    for length in a.seq:
        try:
            say(
                {**labels, **measure(bench, length, steps=a.steps, choice=remember(bench, length))},
                a.out,
            )
        except (ConfigError, torch.OutOfMemoryError) as error:
            say({**labels, "tokens": length, "note": str(error).splitlines()[0]}, a.out)
            break


def with_share(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the model FLOPs per second as a share of the first row's of that length."""
    first = next(r for r in rows if r["tokens"] == row["tokens"])
    if not row.get("model_tflops_gpu") or not first.get("model_tflops_gpu"):
        return row
    return {**row, "share": f"{row['model_tflops_gpu'] / first['model_tflops_gpu']:.1%}"}


if __name__ == "__main__":
    main()
