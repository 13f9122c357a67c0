"""Steps on packs whose sequences share a prompt: every sequence whole, the prompt computed once, and plain SFT.

    torchrun --nproc_per_node 1 benchmarks/shared_prompts.py --layers 8 --cases 6144,2048,2 30720,2048,2 6144,1024,8
    torchrun --nproc_per_node 2 benchmarks/shared_prompts.py --layers 4 --cases 200000,1024,2 --forms shared sft

A case is PROMPT,ANSWER,BRANCHES in tokens: so many sequences with one prompt and an answer each. "sft" is one sequence
of as many tokens as "shared" computes. A step trains the answers' tokens by their negative log-likelihood: forward,
backward, clipping and AdamW, on random weights and tokens, with all processes as one sequence-parallel group. Prints a
JSON line per case and a table; `gain` is whole / shared, `to_sft` shared / sft. Any of train.py's settings may follow.
"""

from statistics import median
from typing import Any

import torch
from common import (
    Bench,
    Sequence,
    build,
    leave,
    pack_shard,
    parser,
    remember,
    say,
    settings,
    table,
    timed_steps,
)

from ulysses.parallel.batch import ShardedBatch
from ulysses.plan.hardware import GIB
from ulysses.zero.construct import initialize_distributed

FORMS = ("whole", "shared", "sft")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cases", nargs="+", required=True)
    p.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    p.add_argument("--steps", type=int, default=3, help="timed after a first one")
    a, rest = p.parse_known_args()
    device = initialize_distributed()
    degree = torch.distributed.get_world_size()
    given = [f"--parallel.sequence_parallel_size={degree}", *rest]
    cases = [[int(part) for part in case.split(",")] for case in a.cases]
    longest = max((prompt + answer) * branches for prompt, answer, branches in cases)
    bench, rows = build(settings(a.arch, a.layers, given), device, longest), []
    for name, case in zip(a.cases, cases):
        row: dict[str, Any] = {"case": name, "sp": degree}
        for form in a.forms:
            pack = random_tree(bench, form, *case)
            choice = remember(bench, pack.num_tokens)
            (_, *seconds), _ = timed_steps(bench, pack, pack.num_tokens, a.steps)
            row |= {f"{form}_tokens": pack.num_tokens, f"{form}_level": choice.name}
            row[f"{form}_s"] = round(median(seconds), 4)
            if device.type == "cuda":
                row[f"{form}_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        for ratio, above, below in (("gain", "whole", "shared"), ("to_sft", "shared", "sft")):
            if {above, below} <= {*a.forms}:
                row[ratio] = round(row[f"{above}_s"] / row[f"{below}_s"], 3)
        rows.append(row)
        say(row, a.out)
    if bench.mesh.is_main:
        print(table(rows, list(rows[0])), flush=True)
    leave()


def random_tree(
    bench: Bench, form: str, prompt: int, answer: int, branches: int
) -> ShardedBatch:
    """Return this rank's shard of a pack of random tokens; only answers are trained."""
    draw = torch.Generator().manual_seed(1)

    def random(tokens: int) -> torch.Tensor:
        return torch.randint(0, bench.shape.vocab_size, (tokens,), generator=draw)

    shared = random(prompt)
    answers = [random(answer) for _ in range(branches)]
    if form == "sft":
        answers = [torch.cat(answers)]
    number = 0 if form == "shared" else None
    sequences = [
        Sequence(
            torch.cat([shared, one]),
            (torch.arange(prompt + len(one)) >= prompt).float(),
            prompt=number,
            prompt_length=prompt,
        )
        for one in answers
    ]
    return pack_shard(sequences, bench.mesh, bench.engine.device)


if __name__ == "__main__":
    main()
