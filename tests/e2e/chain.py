"""The whole chain of stages, each killed once in the middle and resumed.

                   +--> rm ---------+ (its scores)
    pt --> sft ----+--> dpo         |         every arrow is an export/ folder in Hugging Face format
                   +--> kto         v
                   +-------------> ppo, and grpo, which has no value model

    python tests/e2e/chain.py --output runs/chain                                    the demo's data, minutes on a CPU
    python tests/e2e/chain.py --output runs/chain --data FOLDER --size 150m --max-length 8192

Both write table.txt; `ulysses report runs/chain/sft` draws a curve. FOLDER holds STAGE_train.jsonl and
STAGE_eval.jsonl for every stage, and tokenizer.json or tokenizer/. A killed stage dies by SIGKILL four steps after its
only checkpoint; what it logged in between is an uninterrupted run's, so the resumed run must log the same.
"""

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs/demo/data"
sys.path.insert(0, str(ROOT))  # for examples/, which is not installed

from tests.e2e.launch import command, metrics, without_times, words  # noqa: E402
from tests.harness import free_port  # noqa: E402
from ulysses.data.read.tokenizer import load_tokenizer  # noqa: E402

START = {"sft": "pt", "distill": "pt"}  # the others start at sft
HELD_OUT = {
    "pt": "perplexity", "sft": "perplexity", "distill": "divergence", "rm": "accuracy", "dpo": "rewards/accuracies",
    "kto": "rewards/margins", "ppo": "objective/scores", "grpo": "objective/scores",
}  # fmt: skip
ROLLOUTS = ("ppo", "grpo")
AFTER = 4  # steps from the checkpoint to the kill


class Plan(NamedTuple):
    """How a stage trains; PPO's examples are prompts, with one answer each, of GRPO four."""

    lr: float
    steps: int
    examples: int
    held_out: int


@dataclass(frozen=True)
class Recipe:
    """A model's shape, a table with a `Plan` for every stage, and the settings of PPO."""

    shape: dict[str, Any]
    dtype: str
    table: str
    ppo: str

    def plan(self, stage: str) -> Plan:
        rows = {name: row for name, *row in map(str.split, self.table.strip().splitlines())}
        lr, *counts = rows[stage]
        return Plan(float(lr), *map(int, counts))


RECIPES = {
    "tiny": Recipe(
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2},
        "float32",
        """
        pt       6e-3   24   16    96
        sft      6e-3   56   16    96
        distill  6e-3   24   16    96
        rm       2e-3   24   16    96
        dpo      5e-4   16   16    96
        kto      1e-3   16   32    96
        ppo      1e-3   24   64    96
        grpo     1e-3   24   16    96
        """,
        "--ppo.max_new_tokens 32",
    ),
    "150m": Recipe(
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
         "num_attention_heads": 12, "num_key_value_heads": 4},
        "bfloat16",
        """
        pt       1e-3   80   16    64
        sft      3e-4   60   64   128
        distill  3e-4   60   64   128
        rm       5e-5   54   64  1000
        dpo      2e-5   40   64  1000
        kto      2e-5   40  128   512
        ppo      1e-4  160   64   128
        grpo     1e-4  160   16   128
        """,
        "--ppo.max_new_tokens 128 --ppo.generation_batch 128",
    ),
}  # fmt: skip


@dataclass
class Chain:
    """Run the stages one after the other.

    Args:
        data: holds STAGE_train.jsonl and STAGE_eval.jsonl, and tokenizer/ or a tokenizer.json with ChatML's tokens.
        launch: (arguments of train.py, processes, log folder, metrics.jsonl, step to be killed after or 0) -> None;
            raises if the run fails.
        kill: the stages that are killed once.
        changes: further settings by stage.
    """

    output: Path
    recipe: Recipe
    data: Path
    launch: Callable[[list[str], int, Path, Path, int], None]
    processes: int = 1
    max_length: int = 256
    kill: Iterable[str] = tuple(HELD_OUT)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file, folder = self.data / "tokenizer.json", self.data / "tokenizer"
        self.tokenizer = file if file.exists() else folder
        # the special tokens of a file alone
        self.bare = {"eos_token": "<|endoftext|>"} if file.exists() else {}

    def run(self) -> dict[str, dict[str, Any]]:
        """Train every stage; returns their records (see `measure`)."""
        return {stage: self.train(stage) for stage in HELD_OUT}

    def train(self, stage: str) -> dict[str, Any]:
        folder, began, saved = self.output / stage, time.monotonic(), 0
        if stage == "pt":
            self._write_model(self.output / "model")
        arguments, metrics = self.arguments(stage, folder), folder / "metrics.jsonl"
        if stage in self.kill:
            saved = self.save_every(stage)
            logs = folder.parent / f"{folder.name}-logs-killed"
            self.launch(arguments, self.processes, logs, metrics, saved + AFTER)
            kept = [p.name for p in (folder / "checkpoints").glob("step-*")]
            assert kept == [f"step-{saved}"], "killed too late"
            shutil.copy(metrics, folder / "killed.jsonl")
        self.launch(
            arguments, self.processes, folder.parent / f"{folder.name}-logs", metrics, 0
        )
        found = measure(stage, folder, saved, self.recipe.plan(stage).examples)
        found["seconds"] = time.monotonic() - began
        print(line(stage, found), flush=True)
        return found

    def save_every(self, stage: str) -> int:
        """The step of the only checkpoint before the last; an odd one, so that it lies inside a rollout."""
        return self.recipe.plan(stage).steps // 2 | 1

    def arguments(self, stage: str, folder: Path) -> list[str]:
        """The command line of one stage, the same before and after the kill."""
        plan, most = self.recipe.plan(stage), self.max_length
        algorithm = "ppo" if stage in ROLLOUTS else stage
        rows = "sft" if stage == "distill" else algorithm
        typed = f"""
        --stage {algorithm} --model.dtype {self.recipe.dtype} --run.resume auto --run.seed 1 --run.keep 1
        --run.steps {plan.steps} --run.save_every {self.save_every(stage) if stage in self.kill else 0}
        --data.max_length {most} --batch.examples {plan.examples} --batch.tokens_per_microbatch {4 * most}
        --optimizer.lr {plan.lr} --optimizer.warmup 0.1 --parallel.sequence_parallel_size {self.processes}
        """
        held_out = {
            "path": str(self.data / f"{rows}_eval.jsonl"),
            "max_examples": plan.held_out,
        }
        values: dict[str, Any] = {
            "run.output": folder, "data.cache": self.output / "cache",
            "data.train": self.data / f"{rows}_train.jsonl", "data.eval": [held_out],
            "model.path": self.output / START.get(stage, "sft") / "export",
        }  # fmt: skip
        if stage == "pt":
            typed += "--model.init random --pt.z_loss 1e-4"
            values |= {"model.path": self.output / "model", "model.tokenizer": self.tokenizer}
            values["model.special_tokens"] = self.bare
        else:
            typed += "--data.truncation keep_end"
        if stage == "distill":
            values["distill.teacher"] = self.output / "sft/export"
        if stage in ("sft", "distill") and self.bare:
            typed += " --data.chat_template chatml"  # from here on the exports carry it
        if stage in ROLLOUTS:
            values["ppo.reward"] = self.output / "rm/export"
            typed += f"""
            --ppo.epochs 2 --ppo.minibatches 2 --ppo.value_lr_factor 10 --ppo.value_coefficient 0.5 {self.recipe.ppo}
            --optimizer.schedule constant --optimizer.warmup 4 --data.truncation drop --data.max_length {min(most, 256)}
            """
        if stage == "grpo":
            typed += "--ppo.advantage group --ppo.answers_per_prompt 4 --ppo.kl_in loss --ppo.kl_estimator k3"
        return [*typed.split(), *words(values | self.changes.get(stage, {}))]

    def _write_model(self, folder: Path) -> None:
        """Write the config.json of an untrained Llama for this tokenizer."""
        tokenizer = load_tokenizer(self.tokenizer, **self.bare)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": "llama", "vocab_size": -(-len(tokenizer) // 64) * 64, "rms_norm_eps": 1e-5,
            "max_position_embeddings": max(2048, self.max_length), "tie_word_embeddings": bool(self.bare),
            "eos_token_id": tokenizer.eos_token_id, **self.recipe.shape,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))


def launch(
    arguments: list[str], processes: int, logs: Path, metrics: Path, kill_after: int
) -> None:
    """Start train.py under torchrun and wait; kill all processes as soon as step `kill_after` is logged.

    Raises:
        RuntimeError: with the end of the log, if a process fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    line = [*command("torchrun", processes, free_port()), ROOT / "train.py", *arguments]
    with (logs / "0.out").open("w") as log:
        launcher = psutil.Popen(line, cwd=ROOT, stdout=log, stderr=log)
    try:
        while launcher.poll() is None:
            if kill_after and metrics.exists():
                if metrics.read_text().count("\n") >= kill_after:
                    return
            time.sleep(0.02)
    finally:
        if launcher.is_running():
            for process in (*launcher.children(recursive=True), launcher):
                process.kill()
        launcher.wait()
    if kill_after or launcher.returncode:
        raise RuntimeError(f"{logs}: ended by itself\n{(logs / '0.out').read_text()[-3000:]}")


def repeated(folder: Path, saved: int) -> list[tuple[dict[str, float], ...]]:
    """Pair what the killed process logged after its checkpoint with what the resumed one logged, times left out."""
    again = {m["step"]: m for m in metrics(folder)}
    before = [m for m in metrics(folder, "killed.jsonl") if m["step"] > saved]
    return [tuple(without_times([one, again[one["step"]]])) for one in before]


def measure(stage: str, folder: Path, saved: int, examples: int) -> dict[str, Any]:
    """Return the numbers of one stage: means over the first and last tenth, and its held-out value.

    Args:
        saved: the step of the checkpoint that it was resumed from; 0 if it was not killed.
        examples: per step; for PPO and GRPO, prompts per rollout.
    """
    lines = metrics(folder)
    last, name = lines[-1], "objective/scores" if stage in ROLLOUTS else "loss"
    rows = list({m["rollout"]: m for m in lines}.values()) if stage in ROLLOUTS else lines
    tenth = max(1, len(rows) // 10)
    begin, end = rows[:tenth], rows[-tenth:]
    held_out, deviation = last[f"eval/{HELD_OUT[stage]}"], last.get("eval/objective/scores_std")
    if "accurac" in HELD_OUT[stage]:
        deviation = math.sqrt(held_out * (1 - held_out))
    answers = examples * (4 if stage == "grpo" else 1)
    said = (folder.parent / f"{folder.name}-logs/0.out").read_text()
    [n] = re.findall(r"held-out data: .* kept (\d+) examples", said)
    again = repeated(folder, saved) if saved else []
    return {
        "steps": len(lines), "resumed_at": saved, "curve": name, "held_out": held_out,
        "first": sum(m[name] for m in begin) / tenth, "last": sum(m[name] for m in end) / tenth,
        "held_out_error": (deviation or 0.0) / math.sqrt(int(n)),
        "loss_difference": max((abs(a["loss"] - b["loss"]) for a, b in again), default=0.0),
        "rise_error": math.sqrt(sum(m.get("objective/scores_std", 0) ** 2 for m in begin + end) / answers) / tenth,
    }  # fmt: skip


def line(stage: str, r: dict[str, Any]) -> str:
    """Return a stage's line of the table."""
    return (
        f"{stage:5} {r['steps']:5} steps {r['seconds']:6.1f} s  {r['curve']} {r['first']:.3f} -> {r['last']:.3f}  "
        f"{HELD_OUT[stage]} {r['held_out']:.3f} +- {r['held_out_error']:.3f}  "
        f"resumed at {r['resumed_at']}; repeated loss off by {r['loss_difference']:.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--output", type=Path, required=True, help="folder of all runs")
    option("--data", type=Path, help="folder of real data; by default the demo's", default=DEMO)
    option("--size", choices=RECIPES, default="tiny")
    longest = "tokens of the longest sequence; four times that per micro-batch"
    option("--max-length", type=int, default=256, help=longest)
    option("--gpus", type=int, default=1, help="processes, all of one sequence-parallel group")
    killed = "stages that are killed once; default all"
    option("--kill", nargs="*", default=[*HELD_OUT], help=killed)
    a = parser.parse_args()
    output, data = a.output.resolve(), a.data.resolve()
    recipe = RECIPES[a.size]
    chain = Chain(output, recipe, data, launch, a.gpus, a.max_length, tuple(a.kill))
    found = chain.run()
    rises = [
        f"{stage}'s score rose by {(r['last'] - r['first']) / r['rise_error']:.1f} standard errors"
        for stage, r in found.items()
        if stage in ROLLOUTS
    ]
    table = [*(line(stage, record) for stage, record in found.items()), *rises, ""]
    (output / "table.txt").write_text("\n".join(table))
    print(*rises, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
