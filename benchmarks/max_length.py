"""The longest sequence: planned, then tried, every length in processes of its own, so that one refusal harms nothing.

    python benchmarks/max_length.py --gpus 8 --sp 8                       search
    python benchmarks/max_length.py --gpus 8 --sp 1 8 --offload none      the same GPUs and memory, degree 1 against 8

Fit mode is not a training step: all layers but the last skip the attention kernel, which needs no memory but most
of the time; everything else runs, AdamW included. (`throughput.py --steps 0 --warm 32768` takes a whole step of one
length.) Host memory is used as memory.offload = "auto" decides; every process of `--sp 1` holds a sequence of its own.
The search starts at the length that the planner gives, steps up by an eighth while lengths fit, else halves the
distance to the longest known to fit, in `--tries` trials. Prints JSON lines and a table.
"""

from pathlib import Path
from typing import Any

from common import add_options, changed, launch, parser, settings, table

from ulysses.check.input_files import read_shape
from ulysses.options import stage_of
from ulysses.plan.hardware import GIB, Machine, free_host_bytes
from ulysses.plan.planner import longest_sequence, planner_question

COLUMNS = (
    "sp",
    "dp",
    "seq",
    "recompute",
    "offload",
    "peak_gib",
    "host_gib",
    "note",
    "oom",
    "refused",
)
BLOCK = 16384  # lengths are multiples of it
WARM = 32768


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--offload", default="auto", choices=["none", "auto"])
    add_options(
        p,
        gpu_memory=(139.8, "GiB of each GPU, for the planner"),
        tries=(3, "trials of one search"),
        sp=([0], "degrees to try; 0 is all GPUs"),
    )
    a, rest = p.parse_known_args()
    rows = [search(a, rest, sp or a.gpus) for sp in a.sp]
    print(table(rows, COLUMNS))
    if len(rows) > 1 and all(row["fits"] for row in rows):
        ratio = rows[-1]["seq"] / rows[0]["seq"]
        print(
            f"degree {a.sp[-1]} holds a sequence {ratio:.2f} times as long as degree {a.sp[0]}"
        )


def search(a: Any, rest: list[str], degree: int) -> dict[str, Any]:
    """Try lengths from the planned one on; return the trial of the longest that fits, or of the last one."""
    given = ["--parallel.sequence_parallel_size", str(degree), *rest]
    config = changed(settings(a.arch, a.layers, given), "memory", offload=a.offload)
    host = config.memory.host_memory * GIB or free_host_bytes()
    machine, (shape, _) = Machine(a.gpus, a.gpu_memory * GIB, host), read_shape(config)
    question = planner_question(stage_of(config), shape, machine, BLOCK)
    tokens = longest_sequence(question._replace(documents=1, whole_steps=True))
    print(f"degree {degree}: {tokens:,} tokens planned", flush=True)
    rows: list[dict[str, Any]] = []
    fits = fails = 0
    for _ in range(a.tries):
        tokens = max(tokens // BLOCK, 1) * BLOCK
        if tokens in (fits, fails):
            break
        rows.append(trial(a, rest, degree, tokens))
        fits, fails = (tokens, fails) if rows[-1]["fits"] else (fits, tokens)
        tokens = (fits + fails) // 2 if fails else fits * 9 // 8
    return max(rows, key=lambda row: row["seq"] * row["fits"])


def trial(a: Any, rest: list[str], degree: int, tokens: int) -> dict[str, Any]:
    """Take one step of that length in fresh processes; the row says whether it `fits`."""
    line = (
        f"--arch {a.arch} --layers {a.layers} --sp {degree} --seq {tokens} --steps 0 --skip-attention "
        f"--warm {min(WARM, tokens)} --offload {a.offload}"
    )
    program = str(Path(__file__).with_name("throughput.py"))
    rows, ended = launch(a.gpus, [program, *line.split(), "--out", a.out, *rest])
    row = rows[-1] if rows else {"oom": "no answer: killed, or out of time"}
    fits = ended and not {"refused", "oom"} & {*row}
    return {"sp": degree, "seq": tokens, **row, "fits": fits}


if __name__ == "__main__":
    main()
