"""The longest sequence: planned, then tried, every length in processes of its own, so that one refusal harms nothing.

    python benchmarks/max_length.py --gpus 8 --sp 8                       search, fit mode
    python benchmarks/max_length.py --gpus 8 --sp 1 8 --offload none      the same GPUs and memory, degree 1 against 8
    python benchmarks/max_length.py --gpus 8 --sp 8 --tokens 1048576 --complete    one whole step of that length

Fit mode is not a training step: all layers but the last skip the attention kernel, which needs no memory but most
of the time; everything else runs, AdamW included. `--complete` computes all attention. Host memory is used as
memory.offload = "auto" decides; every process of `--sp 1` holds a sequence of its own. The search starts at the
length that the planner gives, steps up by an eighth while lengths fit, else halves the distance to the longest
known to fit, in `--tries` trials. Prints JSON lines and a table.
"""

from pathlib import Path
from typing import Any

from common import FIT, add_options, changed, launch, parser, settings, table

from ulysses.memory.plan import GIB, Machine
from ulysses.run.memory_choice import free_host_bytes, longest_sequence, planner_case
from ulysses.run.preflight import read_shape

COLUMNS = (
    "sp", "dp", "seq", "recompute", "offload", "peak_gib", "device_gib", "host_gib", "fit_seconds", "seconds",
    "tok_s_gpu", "mfu", "executed", "note", "oom", "refused",
)  # fmt: skip
BLOCK = 16384  # lengths are multiples of it
WARM = 32768


def main() -> None:
    p = parser(__doc__)
    p.add_argument(
        "--tokens", type=int, nargs="*", default=[], help="these lengths instead of a search"
    )
    p.add_argument(
        "--complete", action="store_true", help="whole training steps instead of fit mode"
    )
    p.add_argument("--offload", default="auto", choices=["none", "auto", "checkpoints"])
    add_options(
        p,
        recompute=("auto", "recompute level, as in memory.recompute"),
        gpu_memory=(139.8, "GiB of each GPU, for the planner"),
        tries=(3, "trials of one search"),
        block=(BLOCK, "lengths are multiples of it"),
        timeout=(590.0, "seconds of one trial"),
        sp=([0], "degrees to try; 0 is all GPUs"),
    )
    a, rest = p.parse_known_args()
    rows = []
    for degree in [sp or a.gpus for sp in a.sp]:
        found = [trial(a, rest, degree, tokens) for tokens in a.tokens] or search(
            a, rest, degree
        )
        rows += [row for row in found if row["fits"]][-1:] if not a.tokens else found
    print(table(rows, COLUMNS))
    lengths = {row["sp"]: row["seq"] for row in rows if row["fits"]}
    if len(lengths) > 1:
        low, high = min(lengths), max(lengths)
        ratio = lengths[high] / lengths[low]
        print(f"degree {high} holds a sequence {ratio:.2f} times as long as degree {low}")


def trial(a: Any, rest: list[str], degree: int, tokens: int) -> dict[str, Any]:
    """Take one step of that length in fresh processes; the row says whether it `fits`."""
    line = (
        f"throughput.py --arch {a.arch} --layers {a.layers} --sp {degree} --seq {tokens} --steps 0 "
        f"--warm {min(WARM, tokens)} --recompute {a.recompute} --offload {a.offload} "
        f"{'' if a.complete else '--skip-attention'}"
    )
    program, *arguments = line.split()
    program = str(Path(__file__).with_name(program))
    rows, ended = launch(a.gpus, [program, *arguments, "--out", a.out, *rest], a.timeout)
    found = rows[-1] if rows else {"oom": "no answer: killed, or out of time"}
    return {
        "sp": degree, "seq": tokens, **found, "note": "" if a.complete else FIT,
        "fits": ended and "refused" not in found and "oom" not in found,
    }  # fmt: skip


def search(a: Any, rest: list[str], degree: int) -> list[dict[str, Any]]:
    """Try lengths from the planned one on; return the trials, the longest that fits last."""
    config = settings(
        a.arch, a.layers, ["--parallel.sequence_parallel_size", str(degree), *rest]
    )
    config = changed(config, "memory", recompute=a.recompute, offload=a.offload)
    shape, _ = read_shape(config)
    machine = Machine(
        a.gpus, a.gpu_memory * GIB, config.memory.host_memory * GIB or free_host_bytes()
    )
    case = planner_case(config, shape, machine, BLOCK)
    planned = longest_sequence(case._replace(documents=1))
    print(f"degree {degree}: {planned:,} tokens planned", flush=True)
    rows: list[dict[str, Any]] = []
    fits, fails, tokens = 0, 0, max(planned // a.block, 1) * a.block
    while len(rows) < a.tries and tokens not in (fits, fails):
        rows.append(trial(a, rest, degree, tokens))
        fits, fails = (tokens, fails) if rows[-1]["fits"] else (fits, tokens)
        tokens = (fits + fails) // 2 if fails else fits * 9 // 8
        tokens = max(tokens // a.block, 1) * a.block
    return sorted(rows, key=lambda row: row["seq"] * row["fits"])


if __name__ == "__main__":
    main()
