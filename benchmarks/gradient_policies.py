"""What gradient policies cost in a training step: python benchmarks/gradient_policies.py --arch llama3.2-1b --seq 8192

One process (or several under torchrun), the engine's own ZeRO-3 and AdamW, random weights and tokens, learning rate 0. Each
variant takes one step in turn, round after round; its ratio to the step of `none`, an empty chain, is taken within the
round, so that drift cancels, and the median over all rounds is reported.

    idle    the gradient policy is there but its trigger does not fire: the gradient is measured and left as it is
    acts    it fires at every step; fewer rounds

Prints a JSON line per variant and a table at the end. What it does not know are train.py's settings.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Bench, build, leave, parser, random_pack, say, settings, wait

from ulysses.gradients.build import build_chain
from ulysses.gradients.chain import GradientPolicyChain, StepContext
from ulysses.gradients.presets import preset_tables
from ulysses.parallel.batch import ShardedBatch
from ulysses.zero.construct import initialize_distributed

TOY = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
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
    "gradient_noise, relative": [
        {"policy": "gradient_noise", "ratio": 0.01, "when": {"norm_z_below": -1e9, "warmup": 2}}
    ],
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


def take_step(
    bench: Bench, batch: ShardedBatch, micro_batches: int, chain: GradientPolicyChain, number: int
) -> tuple[float, float, bool]:
    """Return the seconds of an optimizer step and of the chain in it, and (of step 0) whether the chain changed the gradient's norm."""
    engine, mesh = bench.engine, bench.mesh
    count = (batch.num_tokens - 1) * micro_batches * mesh.data_parallel_size
    wait(engine.device)
    began = time.perf_counter()
    for i in range(micro_batches):
        total = -engine(batch).logps.sum()
        engine.backward(total * (mesh.world_size / count), last=i == micro_batches - 1)
    gradients = engine.gradients()
    loss = float(
        total
    )  # the loop's metrics are read here too: the device has finished the backward pass
    untouched = engine.gradients().norm() if number == 0 else 0.0
    ready = time.perf_counter()
    context = StepContext(step=number, total_steps=10**6, loss=loss)
    chain.apply(gradients, context)
    applied = time.perf_counter()
    if context.skip or context.stop:
        raise RuntimeError(f"the chain ends the step: {context.skip or context.stop}")
    moved = number == 0 and engine.gradients().norm() != untouched
    engine.step([0.0] * len(engine.zero.optimizer.param_groups))
    wait(engine.device)
    return time.perf_counter() - began, applied - ready, moved


def measure(
    step: Callable[..., tuple[float, float, bool]],
    variants: dict[str, Tables],
    rounds: int,
    kind: str,
) -> list[dict[str, Any]]:
    """Return one row per variant; the first round warms up and checks that idle chains change nothing and acting ones something."""
    chains = {"none": GradientPolicyChain([])} | {
        name: build_chain(tables) for name, tables in variants.items()
    }
    steps: dict[str, list[float]] = {name: [] for name in chains}
    inside: dict[str, list[float]] = {name: [] for name in chains}
    step(chains["none"], 0)
    for k in range(rounds + 1):
        for name, chain in chains.items():
            seconds, policies, moved = step(chain, k)
            if k:
                steps[name].append(seconds)
                inside[name].append(policies)
            elif moved == (kind == "idle" or name == "none"):
                raise RuntimeError(
                    f"{name} should {'change nothing' if moved else 'act'} but the gradient norm says otherwise"
                )
    return [
        {
            "policy": name, "kind": kind, "rounds": rounds, "step_ms": round(1e3 * median(steps[name]), 2),
            "policies_ms": round(1e3 * median(inside[name]), 2),
            "ratio": round(median(s / n for s, n in zip(steps[name], steps["none"], strict=True)), 4),
        }
        for name in chains
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| gradient policy | | step, ms | policies, ms | step / none |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r['policy']}` | {r['kind']} | {r['step_ms']} | {r['policies_ms']} | {r['ratio']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    p = parser(__doc__)
    p.set_defaults(arch="llama3.2-1b")
    p.add_argument(
        "--toy", action="store_true", help="a few thousand weights, to try the program on a CPU"
    )
    p.add_argument("--seq", type=int, default=8192, help="tokens of a micro-batch")
    p.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--acting-rounds", type=int, default=3)
    a, given = p.parse_known_args()
    if a.toy:
        a.layers, given = (
            2,
            [
                *given,
                *(
                    word
                    for key, value in TOY.items()
                    for word in (f"--model.config.{key}", str(value))
                ),
            ],
        )
    device = initialize_distributed()
    bench = build(settings(a.arch, a.layers, given), device)
    step = partial(take_step, bench, random_pack(bench, a.seq, 1), a.micro_batches)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    head = {"device": name, "gpus": bench.mesh.world_size, "arch": a.arch, "parameters": bench.shape.num_parameters(),
            "tokens": a.seq * a.micro_batches}  # fmt: skip
    rows = []
    for variants, rounds, kind in ((IDLE, a.rounds, "idle"), (ACTS, a.acting_rounds, "acts")):
        if rounds:
            rows += measure(step, variants, rounds, kind)
    for row in rows:
        say(head | row, a.out)
    if dist.get_rank() == 0:
        print(f"\n{json.dumps(head)}\n{table(rows)}", flush=True)
    leave()


if __name__ == "__main__":
    main()
