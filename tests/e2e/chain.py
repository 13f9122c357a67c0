"""The whole chain of stages, each killed once in the middle and resumed.

                   +--> rm ---------+ (its scores)
    pt --> sft ----+--> dpo         |         every arrow is an export/ folder in Hugging Face format
                   +--> kto         v
                   +-------------> ppo

    python tests/e2e/chain.py --output runs/chain                                    generated data, minutes on a CPU
    python tests/e2e/chain.py --output runs/chain --data FOLDER --size 150m --max-length 8192

Both draw curves.png and write table.txt. FOLDER holds a folder of data files per stage (pt, sft, rm, dpo, kto, ppo) and
tokenizer.json or tokenizer/. Rows whose
first question hashes into the held-out part are never trained on. A killed stage dies by SIGKILL four steps after its
only checkpoint; what it logged in between is an uninterrupted run's, so the resumed run must log the same. A stage that
is done is not run again.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for examples/, which is not installed

from examples.demo_data import write_demo  # noqa: E402
from tests.harness import free_port  # noqa: E402
from ulysses.data import BadRowError, DropRowError  # noqa: E402
from ulysses.data.chat import load_tokenizer  # noqa: E402
from ulysses.data.formats import detect_format, parse_row  # noqa: E402
from ulysses.data.sources import Source, read_rows, source_files  # noqa: E402
from ulysses.training.stages import STAGES  # noqa: E402

KINDS = {name: stage.kind for name, stage in STAGES.items()}
START = {"sft": "pt", "rm": "sft", "dpo": "sft", "kto": "sft", "ppo": "sft"}
HELD_OUT = {"pt": "perplexity", "sft": "perplexity", "rm": "accuracy", "dpo": "rewards/accuracies",
            "kto": "rewards/margins",
            "ppo": "objective/scores"}  # fmt: skip
AFTER = 4  # steps from the checkpoint to the kill
TIMES = ("seconds", "tokens_per_second", "mfu", "peak_memory_gib", "time/sampling", "time/rollout")

Launch = Callable[[list[str], int, Path, Path, int], None]


@dataclass(frozen=True)
class Recipe:
    """A model's shape, and every stage's learning rate, steps, examples per step and further settings."""

    shape: dict[str, int]
    dtype: str
    lr: dict[str, float]
    steps: dict[str, int]
    examples: dict[str, int]
    held_out: dict[str, int]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


PPO = {"ppo.epochs": 2, "ppo.minibatches": 2, "ppo.value_lr_factor": 10.0, "ppo.value_coefficient": 0.5,
       "optimizer.schedule": "constant", "optimizer.warmup": 4}  # fmt: skip
TINY = Recipe(
    shape={
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    dtype="float32",
    lr={"pt": 6e-3, "sft": 6e-3, "rm": 2e-3, "dpo": 5e-4, "kto": 1e-3, "ppo": 1e-3},
    steps={"pt": 24, "sft": 56, "rm": 24, "dpo": 16, "kto": 16, "ppo": 24},
    examples={"pt": 16, "sft": 16, "rm": 16, "dpo": 16, "kto": 32, "ppo": 64},
    held_out={stage: 96 for stage in KINDS},
    settings={"ppo": {**PPO, "ppo.max_new_tokens": 32}},
)
LARGE = Recipe(
    shape={
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    dtype="bfloat16",
    lr={"pt": 1e-3, "sft": 3e-4, "rm": 5e-5, "dpo": 2e-5, "kto": 2e-5, "ppo": 1e-4},
    steps={"pt": 80, "sft": 60, "rm": 54, "dpo": 40, "kto": 40, "ppo": 160},
    examples={"pt": 16, "sft": 64, "rm": 64, "dpo": 64, "kto": 128, "ppo": 64},
    held_out={"pt": 64, "sft": 128, "rm": 1000, "dpo": 1000, "kto": 512, "ppo": 128},
    settings={"ppo": {**PPO, "ppo.max_new_tokens": 128, "ppo.generation_batch": 128}, "pt": {"pt.z_loss": 1e-4}},
)
RECIPES = {"tiny": TINY, "150m": LARGE}


# ------------------------------------------------------------------------------------------------------------ data


def demo_data(folder: Path) -> tuple[dict[str, tuple[list[Path], list[Path]]], Path]:
    """Generate every stage's (training, held-out) files and their tokenizer."""
    write_demo(folder)
    return {
        stage: ([folder / f"{stage}_train.jsonl"], [folder / f"{stage}_eval.jsonl"]) for stage in KINDS
    }, folder / "tokenizer"


def split(stage: str, source: Path, folder: Path, parts: int) -> tuple[list[Path], list[Path]]:
    """Copy rows into training and held-out files, one of each per input; about one question in `parts` is held out.

    All rows of a question fall on the same side. Of a text longer than a hundred pages the end is held out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = [], []
    for number, path in enumerate(source_files(Source(str(source)))):
        sides: tuple[list[Any], list[Any]] = ([], [])
        for _, _, row in read_rows(Source(str(path))):
            text = row.get("text", "") if stage == "pt" else ""
            if len(text) > 200_000:
                cut = text.rfind("\n", 0, len(text) - len(text) // parts) + 1
                sides[0].append({"text": text[:cut]})
                sides[1].append({"text": text[cut:]})
            else:
                sides[zlib.crc32((text or question(row, stage)).encode()) % parts == 0].append(row)
        for rows, side, paths in ((sides[0], "train", train), (sides[1], "eval", held_out)):
            if rows:
                paths.append(folder / f"{stage}_{side}_{number}.jsonl")
                paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return train, held_out


def question(row: dict[str, Any], stage: str) -> str:
    """Return what the user says first; a row that cannot be trained on goes by its text."""
    try:
        record = parse_row(row, detect_format(row), KINDS[stage])[0]
    except (BadRowError, DropRowError):
        return json.dumps(row)
    return next(
        m.content for m in (*record.prompt, *(m for answer in record.answers for m in answer)) if m.role == "user"
    )


# ----------------------------------------------------------------------------------------------------------- stages


@dataclass
class Chain:
    """Run the stages one after the other.

    Args:
        data: training and held-out files of every stage.
        tokenizer: a folder, or a tokenizer.json with ChatML's tokens.
        launch: (arguments of train.py, processes, log folder, metrics.jsonl, step to be killed after or 0) -> None;
            raises if the run fails.
        kill: the stages that are killed once.
        changes: further settings by stage.
    """

    output: Path
    recipe: Recipe
    data: dict[str, tuple[list[Path], list[Path]]]
    tokenizer: Path
    launch: Launch
    processes: int = 1
    max_length: int = 256
    kill: tuple[str, ...] = tuple(KINDS)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> dict[str, dict[str, Any]]:
        """Train what is not yet trained; returns every stage's record (see `measure`)."""
        found = {}
        for stage in KINDS:
            record = self.output / stage / "chain.json"
            if not record.exists():
                shutil.rmtree(record.parent, ignore_errors=True)
                record.write_text(json.dumps(self.train(stage, record.parent), indent=1))
            found[stage] = json.loads(record.read_text())
            print(line(stage, found[stage]), flush=True)
        return found

    def train(self, stage: str, folder: Path) -> dict[str, Any]:
        if stage == "pt":
            self._write_model(self.output / "model")
        seconds, saved, metrics = [], 0, folder / "metrics.jsonl"
        arguments = self.arguments(stage, folder)
        if stage in self.kill:
            saved = self.save_every(stage)
            began = time.monotonic()
            self.launch(arguments, self.processes, folder / "logs-killed", metrics, saved + AFTER)
            seconds.append(time.monotonic() - began)
            assert [p.name for p in (folder / "checkpoints").glob("step-*")] == [f"step-{saved}"], "killed too late"
            shutil.copy(metrics, folder / "killed.jsonl")
        began = time.monotonic()
        self.launch(arguments, self.processes, folder / "logs", metrics, 0)
        seconds.append(time.monotonic() - began)
        return measure(stage, folder, saved, seconds, self.setting(stage, "batch.examples", self.recipe.examples))

    def setting(self, stage: str, name: str, recipe: dict[str, int]) -> int:
        return self.changes.get(stage, {}).get(name, recipe[stage])

    def save_every(self, stage: str) -> int:
        """The step of the only checkpoint before the last; an odd one, so that it lies inside a rollout."""
        steps = self.setting(stage, "run.steps", self.recipe.steps)
        half = steps // 2 | 1
        assert half + AFTER < steps, f"{stage} has too few steps to be killed in the middle"
        return half

    def arguments(self, stage: str, folder: Path) -> list[str]:
        """The command line of one stage, the same before and after the kill."""
        recipe = self.recipe
        train, held_out = self.data[stage]
        limit = recipe.held_out[stage]
        values: dict[str, Any] = {
            "stage": stage, "model.dtype": recipe.dtype, "run.output": str(folder),
            "run.resume": "auto", "run.seed": 1, "run.keep": 1,
            "run.steps": recipe.steps[stage], "run.save_every": self.save_every(stage) if stage in self.kill else 0,
            "data.train": [str(p) for p in train],
            "data.eval": [{"path": str(p), "max_examples": limit} for p in held_out],
            "data.max_length": self.max_length, "data.cache": str(self.output / "cache"),
            "batch.examples": recipe.examples[stage], "batch.tokens_per_microbatch": 4 * self.max_length,
            "optimizer.lr": recipe.lr[stage], "optimizer.warmup": 0.1,
            "parallel.sequence_parallel_size": self.processes,
        }  # fmt: skip
        bare = self.tokenizer.is_file()
        if stage == "pt":
            values |= {"model.path": str(self.output / "model"), "model.init": "random",
                       "model.tokenizer": str(self.tokenizer),
                       "model.special_tokens": self._special_tokens()}  # fmt: skip
        else:
            values |= {"model.path": str(self.output / START[stage] / "export"), "data.truncation": "keep_end"}
        if stage == "sft" and bare:
            values["data.chat_template"] = "chatml"  # from here on the exports carry it
        if stage == "ppo":
            values |= {"ppo.reward": str(self.output / "rm/export"),
                       "ppo.stop_tokens": ["<|im_end|>"] if bare else [],
                       "data.truncation": "drop", "data.max_length": min(self.max_length, 256)}  # fmt: skip
        values |= recipe.settings.get(stage, {}) | self.changes.get(stage, {})
        return [
            word for name, v in values.items() for word in (f"--{name}", v if isinstance(v, str) else json.dumps(v))
        ]

    def _special_tokens(self) -> dict[str, str]:
        return {"eos_token": "<|endoftext|>"} if self.tokenizer.is_file() else {}

    def _write_model(self, folder: Path) -> None:
        """Write the config.json of an untrained Llama for this tokenizer."""
        tokenizer = load_tokenizer(self.tokenizer, **self._special_tokens())
        folder.mkdir(parents=True, exist_ok=True)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                  "vocab_size": -(-len(tokenizer) // 64) * 64, "rms_norm_eps": 1e-5,
                  "rope_theta": 10000.0, "max_position_embeddings": max(2048, self.max_length),
                  "initializer_range": 0.02, "hidden_act": "silu", "tie_word_embeddings": self.tokenizer.is_file(),
                  "eos_token_id": tokenizer.eos_token_id, **self.recipe.shape}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def launch(arguments: list[str], processes: int, logs: Path, metrics: Path, kill_after: int) -> None:
    """Start train.py as torchrun would and wait; kill all processes as soon as step `kill_after` is logged.

    Raises:
        RuntimeError: with the end of the log, if a process fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": free_port(), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    children = []
    for rank in range(processes):
        environment = os.environ | {k: str(v) for k, v in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with (logs / f"{rank}.out").open("w") as log:
            line = [sys.executable, str(ROOT / "train.py"), *arguments]
            pipes = {"stdout": log, "stderr": subprocess.STDOUT}
            children.append(subprocess.Popen(line, env=environment, cwd=ROOT, start_new_session=True, **pipes))
    try:
        while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
            if kill_after and metrics.exists() and metrics.read_text().count("\n") >= kill_after:
                return
            time.sleep(0.02)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if kill_after or any(child.returncode for child in children):
        raise RuntimeError(f"{logs}: ended by itself\n{(logs / '0.out').read_text()[-3000:]}")


# --------------------------------------------------------------------------------------------------------- results


def read_lines(path: Path) -> list[dict[str, float]]:
    """Return the logged objects of a metrics.jsonl."""
    return [json.loads(text) for text in path.read_text().splitlines()]


def repeated(folder: Path, saved: int) -> list[tuple[dict[str, float], ...]]:
    """Pair what the killed process logged after its checkpoint with what the resumed one logged, times left out."""
    again = {m["step"]: m for m in read_lines(folder / "metrics.jsonl")}
    pairs = [(m, again[m["step"]]) for m in read_lines(folder / "killed.jsonl") if m["step"] > saved]
    return [tuple({k: v for k, v in m.items() if k not in TIMES} for m in pair) for pair in pairs]


def measure(stage: str, folder: Path, saved: int, seconds: list[float], examples: int) -> dict[str, Any]:
    """Return the numbers of one stage: its time, means over the first and last tenth, and its held-out value.

    Args:
        saved: the step of the checkpoint that it was resumed from; 0 if it was not killed.
        seconds: of each start, wall clock.
        examples: per step; for PPO, answers per rollout.
    """
    lines = read_lines(folder / "metrics.jsonl")
    last, rollouts = lines[-1], list({m["rollout"]: m for m in lines}.values()) if stage == "ppo" else []
    curve = [m["objective/scores"] for m in rollouts] or [m["loss"] for m in lines]
    tenth = max(1, len(curve) // 10)
    held_out, deviation = last.get(f"eval/{HELD_OUT[stage]}"), last.get("eval/objective/scores_std")
    if held_out is not None and "accurac" in HELD_OUT[stage]:
        deviation = math.sqrt(held_out * (1 - held_out))
    n = int((re.findall(r"held-out data: .* kept (\d+) examples", (folder / "logs/0.out").read_text()) or ["0"])[0])
    found = {
        "steps": len(lines), "seconds": sum(seconds), "starts": len(seconds), "resumed_at": saved,
        "curve": "score" if rollouts else "loss", "first": sum(curve[:tenth]) / tenth,
        "last": sum(curve[-tenth:]) / tenth, "held_out": held_out,
        "held_out_error": None if deviation is None else deviation / math.sqrt(n), "held_out_examples": n,
    }  # fmt: skip
    if saved:
        again = repeated(folder, saved)
        found |= {"repeated_steps": len(again), "loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in again)}
    if rollouts:
        squares = sum(m["objective/scores_std"] ** 2 for m in rollouts[:tenth] + rollouts[-tenth:])
        found["rise_error"] = math.sqrt(squares / examples) / tenth
    return found


def line(stage: str, r: dict[str, Any]) -> str:
    """Return a stage's line of the table."""
    error = "" if r["held_out_error"] is None else f" +- {r['held_out_error']:.3f}"
    held_out = "-" if r["held_out"] is None else f"{HELD_OUT[stage].rpartition('/')[2]} {r['held_out']:.3f}{error}"
    curve, resumed = f"{r['curve']} {r['first']:.3f} -> {r['last']:.3f}", ""
    if r["resumed_at"]:
        resumed = f"resumed at {r['resumed_at']}; loss of {r['repeated_steps']} steps off by {r['loss_difference']:.1e}"
    return f"{stage:5} {r['steps']:5} steps {r['seconds']:6.1f} s  {curve:24} {held_out:28} {resumed}"


def plot(folder: Path) -> Path:
    """Draw every stage's curve, the killed process's beside it, and the held-out values."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7))
    for axis, stage in zip(axes.flat, KINDS, strict=True):
        name = "objective/scores" if stage == "ppo" else "loss"
        for file, style in (("metrics.jsonl", {"lw": 1}), ("killed.jsonl", {"lw": 3, "alpha": 0.3})):
            if (folder / stage / file).exists():
                lines = read_lines(folder / stage / file)
                axis.plot([m["step"] for m in lines], [m[name] for m in lines], **style)
        axis.set(title=f"{stage}: {name}", xlabel="step")
        axis.legend(["run", "before it was killed"])
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=120)
    return folder / "curves.png"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--data", type=Path, help="folder of real data; without it the demo's is generated")
    parser.add_argument("--size", choices=RECIPES, default="tiny")
    parser.add_argument(
        "--max-length", type=int, default=256, help="tokens of the longest sequence; four times that per micro-batch"
    )
    parser.add_argument("--gpus", type=int, default=1, help="processes, all of one sequence-parallel group")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="STAGE.KEY=JSON", help="settings, for example sft.optimizer.lr=1e-4"
    )
    parser.add_argument(
        "--kill", nargs="*", default=[*KINDS], choices=[*KINDS], help="stages that are killed once; default all"
    )
    a = parser.parse_args()
    output = a.output.resolve()
    if a.data:
        data = {stage: split(stage, a.data / stage, output / "data", 4 if kind == "pair" else 12)
                for stage, kind in KINDS.items()}  # fmt: skip
        tokenizer = next(p for p in (a.data / "tokenizer.json", a.data / "tokenizer") if p.exists())
    else:
        data, tokenizer = demo_data(output / "data")
    changes: dict[str, dict[str, Any]] = {}
    for entry in a.set:
        name, _, value = entry.partition("=")
        stage, _, key = name.partition(".")
        changes.setdefault(stage, {})[key] = json.loads(value)
    recipe, tokenizer = RECIPES[a.size], tokenizer.resolve()
    found = Chain(output, recipe, data, tokenizer, launch, a.gpus, a.max_length, tuple(a.kill), changes).run()
    ppo = found["ppo"]
    rise = f"PPO's score rose by {(ppo['last'] - ppo['first']) / ppo['rise_error']:.1f} standard errors"
    table = "\n".join([*(line(stage, record) for stage, record in found.items()), rise])
    (output / "table.txt").write_text(f"{table}\n")
    print(f"\n{table}")
    print(plot(output))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
