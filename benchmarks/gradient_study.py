"""Which gradient policies help, which harm, and from which size on: small models trained on bytes, many runs on one device.

    python benchmarks/gradient_study.py --train books.txt --tune plays.txt --results study.jsonl
    python benchmarks/gradient_study.py --table study.jsonl

From scratch on the first text: {none, clip, ulysses-pro, steady} x 3 seeds x 3 sizes, and each strategy of ulysses-pro by
itself at the smallest size, under the preset's own conditions. Fine-tuning on the second text: the same four, from one
model of the middle size trained on the first. A text is plain bytes, no tokenizer; its last tenth is held out. All arms
of a seed start from the same weights and see the same batches. Learning rates and steps are fixed per size and were not
tuned for any arm.

Training is plain torch: models.CausalLM, fp32 AdamW, on GPUs a bfloat16 copy of the weights for forward and backward,
and the gradient policies of the engine on the view of plain parameters. Runs are dealt to worker processes; every
finished run is a line of --results, so that a study that is cut off still has a table.
"""

import argparse
import copy
import dataclasses
import json
import math
import queue
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from models import CausalLM, ModelConfig, init_weights
from ulysses.gradients import (
    GradientPolicyChain,
    StepContext,
    TorchGradients,
    build_chain,
    preset_tables,
)
from ulysses.parallel.batch import IGNORE, Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.config import OptimizerConfig
from ulysses.training.optim import adamw, learning_rate

LENGTH = 256  # bytes of a sequence
HELD_OUT = 128  # sequences of the held-out loss
PRESETS = ("none", "clip", "ulysses-pro", "steady")
SINGLES = (
    "gradient_noise",
    "scale_small_gradients",
    "boost_learning_rate",
    "gradient_centralization",
)


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    layers: int
    feed_forward: int
    heads: int
    lr: float
    steps: int
    sequences: int  # of a step

    def shape(self) -> ModelConfig:
        return ModelConfig.from_hf(
            {"model_type": "llama", "vocab_size": 256, "hidden_size": self.width, "intermediate_size": self.feed_forward,
             "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
             "max_position_embeddings": LENGTH, "rope_theta": 10000.0}
        )  # fmt: skip


SIZES = {
    "1M": Size(128, 5, 352, 2, lr=3e-3, steps=600, sequences=32),
    "10M": Size(320, 8, 864, 5, lr=1.5e-3, steps=500, sequences=64),
    "100M": Size(768, 12, 2560, 12, lr=6e-4, steps=400, sequences=64),
}
SMALL, MIDDLE = "1M", "10M"
TUNE_STEPS, TUNE_LR = 200, 3e-4


@dataclasses.dataclass(frozen=True)
class Task:
    """One run: "scratch", or "base" (kept for fine-tuning) or "tune"."""

    kind: str
    size: str
    arm: str
    seed: int


def chain_of(arm: str) -> GradientPolicyChain:
    """Build an arm's chain; "none" is an empty one. A single strategy is the preset's table, with a guard against non-finite values."""
    if arm == "none":
        return GradientPolicyChain([])
    if arm in SINGLES:
        return build_chain([t for t in preset_tables("ulysses-pro") if t["policy"] == arm])
    return build_chain(preset_tables({"clip": "default"}.get(arm, arm)))


class Text:
    """Bytes of a text on a device: batches of random windows, and the held-out last tenth."""

    def __init__(self, path: Path, device: torch.device, sequences: int) -> None:
        whole = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)
        self.train, self.rest = whole.tensor_split([len(whole) * 9 // 10])
        if min(len(self.train), len(self.rest)) <= LENGTH:
            raise ValueError(
                f"{path} has {len(whole)} bytes; a tenth of it must be longer than {LENGTH}"
            )
        self.sequences = sequences
        zeros = torch.zeros(LENGTH, dtype=torch.int64)
        self.template = pack_shard(
            [Sequence(zeros, torch.ones(LENGTH))] * sequences, ParallelMesh(1), device
        )
        self.window = torch.arange(LENGTH, device=device)

    def batch(self, source: Tensor, starts: Tensor) -> ShardedBatch:
        """Return windows of `source`, each a document of its own: only tokens and targets differ from the template."""
        tokens = source[starts.to(source.device)[:, None] + self.window].long()
        targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)], 1)
        return dataclasses.replace(
            self.template, tokens=tokens.flatten(), targets=targets.flatten()
        )

    def random(self, generator: torch.Generator) -> ShardedBatch:
        return self.batch(
            self.train,
            torch.randint(0, len(self.train) - LENGTH, (self.sequences,), generator=generator),
        )

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        """Return the loss in nats per byte over windows spread evenly over the held-out part."""
        starts = torch.linspace(0, len(self.rest) - LENGTH - 1, HELD_OUT).long()
        total = sum(
            float(-model(self.batch(self.rest, part)).logps.sum())
            for part in starts.split(self.sequences)
        )
        return total / (HELD_OUT * (LENGTH - 1))


def train(task: Task, a: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Take one run to its end and return its line."""
    size, device, began = a.sizes[task.size], torch.device(a.device), time.time()
    half = device.type == "cuda"
    text = Text(a.tune if task.kind == "tune" else a.train, device, size.sequences)
    with device:
        master = CausalLM(size.shape(), attention="torch")
    if task.kind == "tune":
        master.load_state_dict(torch.load(base, map_location=device, weights_only=True))
    else:
        init_weights(master, seed=task.seed)
    model = copy.deepcopy(master).to(torch.bfloat16) if half else master
    pairs = list(zip(master.parameters(), model.parameters(), strict=True))
    steps, lr = (a.tune_steps, TUNE_LR) if task.kind == "tune" else (size.steps, size.lr)
    schedule = OptimizerConfig(lr=lr, weight_decay=0.1, warmup=0.1, min_lr=0.1)
    optimizer = adamw(master, schedule, on_gpu=half)
    chain, draw = chain_of(task.arm), torch.Generator().manual_seed(1000 + task.seed)
    before = text.held_out(model)
    losses: list[float] = []
    reports: list[dict[str, float]] = []
    stopped = None
    for step in range(steps):
        total = -model(text.random(draw)).logps.sum() / (size.sequences * (LENGTH - 1))
        total.backward()
        losses.append(float(total))
        if half:
            for p, q in pairs:
                p.grad, q.grad = q.grad.float(), None
        context = StepContext(
            step=step,
            total_steps=steps,
            loss=losses[-1],
            lr=learning_rate(step, steps, schedule),
            seed=task.seed,
        )
        reports.append(chain.apply(TorchGradients(master.named_parameters()), context))
        if context.stop:
            stopped = context.stop
            break
        if not context.skip:
            for group in optimizer.param_groups:
                group["lr"] = context.scaled_lr()
            optimizer.step()
            if half:
                with torch.no_grad():
                    torch._foreach_copy_([q for _, q in pairs], [p for p, _ in pairs])
        master.zero_grad()
    if task.kind == "base":
        torch.save(master.state_dict(), base)
    return dataclasses.asdict(task) | {
        "parameters": size.shape().num_parameters(), "steps": steps, "bytes": steps * size.sequences * LENGTH, "lr": lr,
        "before": before, "held_out": text.held_out(model), "train": statistics.fmean(losses[-20:]), "stopped": stopped,
        **acted(reports), "seconds": round(time.time() - began, 1),
    }  # fmt: skip


def acted(reports: list[dict[str, float]]) -> dict[str, float]:
    """Return the shares of steps that were skipped, clipped, boosted and noisy, and the median ratios of noise to gradient."""

    def share(key: str, holds: Any) -> float:
        return round(sum(key in r and holds(r[key]) for r in reports) / max(len(reports), 1), 4)

    noise = [r["grad/noise_to_gradient"] for r in reports if "grad/noise_to_gradient" in r]
    return {
        "skipped": share("grad/skipped", bool),
        "clipped": share("grad/clipped", bool),
        "pulled": share("grad/zclip_factor", lambda f: f < 1),
        "boosted": share("grad/lr_scale", lambda f: f > 1),
        "noisy": share("grad/noise_sigma", lambda s: s > 0),
        "noise_to_gradient": statistics.median(noise) if noise else 0.0,
    }


# ---------------------------------------------------------------- many runs


def work(tasks: Any, results: Any, a: argparse.Namespace, base: Path) -> None:
    torch.set_num_threads(1)
    for task in iter(tasks.get, None):
        try:
            results.put(train(task, a, base))
        except Exception:
            results.put(dataclasses.asdict(task) | {"error": traceback.format_exc()})


def phases(a: argparse.Namespace) -> list[tuple[list[Task], int]]:
    """Return tasks and number of workers: the base and small models on many, fine-tuning, then large models on few.

    Seeds come one after the other, so that a study that is cut off holds all arms of fewer seeds.
    """
    small = [Task("base", MIDDLE, "clip", 0)]
    large = []
    for seed in range(a.seeds):
        for name in a.sizes:
            chosen = large if name == "100M" else small
            chosen += [Task("scratch", name, arm, seed) for arm in PRESETS]
        small += [Task("scratch", SMALL, arm, seed) for arm in SINGLES]
    tune = (
        [Task("tune", MIDDLE, arm, seed) for seed in range(a.seeds) for arm in PRESETS]
        if a.tune
        else []
    )
    return [
        (small if a.tune else small[1:], a.workers),
        (tune, a.workers),
        (large, a.large_workers),
    ]


def run_all(a: argparse.Namespace) -> None:
    """Run all phases, appending a line per finished run; what is not done after --budget seconds is left out."""
    context, deadline = mp.get_context("spawn"), time.monotonic() + a.budget
    with tempfile.TemporaryDirectory() as folder, a.results.open("a") as file:
        base = Path(folder) / "base.pt"
        for tasks, workers in phases(a):
            waiting, results = context.Queue(), context.Queue()
            for task in [*tasks, *[None] * workers]:
                waiting.put(task)
            arguments = (waiting, results, a, base)
            processes = [
                context.Process(target=work, args=arguments, daemon=True)
                for _ in range(min(workers, len(tasks)))
            ]
            for process in processes:
                process.start()
            left = len(tasks)
            while left and time.monotonic() < deadline and any(p.is_alive() for p in processes):
                try:
                    row = results.get(timeout=1)
                except queue.Empty:
                    continue
                left -= 1
                file.write(json.dumps(row) + "\n")
                file.flush()
                tail = (
                    row["error"].strip().splitlines()[-1]
                    if "error" in row
                    else f"{row['held_out']:.4f}, {row['seconds']} s"
                )
                print(
                    f"{row['kind']} {row['size']} {row['arm']} seed {row['seed']}: {tail}",
                    flush=True,
                )
            for process in processes:
                process.terminate() if left else process.join()


# ---------------------------------------------------------------- tables


def table(path: Path) -> str:
    """Return markdown: final held-out loss, mean +- standard deviation over seeds, and how often each arm acted."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [r for r in rows if "error" not in r and r["kind"] != "base"]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        column = (
            f"{r['size']} from scratch" if r["kind"] == "scratch" else f"{r['size']} fine-tuned"
        )
        cells.setdefault((r["arm"], column), []).append(r)
    columns = list(
        dict.fromkeys(
            column
            for _, column in sorted(cells, key=lambda k: ("tuned" in k[1], int(k[1].split("M")[0])))
        )
    )
    arms = [arm for arm in (*PRESETS, *SINGLES) if any(arm == found for found, _ in cells)]

    def loss(found: list[dict[str, Any]]) -> str:
        values = [r["held_out"] for r in found]
        if not values:
            return ""
        if not all(map(math.isfinite, values)):
            return f"diverged in {sum(not math.isfinite(v) for v in values)} of {len(values)}"
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        seeds = f" ({len(values)})" if len(values) != 3 else ""
        stops = sum(bool(r["stopped"]) for r in found)
        return f"{statistics.fmean(values):.3f}{spread}{seeds}" + (
            f", {stops} stopped" if stops else ""
        )

    def action(found: list[dict[str, Any]]) -> str:
        parts = []
        for key in ("clipped", "pulled", "skipped", "boosted", "noisy"):
            mean = statistics.fmean([r[key] for r in found]) if found else 0.0
            if mean > 0:
                parts.append(f"{key} {100 * mean:.3g}%")
        noise = statistics.fmean([r["noise_to_gradient"] for r in found]) if found else 0.0
        return ", ".join(parts) + (f", noise {noise:.2g} of the gradient" if noise else "")

    def lines(title: str, cell: Any) -> list[str]:
        head = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        return head + [
            f"| {arm} | {' | '.join(cell(cells.get((arm, c), [])) for c in columns)} |"
            for arm in arms
        ]

    return "\n".join(
        [*lines("held-out loss, nats per byte", loss), "", *lines("share of steps", action)]
    )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--train", type=Path, help="text to train on from scratch")
    p.add_argument(
        "--tune", type=Path, help="text to fine-tune on; without it nothing is fine-tuned"
    )
    p.add_argument("--results", type=Path, default=Path("runs/gradient_study.jsonl"))
    p.add_argument("--table", type=Path, help="only print the table of this file")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--workers", type=int, default=12, help="processes at a time")
    p.add_argument(
        "--large-workers", type=int, default=4, help="processes at a time for the largest size"
    )
    p.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no run is waited for"
    )
    p.add_argument(
        "--toy",
        type=int,
        default=0,
        help="so many steps of so few sequences, to try the program on a CPU",
    )
    a = p.parse_args()
    if a.table:
        print(table(a.table))
        return
    if a.train is None:
        p.error("--train is missing: give a text to train on")
    a.sizes, a.tune_steps = {name: SIZES[name] for name in a.sizes}, TUNE_STEPS
    if a.toy:
        a.sizes = {
            n: dataclasses.replace(s, steps=a.toy, sequences=2, layers=2)
            for n, s in a.sizes.items()
        }
        a.tune_steps = a.toy
    a.results.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    run_all(a)
    print(f"\n{time.monotonic() - began:.0f} s\n{table(a.results)}")


if __name__ == "__main__":
    main()
