"""Steps of SFT, DPO, RM and KTO at the same packed length, by train.py itself, one after the other in one call.

    python benchmarks/stages.py --gpus 8 --arch qwen2.5-7b --tokens 262144
    python benchmarks/stages.py --gpus 1 --arch llama3-8b --tokens 65536 --stages dpo --model.lora.rank 8
    python benchmarks/stages.py --gpus 1 --tokens 8192 --prompt 6144 --stages dpo --batch.share_prompts false
    python benchmarks/stages.py --gpus 1 --tokens 7168 --prompt 6144 --answers 8 --stages rm
    python benchmarks/stages.py --gpus 1 --arch qwen2.5-1.5b --tokens 16384 --prompt 128 --stages ppo

A step of SFT trains two documents of `--tokens` tokens, of DPO and RM a pair of them, of KTO two examples, whose KL
baseline is a forward pass over as many tokens again that is not counted. Rows are a question of `--prompt` tokens (or
a short one) and random words as the answers, cut to exactly that length; DPO's reference log-probabilities are cached
before the first step, and KTO's reference is run in every step. PPO answers `--examples` prompts and trains on them,
twice; the second step counts. Any of train.py's settings may follow. Prints JSON lines and a table of the median step
after the first two of `--steps`; `to_sft` compares tokens per second.
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import WORDS, add_options, parser, say, table, torchrun
from tokenizers import Tokenizer

from examples.demo import ROOT, read_metrics

COLUMNS = (
    "stage", "gpus", "sp", "tokens", "tokens_shared", "seconds", "tokens_per_second", "to_sft", "mfu",
    "peak_memory_gib", "loss", "error",
)  # fmt: skip
STAGES = ("sft", "dpo", "rm", "kto")
PARTS = ("time/sampling", "time/rollout")  # of the step in which ppo samples


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--stages", nargs="+", default=list(STAGES), choices=(*STAGES, "ppo"))
    add_options(
        p,
        tokens=(32768, "tokens of a document, or of each side of a pair"),
        prompt=(0, "tokens of the prompt, out of --tokens"),
        answers=(2, "answers of every example of rm"),
        examples=(512, "prompts of a step of ppo"),
        sp=(0, "Ulysses degree; 0 is all processes"),
        steps=(4, "optimizer steps"),
    )
    a, rest = p.parse_known_args()
    a.sp = a.sp or a.gpus
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for stage in a.stages:
            rows.append(run(a, rest, stage, Path(name)))
            say(rows[-1], a.out)
    speeds = {row["stage"]: row["tokens_per_second"] for row in rows if "error" not in row}
    for row in rows:
        if {"sft", row["stage"]} <= {*speeds}:
            row["to_sft"] = f"{speeds[row['stage']] / speeds['sft']:.1%}"
    print(table(rows, COLUMNS))


def run(a: Any, rest: list[str], stage: str, folder: Path) -> dict[str, Any]:
    """Train some steps in processes of their own; return what the middle step logged, or the error."""
    data, output, tokenizer = (
        folder / f"{stage}.jsonl",
        folder / stage,
        ROOT / "configs/demo/data/tokenizer",
    )
    is_ppo = stage == "ppo"
    count = 2 * (a.examples if is_ppo else a.steps)
    lines = map(json.dumps, examples(stage, count, a, tokenizer / "tokenizer.json"))
    data.write_text("\n".join(lines))
    given = {
        "stage": stage, "model.arch": a.arch, "model.init": "random", "model.tokenizer": tokenizer,
        "data.train": data, "data.max_length": a.tokens, "data.truncation": "keep_start",
        "data.cache": folder / "cache",
        "batch.examples": 1 if stage in ("dpo", "rm") else 2,
        "batch.tokens_per_microbatch": max(2, a.answers) * a.tokens,
        "parallel.sequence_parallel_size": a.sp, "optimizer.lr": 1e-6,
        "run.steps": a.steps, "run.output": output,
        "run.export": "false", "run.save_last": "false", "run.save_minutes": 0,
    }  # fmt: skip
    if is_ppo:
        given |= {
            "ppo.reward": "ulysses.rl.rewards:gsm8k_reward", "ppo.epochs": 1, "run.steps": 2,
            "batch.examples": a.examples, "data.max_length": a.prompt + 64,
        }  # fmt: skip
    if a.layers:
        given["model.config.num_hidden_layers"] = a.layers
    arguments = [f"--{name}={value}" for name, value in given.items()]
    command = [*torchrun(a.gpus), str(ROOT / "train.py"), *arguments, *rest]
    row = {"stage": stage, "gpus": a.gpus, "sp": a.sp}
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        return {**row, "error": "see above"}
    steps = read_metrics(output)
    counted = sorted(steps[2:] or steps[-1:], key=lambda step: step["seconds"])
    middle = counted[len(counted) // 2]
    row |= {name: round(middle[name], 4) for name in (*COLUMNS, *PARTS) if name in middle}
    return row | {name: int(row[name]) for name in ("tokens", "tokens_per_second")}


def examples(stage: str, count: int, a: Any, tokenizer: Path) -> Iterator[dict[str, Any]]:
    """Yield rows whose answers are random words, more than `--tokens` tokens of them."""
    draw, tokens = random.Random(1), Tokenizer.from_file(str(tokenizer))

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    for number in range(count):
        ids = tokens.encode(words(a.prompt), add_special_tokens=False).ids[: a.prompt]
        text = f"Where is number {number}? {tokens.decode(ids)}"
        prompt = [{"role": "user", "content": text}]
        answers = [
            [{"role": "assistant", "content": words(a.tokens)}] for _ in range(a.answers)
        ]
        conversation = {"messages": [*prompt, *answers[0]]}
        yield {
            "sft": conversation,
            "kto": {**conversation, "label": number % 2 == 0},
            "rm": {"prompt": prompt, "completions": answers},
            "dpo": {"prompt": prompt, "chosen": answers[0], "rejected": answers[-1]},
            "ppo": {"prompt": prompt, "answer": "1"},
        }[stage]


if __name__ == "__main__":
    main()
