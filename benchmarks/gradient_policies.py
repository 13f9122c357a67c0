"""What gradient policies cost in a training step: python benchmarks/gradient_policies.py --arch llama3.2-1b --seq 8192

One process (or several under torchrun), the engine's own ZeRO-3 and AdamW, random weights and tokens, learning rate 0. Each
variant takes one step in turn, round after round; its ratio to the step of `none`, an empty chain, is taken within the
round, so that drift cancels, and the median over all rounds is reported.

    idle    the gradient policy is there but its trigger does not fire: the gradient is measured and left as it is
    acts    it fires at every step; fewer rounds

Prints a JSON line per variant and a table at the end. `--toy` is a shape for trying it on a CPU.
"""

import argparse
import json
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from models.arch import ModelConfig, architecture
from models.decoder import CausalLM
from models.layers import DecoderLayer
from ulysses.gradients.build import build_chain
from ulysses.gradients.policy import GradientPolicyChain, StepContext
from ulysses.gradients.presets import preset_tables
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import RandomWeights, matrix_sizes
from ulysses.training.config import OptimizerConfig
from ulysses.training.optim import adamw
from ulysses.zero.construct import build_partitioned, initialize_distributed
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive

TOY = {"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
NEVER, ALWAYS = {"mean_abs_above": 1e9}, {"mean_abs_below": 1e9}

Tables = list[dict[str, Any]]


def with_condition(tables: Tables, condition: dict[str, float]) -> Tables:
    return [t | {"when": condition} if "when" in t else t for t in tables]


IDLE: dict[str, Tables] = {
    "stop_on_non_finite": [{"policy": "stop_on_non_finite"}],
    "skip_non_finite": [{"policy": "skip_non_finite"}],
    "clip_global_norm": [{"policy": "clip_global_norm", "max_norm": 1e9}],
    "skip_spike": [{"policy": "skip_spike", "sigma": 1e9, "warmup": 2}],
    "zclip": [{"policy": "zclip", "threshold": 1e9, "warmup": 2}],
    "auto_clip": [{"policy": "auto_clip", "percentile": 100.0}],
    "adaptive_gradient_clipping": [{"policy": "adaptive_gradient_clipping", "clipping": 1e9}],
    "gradient_centralization": [{"policy": "gradient_centralization", "when": NEVER}],
    "gradient_noise": [{"policy": "gradient_noise", "sigma": 1e-4, "when": NEVER}],
    "gradient_noise, relative": [{"policy": "gradient_noise", "ratio": 0.01, "when": {"norm_z_below": -1e9, "warmup": 2}}],
    "scale_small_gradients": [{"policy": "scale_small_gradients", "threshold": 0.0}],
    "boost_learning_rate": [{"policy": "boost_learning_rate", "when": NEVER}],
    "clip_mean_abs": [{"policy": "clip_mean_abs", "limit": 1e9}],
    "preset default": preset_tables("default", 1e9),
    "preset steady": preset_tables("steady", 1e9),
    "preset ulysses-pro": with_condition(preset_tables("ulysses-pro"), NEVER),
}
ACTS: dict[str, Tables] = {
    "clip_global_norm": [{"policy": "clip_global_norm", "max_norm": 1e-9}],
    "adaptive_gradient_clipping": [{"policy": "adaptive_gradient_clipping", "clipping": 1e-9}],
    "gradient_centralization": [{"policy": "gradient_centralization"}],
    "gradient_noise": [{"policy": "gradient_noise", "ratio": 0.01}],
    "scale_small_gradients": [{"policy": "scale_small_gradients", "threshold": 1e9}],
    "clip_mean_abs": [{"policy": "clip_mean_abs", "limit": 1e-9}],
    "preset ulysses-pro": with_condition(preset_tables("ulysses-pro"), ALWAYS),
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", default="llama3.2-1b")
    p.add_argument("--toy", action="store_true", help="a shape for CPUs instead of --arch")
    p.add_argument("--seq", type=int, default=8192, help="tokens of a micro-batch")
    p.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--acting-rounds", type=int, default=3)
    p.add_argument("--attention", default="auto")
    p.add_argument("--output", default="", help="write the JSON lines into this file too")
    return p.parse_args()


class Bench:
    """One engine and one batch; `step` takes a whole optimizer step under a chain."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.device = initialize_distributed()
        self.world = dist.get_world_size()
        self.shape = ModelConfig.from_hf(TOY) if a.toy else architecture(a.arch)
        mesh = ParallelMesh(self.world, num_heads=self.shape.num_attention_heads)
        settings = derive(dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32, **matrix_sizes(self.shape))
        model = build_partitioned(lambda: CausalLM(self.shape, mesh, attention=a.attention), settings, RandomWeights(self.shape, 0))
        optimizer = adamw(model, OptimizerConfig(lr=0.0), on_gpu=self.device.type == "cuda")
        self.engine = ZeroEngine(model.train(), settings, optimizer, (DecoderLayer,))
        tokens = torch.randint(0, self.shape.vocab_size, (a.seq,), generator=torch.Generator().manual_seed(1))
        self.batch = pack_shard([Sequence(tokens, torch.ones(a.seq))], mesh, self.device)
        self.micro_batches, self.count = a.micro_batches, (a.seq - 1) * a.micro_batches

    def step(self, chain: GradientPolicyChain, number: int) -> tuple[float, float, float]:
        """Return the seconds of the step and of the chain in it, and the gradient norm that the chain leaves."""
        self._wait()
        began = time.perf_counter()
        for i in range(self.micro_batches):
            total = -self.engine(self.batch).logps.sum()
            self.engine.backward(total * (self.world / self.count), last=i == self.micro_batches - 1)
        gradients = self.engine.gradients()
        loss = float(total) / self.count  # the loop's metrics are read here too: the device has finished the backward pass
        ready = time.perf_counter()
        context = StepContext(step=number, total_steps=10**6, loss=loss)
        chain.apply(gradients, context)
        applied = time.perf_counter()
        if context.skip or context.stop:
            raise RuntimeError(f"the chain ends the step: {context.skip or context.stop}")
        norm = gradients.norm() if number == 0 else 0.0
        self.engine.step([0.0] * len(self.engine.zero.optimizer.param_groups))
        self._wait()
        return time.perf_counter() - began, applied - ready, norm

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def measure(bench: Bench, variants: dict[str, Tables], rounds: int, kind: str) -> list[dict[str, Any]]:
    """Return one row per variant; the first round warms up and checks that idle chains change nothing and acting ones do."""
    chains = {"none": GradientPolicyChain([])} | {name: build_chain(tables) for name, tables in variants.items()}
    steps: dict[str, list[float]] = {name: [] for name in chains}
    inside: dict[str, list[float]] = {name: [] for name in chains}
    untouched = bench.step(chains["none"], 0)[2]
    for k in range(rounds + 1):
        for name, chain in chains.items():
            seconds, policies, norm = bench.step(chain, k)
            if k:
                steps[name].append(seconds)
                inside[name].append(policies)
            elif (abs(norm / untouched - 1) < 1e-6) != (kind == "idle" or name == "none"):
                raise RuntimeError(f"{name} should be {kind} but the gradient norm went from {untouched} to {norm}")
    return [
        {
            "policy": name, "kind": kind, "rounds": rounds, "step_ms": round(1e3 * median(steps[name]), 2),
            "policies_ms": round(1e3 * median(inside[name]), 2),
            "ratio": round(median(s / n for s, n in zip(steps[name], steps["none"], strict=True)), 4),
        }
        for name in chains
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| gradient policy | | step, ms | policies, ms | step / none |", "|---|---|---|---|---|"]
    lines += [f"| `{r['policy']}` | {r['kind']} | {r['step_ms']} | {r['policies_ms']} | {r['ratio']:.3f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    a = parse()
    bench = Bench(a)
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    head = {"arch": "toy" if a.toy else a.arch, "parameters": bench.shape.num_parameters(), "gpus": bench.world,
            "tokens": a.seq * a.micro_batches, "device": device}  # fmt: skip
    rows = []
    for variants, rounds, kind in ((IDLE, a.rounds, "idle"), (ACTS, a.acting_rounds, "acts")):
        if rounds:
            rows += measure(bench, variants, rounds, kind)
    if dist.get_rank() == 0:
        lines = [json.dumps(head | row) for row in rows]
        print("\n".join(lines))
        if a.output:
            with open(a.output, "w") as file:
                file.write("\n".join(lines) + "\n")
        print(f"\n{json.dumps(head)}\n{table(rows)}", flush=True)
    dist.barrier()
    os._exit(0)  # interpreter shutdown can abort while communication threads still run


if __name__ == "__main__":
    main()
