"""Short sequences, one packed sequence per GPU and step, beside TRL's SFTTrainer with Liger kernels over ZeRO-3.

    python benchmarks/short.py --gpus 8 --peer trl_sft.py

    data parallel at 8k, nothing recomputed      our packs against the peer without checkpointing
    data parallel at 32k                         the planner's choice against the peer with checkpointing
    sequence parallel, as many 32k sequences     one pack of one sequence per GPU, cut over all of them: the same tokens

All in one call on the same GPUs; prints JSON lines and a table with ratios. The peer needs trl, liger-kernel and
datasets. Without --peer ours are measured alone.
"""

from pathlib import Path
from typing import Any

from common import launch, parser, table

COLUMNS = (
    "case",
    "engine",
    "peer",
    "sp",
    "seq",
    "recompute",
    "seconds",
    "tok_s_gpu",
    "model_tflops_gpu",
    "peak_gib",
    "to_peer",
    "to_dp",
)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--peer", default="", help="the harness's file")
    p.add_argument("--short", type=int, default=8192)
    p.add_argument("--long", type=int, default=32768)
    p.add_argument("--steps", type=int, default=4)
    a, rest = p.parse_known_args()
    ours = [
        str(Path(__file__).with_name("throughput.py")),
        "--arch",
        a.arch,
        "--layers",
        str(a.layers),
        "--steps",
        str(a.steps),
    ]
    ours += [*(["--out", a.out] if a.out else []), *rest]
    short, long, gpus = str(a.short), str(a.long), str(a.gpus)
    rows = launch(
        a.gpus, [*ours, "--sp", "1", "--seq", short, long, "--recompute", "none", "auto"]
    )[0]
    if a.gpus > 1:
        rows += launch(a.gpus, [*ours, "--sp", gpus, "--seq", long, "--documents", gpus])[0]
    if a.peer:
        layers = str(rows[0]["layers"])
        for arguments in (["--seq", short, "--no-checkpointing"], ["--seq", long]):
            rows += launch(
                a.gpus,
                [
                    a.peer,
                    *arguments,
                    "--liger",
                    "--cudnn",
                    "--layers",
                    layers,
                    "--steps",
                    str(a.steps + 2),
                ],
            )[0]
    print(table([compared(row, rows) for row in rows], COLUMNS))


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the ratios of tokens per second: to the peer's of that length, and of sequence to data parallel."""

    def ratio(other: dict[str, Any]) -> str | None:
        same = (
            other["seq"] == row["seq"]
            and other is not row
            and row.get("tok_s_gpu")
            and other.get("tok_s_gpu")
        )
        return f"{row['tok_s_gpu'] / other['tok_s_gpu']:.2f}x" if same else None

    kind = "peer" if "peer" in row else "data parallel" if row["sp"] == 1 else "sequence parallel"
    peer = next((ratio(other) for other in rows if "peer" in other and ratio(other)), None)
    data = next((ratio(other) for other in rows if other.get("sp") == 1 and ratio(other)), None)
    return {
        **row,
        "case": kind,
        "to_peer": peer if "peer" not in row else None,
        "to_dp": data if kind == "sequence parallel" else None,
    }


if __name__ == "__main__":
    main()
