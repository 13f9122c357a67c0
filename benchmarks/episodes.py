"""Steps on the trajectories of a rollout: every sequence whole, and what they have in common computed once.

    torchrun --nproc_per_node 1 benchmarks/episodes.py --arch llama3-8b --layers 8
    torchrun --nproc_per_node 1 benchmarks/episodes.py --arch qwen3.5-9b --layers 8 --model.config.vocab_size 31040

"episodes" are `--episodes` of `--turns` turns, each of `--shortest` to `--longest` tokens, a quarter of them told; each
has `--forks` further branches, which go on after a turn of an earlier branch. "flat" is as many prompts of `--prompt`
tokens with `--answers` answers each, of a turn's length. A step trains all of them by their negative
log-likelihood, in micro-batches of at most `--tokens` tokens: forward, backward, clipping and AdamW, on random weights
and tokens, with all processes as one sequence-parallel group. Prints a JSON line per case and a table: `gain` is the
time of whole sequences / that of shared ones, `of_saved` its part of what the saved tokens allow. Any of train.py's
settings may follow.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from common import (
    LR,
    Bench,
    add_options,
    build,
    leave,
    parser,
    remember,
    say,
    settings,
    table,
    wait,
)

from ulysses.gradients.policy import StepContext
from ulysses.options import build_policies
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.plan.hardware import GIB
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.passes import packed_batches
from ulysses.zero.construct import initialize_distributed

CASES = ("episodes", "flat")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    add_options(
        p,
        episodes=(8, "episodes, or prompts of the flat case"),
        turns=(6, "turns of an episode"),
        forks=(2, "further branches of an episode"),
        shortest=(1024, "tokens of the shortest turn"),
        longest=(4096, "tokens of the longest turn"),
        prompt=(8192, "tokens of a prompt of the flat case"),
        answers=(8, "answers to each prompt of the flat case"),
        tokens=(65536, "the most tokens of a micro-batch"),
        steps=(3, "steps that are timed, after a first one"),
    )
    a, rest = p.parse_known_args()
    device = initialize_distributed()
    degree = torch.distributed.get_world_size()
    given = [f"--parallel.sequence_parallel_size={degree}", *rest]
    bench, rows = (
        build(settings(a.arch, a.layers, given), device, a.tokens, micro_batches=2),
        [],
    )
    level = remember(bench, a.tokens, micro_batches=2).name
    for case in a.cases:
        row: dict[str, Any] = {
            "case": case,
            "arch": a.arch,
            "layers": a.layers,
            "sp": degree,
            "level": level,
        }
        for form, budget in ("whole", 0), ("shared", a.tokens):
            rollout = Rollout.of(0, trajectories(case, a, bench), tokens_per_microbatch=budget)
            batches = [*micro_batches(rollout, bench, a.tokens)]
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            _, *seconds = (timed(bench, batches) for _ in range(a.steps + 1))
            row |= {
                f"{form}_tokens": int(rollout.lengths.sum()),
                f"{form}_batches": len(batches),
            }
            row[f"{form}_s"] = round(median(seconds), 4)
            if device.type == "cuda":
                row[f"{form}_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        row["gain"] = round(row["whole_s"] / row["shared_s"], 3)
        row["of_saved"] = round(row["gain"] * row["shared_tokens"] / row["whole_tokens"], 3)
        rows.append(row)
        say(row, a.out)
    if bench.mesh.is_main:
        print(table(rows, list(rows[0])), flush=True)
    leave()


def trajectories(case: str, a: Any, bench: Bench) -> list[Trajectory]:
    """Draw the trajectories of a case, the same on every rank."""
    draw, found = np.random.default_rng(1), []

    def turn(length: int, told: int) -> tuple[list[int], list[bool]]:
        tokens = draw.integers(0, bench.shape.vocab_size, length).tolist()
        return tokens, [place >= told for place in range(length)]

    def drawn_turn() -> tuple[list[int], list[bool]]:
        length = int(draw.integers(a.shortest, a.longest + 1))
        return turn(length, length // 4)

    for group in range(a.episodes):
        if case == "flat":
            prompt = turn(a.prompt, a.prompt)
            branches = [[prompt, drawn_turn()] for _ in range(a.answers)]
        else:
            branches = [[drawn_turn() for _ in range(a.turns)]]
            for _ in range(a.forks):
                kept = branches[draw.integers(len(branches))][: draw.integers(1, a.turns)]
                branches.append(kept + [drawn_turn() for _ in range(a.turns - len(kept))])
        for branch in branches:
            tokens, sampled = (sum(parts, []) for parts in zip(*branch))
            # the first token alone is the prompt
            given = tokens[:1], tokens[1:], [0.0] * (len(tokens) - 1), sampled[1:], True
            found.append(Trajectory(*given, group))
    return found


def micro_batches(rollout: Rollout, bench: Bench, tokens: int) -> Iterator[ShardedBatch]:
    """Yield this rank's shards of all micro-batches of a rollout."""
    examples = np.unique(rollout.example_ids).tolist()

    def sequences(numbers: list[int]) -> list[Sequence]:
        return [s for i in numbers for s in rollout[examples[i]].sequences]

    lengths = rollout.sequence_lengths[examples].sum(axis=1).tolist()
    given = lengths, sequences, bench.mesh, bench.engine.device, tokens
    for _, batch in packed_batches(*given):
        yield batch


def timed(bench: Bench, batches: list[ShardedBatch]) -> float:
    """Return the seconds of a step on these micro-batches."""
    engine, device = bench.engine, bench.engine.device
    wait(device)
    began, tokens = time.perf_counter(), sum(batch.num_tokens for batch in batches)
    for batch in batches:
        loss = engine(batch, nll=True).nll * (bench.mesh.world_size / tokens)
        engine.backward(loss, only_microbatch=len(batches) == 1)
    gradients = engine.gradients()
    build_policies(bench.config.gradients).apply(
        gradients, StepContext(step=1, total_steps=9, loss=0.0, lr=LR, seed=0)
    )
    engine.step(gradients, LR)
    wait(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
