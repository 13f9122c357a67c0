"""Loss curves of one tiny training run on every degree, dtype and kernel of this machine: they must lie on each other.

    torchrun --nproc_per_node 4 benchmarks/curves.py --out curves.jsonl

Same data order, weights and settings throughout (SFT, AdamW, clipping; tokens follow a noisy rule, so that the loss
falls). `to_float32` and `to_sp1` are the largest distances of a step's loss from the float32 run on degree 1, and from
the run of the same dtype and kernel on degree 1; `norm_to_sp1` is that of the gradient norms, relative. `--out` gets
one line per run and step. AdamW amplifies rounding where gradients are small, so distances grow with the steps.
"""

import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import build, leave, parser, say, settings, table

from ulysses.data.dataset import Example
from ulysses.data.steps import StepLoader
from ulysses.parallel.batch import Sequence
from ulysses.parallel.kernels import available_kernels
from ulysses.training.stages.sft import SftStage
from ulysses.training.trainer import Trainer
from ulysses.zero.construct import initialize_distributed

COLUMNS = (
    "dtype",
    "kernel",
    "sp",
    "dp",
    "first",
    "last",
    "to_float32",
    "to_sp1",
    "norm_to_sp1",
    "seconds",
)
VOCABULARY, LAYERS = 211, 4
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "tie_word_embeddings": "false", "initializer_range": 0.05,
}  # fmt: skip
LR = 5e-4


class Rule:
    """Examples in memory, with the face of a tokenised dataset: each token follows from the one before, mostly."""

    kind = "sequence"

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.sequence_lengths = torch.randint(40, 400, (count, 1), generator=draw).numpy()
        self.lengths = self.sequence_lengths.sum(axis=1)
        self.sources, self.source_weights = np.zeros(count, dtype=np.int32), [1.0]
        self.rows = [self._row(int(length), draw) for length in self.lengths]

    def _row(self, length: int, draw: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, VOCABULARY, (length,), generator=draw)
        kept = torch.rand(length, generator=draw) < 0.9
        for i in range(1, length):
            if kept[i]:
                tokens[i] = (7 * tokens[i - 1] + 3) % VOCABULARY
        return tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return Example(index, (Sequence(self.rows[index], torch.ones(len(self.rows[index]))),), {})


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=50)
    a = p.parse_args()
    device, world = initialize_distributed(), int(dist.get_world_size())
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    half = [
        name for name in available_kernels(device) if name != "reference" or device.type == "cpu"
    ]
    cases = [("float32", "reference", sp) for sp in degrees]
    cases += [
        ("bfloat16", kernel, sp)
        for kernel in half
        for sp in (degrees if kernel == half[0] else degrees[:1])
    ]
    data, curves, rows = Rule(8 * a.steps), {}, []
    for case in cases:
        began = time.perf_counter()
        curve = curves[case] = train(*case, data, a.steps, device)
        dtype, kernel, sp = case
        loss, norm = np.array(curve).T
        exact = np.array(curves[cases[0]]).T[0]
        alone = np.array(curves[dtype, kernel, 1]).T
        row = {
            "dtype": dtype, "kernel": kernel, "sp": sp, "dp": world // sp, "first": round(loss[0], 4), "last": round(loss[-1], 4),
            "to_float32": f"{abs(loss - exact).max():.1e}", "to_sp1": f"{abs(loss - alone[0]).max():.1e}",
            "norm_to_sp1": f"{abs(norm / alone[1] - 1).max():.1e}", "seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        rows.append(row)
        say(row)
        if a.out and dist.get_rank() == 0:
            with Path(a.out).open("a") as file:
                for step, (value, size) in enumerate(curve, 1):
                    line = {
                        "dtype": dtype,
                        "kernel": kernel,
                        "sp": sp,
                        "step": step,
                        "loss": value,
                        "grad_norm": size,
                    }
                    file.write(json.dumps(line) + "\n")
    if dist.get_rank() == 0:
        print(table(rows, COLUMNS), flush=True)
    leave()


def train(
    dtype: str, kernel: str, sp: int, data: Any, steps: int, device: torch.device
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    shape = [
        part for name, value in SHAPE.items() for part in (f"--model.config.{name}", str(value))
    ]
    given = [
        "--model.dtype",
        dtype,
        "--model.attention",
        kernel,
        "--parallel.sequence_parallel_size",
        str(sp),
        "--optimizer.lr",
        str(LR),
    ]
    config = settings("llama3.2-1b", LAYERS, [*shape, *given])
    bench = build(config, device)
    mesh, engine = bench.mesh, bench.engine
    loader = StepLoader(
        data,
        8,
        tokens_per_microbatch=2048,
        seed=1,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=mesh.dp_rank,
    )
    trainer = Trainer(
        mesh=mesh, engine=engine, stage=SftStage(engine, mesh, config.sft), loader=loader, eval_loader=None, total_steps=steps,
        learning_rate=lambda step: LR, policies=config.gradients.chain(), flops=lambda *_: 0.0, peak_flops=None, seed=0,
    )  # fmt: skip
    found = []
    for _ in range(steps):
        values: Any = trainer.train_step()
        found.append((float(values["loss"]), float(values["grad_norm"])))
    engine.destroy()
    del bench, engine, trainer
    gc.collect()
    return found


if __name__ == "__main__":
    main()
