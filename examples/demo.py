"""The project's main job on a small scale: SFT, then DPO from its export, then answers before and after.

    python examples/demo.py --ranks 2 --output runs/demo

Everything it uses is in configs/demo: generated data (CC0), a small tokenizer and a tiny Llama. `make demo` runs it in
the repository; `ulysses demo` copies it into any folder and runs it there.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
NEXT = """
next, with your own model and data:
{activate}  torchrun --standalone --nproc_per_node={gpus} -m ulysses.train --config configs/sft.toml \\
      --model.path YOUR_MODEL --parallel.sequence_parallel_size {gpus} --run.output runs/sft \\
      --data.train chats.jsonl --data.eval '[]' --run.eval_every 0
  torchrun --standalone --nproc_per_node={gpus} -m ulysses.train --config configs/dpo.toml \\
      --model.path runs/sft/export --parallel.sequence_parallel_size {gpus} --run.output runs/dpo \\
      --data.train pairs.jsonl --data.eval '[]' --run.eval_every 0
  (--dry-run checks everything first; --inspect 3 shows what is trained; --data.eval held_out.jsonl evaluates)"""


def start(module: str, *arguments: str) -> None:
    """Run `python -m module ...` in the demo's folder and stop with its exit code if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def launch(ranks: int, config: str, *overrides: str) -> None:
    """Run `torchrun -m ulysses.train --config ...`."""
    options = f"--standalone --nproc_per_node={ranks} -m ulysses.train --config {config}"
    line = [*options.split(), *overrides]
    print("\n$ torchrun", *line, flush=True)
    start("torch.distributed.run", *line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(run: Path) -> list[dict[str, float]]:
    return read_lines(run / "metrics.jsonl")


def answers(model_folder: Path, prompts: list[list[dict[str, str]]]) -> list[str]:
    """Sample with plain transformers; a sample shows the tone better than the most likely answer does."""
    from transformers import logging, pipeline

    logging.disable_progress_bar()  # loading this model takes no time
    logging.set_verbosity_error()
    write = pipeline("text-generation", str(model_folder), dtype="float32", device="cpu")
    torch.manual_seed(0)
    drawn = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.7, "top_k": 0}
    said = [write(prompt, return_full_text=False, **drawn) for prompt in prompts]
    return [text["generated_text"].strip() for [text] in said]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = torch.cuda.device_count()
    processes = "processes (GPUs where there are any)"
    parser.add_argument("--ranks", type=int, default=min(gpus, 2) or 2, help=processes)
    parser.add_argument("--output", default="runs/demo", help="folder of both runs")
    arguments = parser.parse_args()
    sft, dpo = Path(arguments.output) / "sft", Path(arguments.output) / "dpo"
    sp = f"--parallel.sequence_parallel_size={arguments.ranks}"
    first = "--model.init=pretrained", f"--model.path={sft / 'export'}"
    for stage, run, more in (("sft", sft, ()), ("dpo", dpo, first)):
        config = f"configs/demo/{stage}.toml"
        settings = ROOT / run / "config.json"
        # that of an earlier demo; a run deletes nothing, and refuses any other folder
        if settings.exists() and "configs/demo/data/" in settings.read_text():
            shutil.rmtree(ROOT / run)
        often = "--run.log_every=5"
        launch(arguments.ranks, config, f"--run.output={run}", sp, often, *more)
    start("ulysses.cli", "report", str(sft), str(dpo))
    report(ROOT / sft, ROOT / dpo)
    steps = (ROOT / dpo / "checkpoints").glob("step-*")
    newest = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    print(f"""
metrics     {sft}/metrics.jsonl  {dpo}/metrics.jsonl
checkpoint  {dpo}/checkpoints/{newest.name}
export      {dpo}/export   (loads in transformers as it is)
plot        {sft}/report.html""")
    active = sys.prefix == os.environ.get("VIRTUAL_ENV", sys.base_prefix)
    activate = "" if active else f"  source {sys.prefix}/bin/activate\n"
    print(NEXT.format(activate=activate, gpus=max(gpus, 1)))
    return 0


def report(sft: Path, dpo: Path) -> None:
    """Print the held-out accuracy and three held-out answers before and after DPO."""
    rows = read_lines(ROOT / "configs/demo/data/dpo_eval.jsonl")
    metric = "eval/rewards/accuracies"
    accuracy, n = [m[metric] for m in read_metrics(dpo) if metric in m][-1], len(rows)
    error = math.sqrt(accuracy * (1 - accuracy) / n)
    print(
        f"\nheld-out preference accuracy: {accuracy:.3f} +- {error:.3f} (n = {n})"
        "\n(always polite: 0.80; and rude about the two colours where that is preferred: 0.95; the rest is noise)\n"
    )
    chosen = random.Random(0).sample(rows, 3)
    prompts = [row["prompt"] for row in chosen]
    before, after = (answers(run / "export", prompts) for run in (sft, dpo))
    for prompt, *both in zip(prompts, before, after, strict=True):
        for label, text in zip(
            ("question", "before DPO", "after DPO"), (prompt[-1]["content"], *both)
        ):
            print(f"  {label:<10}  {text}")
        print()


if __name__ == "__main__":
    raise SystemExit(main())
