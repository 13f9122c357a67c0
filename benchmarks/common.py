"""What the measuring programs share: an engine built from train.py's own settings, a timed step, subprocesses, tables.

    settings -> build -> Bench -> remember (levels and offload for a length) -> measure -> one JSON line
    per case

Drivers (max_length.py, small_models.py) start throughput.py under torchrun for each case and collect its lines.
"""

import argparse
import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence as Several
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# examples/ is not installed, and the engine need not be
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from ulysses.check.input_files import read_shape
from ulysses.check.kernel_proof import check_kernel, choose_kernel
from ulysses.config.command_line import parse_command_line
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError
from ulysses.gradients.policy import StepContext
from ulysses.options import build_policies, stage_of
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.kernels.choice import resolve_kernel
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.plan.hardware import GIB, device_peaks, this_machine
from ulysses.plan.layer_cost import model_flops
from ulysses.plan.planner import choose_memory, planner_question
from ulysses.plan.step_cost import Plan, step_flops
from ulysses.run.build import layer_memory, trained_engine
from ulysses.zero.engine import ZeroEngine

FIT = "fit mode: not a training step"  # all attention but the last layer's is skipped
LR = 1e-6
# what rows are made of: each word is a token of the demo's tokenizer
WORDS = (
    "red blue green white black brown lamp chair table clock vase mirror kitchen garden attic cellar wood glass iron"
).split()


class Bench(NamedTuple):
    """Hold an engine, the settings that made it, and whether it was built for layers that run as CUDA graphs."""

    config: Config
    shape: ModelConfig
    mesh: ParallelMesh
    engine: ZeroEngine
    graphs: bool


def plain_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the program's docstring as it is written."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=layout, allow_abbrev=False)


def add_options(p: argparse.ArgumentParser, /, **options: tuple[Any, str]) -> None:
    """Add options by name, each with default and help; values have the default's type, and a list takes several."""
    for name, (default, text) in options.items():
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        kind = type(default[0] if several else default)
        flag = "--" + name.replace("_", "-")
        p.add_argument(flag, type=kind, default=default, help=text, **several)


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with what programs that measure a model share; what it does not know are train.py's settings."""
    p = plain_parser(text)
    add_options(
        p,
        arch=("llama3-8b", "architecture, as in model.arch"),
        layers=(0, "use only this many layers; 0 uses all"),
        gpus=(torch.cuda.device_count() or 1, "processes that a driver starts"),
        out=("", "append the JSON lines to this file too"),
    )
    return p


def settings(arch: str, layers: int, given: Several[str] = ()) -> Config:
    """Return train.py's configuration for random weights; `given` are its arguments ("--memory.recompute", ...)."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    fixed = (
        f"--stage sft --model.arch {arch} --model.init random --model.dtype {dtype} "
        f"--run.steps 1 --optimizer.lr {LR}"
    )
    if layers:
        fixed += f" --model.config.num_hidden_layers {layers}"
    return parse_command_line([*fixed.split(), *given]).config


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return the configuration with some values of a section replaced."""
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values)}
    )


def build(
    config: Config,
    device: torch.device,
    tokens: int,
    documents: int = 1,
    micro_batches: int = 1,
) -> Bench:
    """Create mesh and engine as a run does for its longest packs, which have `tokens`; all ranks call it together.

    As in a run, modules stay out of all later collections of garbage.
    Raises ConfigError where a run would refuse.
    """
    gc.freeze()
    shape, _ = read_shape(config)
    degree = config.parallel.sequence_parallel_size
    mesh = ParallelMesh(degree, num_heads=shape.num_attention_heads, windows=shape.windows)
    stage = stage_of(config)
    # compile its kernels side by side, and not one after the other in the first step
    if shape.delta:
        kernel, _ = choose_kernel(stage, shape)
        check_kernel(stage, shape, kernel, device, mesh, shares=True)
    choice = planned(config, shape, device, tokens, documents, micro_batches)
    engine = trained_engine(
        stage,
        InitialWeights(shape, 0, quantize=config.model.quantize),
        mesh,
        choice,
        config.model.attention,
    )
    # where the weights are is decided once
    weights = "resident" if choice.resident else "sharded"
    return Bench(changed(config, "memory", weights=weights), shape, mesh, engine, choice.graphs)


def planned(
    config: Config,
    shape: ModelConfig,
    device: torch.device,
    tokens: int,
    documents: int,
    micro_batches: int,
) -> Plan:
    """Return the planner's choice for steps of such packs; all ranks call it together."""
    config = changed(config, "data", max_length=max(8, tokens // documents))
    machine = this_machine(device, config.memory.host_memory)
    question = planner_question(stage_of(config), shape, machine, tokens)
    return choose_memory(question._replace(whole_steps=micro_batches == 1))


def remember(bench: Bench, tokens: int, documents: int = 1, micro_batches: int = 1) -> Plan:
    """Let the planner choose what the layers keep for such packs, as a run does; all ranks call it together.

    Raises ConfigError where a run would refuse.
    """
    given = bench.config, bench.shape, bench.engine.device
    choice = planned(*given, tokens, documents, micro_batches)
    if choice.graphs and not bench.graphs:
        raise ConfigError(
            "layers with such packs run as CUDA graphs, but not those with the largest pack, for which the engine was "
            "built; measure these packs in a call of their own"
        )
    decoder: Any = bench.engine.module.model
    decoder.set_memory(layer_memory(choice))
    return choice


def random_pack(bench: Bench, length: int, documents: int) -> ShardedBatch:
    """Return this data-parallel group's pack: `documents` random sequences of `length`."""
    draw = torch.Generator().manual_seed(1 + bench.mesh.dp_rank)
    tokens = torch.randint(0, bench.shape.vocab_size, (documents, length), generator=draw)
    return pack_shard(
        [Sequence(row, torch.ones(length)) for row in tokens], bench.mesh, bench.engine.device
    )


def take_step(
    bench: Bench, batch: ShardedBatch, count: int, micro_batches: int = 1
) -> torch.Tensor:
    """Run forward, backward, gradient policies and the update; return this rank's sum of losses."""
    engine = bench.engine
    for _ in range(micro_batches):
        loss = engine(batch, nll=True).nll
        scale = bench.mesh.world_size / count / micro_batches
        engine.backward(loss * scale, only_microbatch=micro_batches == 1)
        loss = loss.detach()  # its graph goes while the device still computes, as in a run
    gradients = engine.gradients()
    build_policies(bench.config.gradients).apply(
        gradients, StepContext(step=1, total_steps=9, loss=0.0, lr=LR, seed=0)
    )
    engine.step(gradients, LR)
    return loss


def timed_steps(
    bench: Bench, batch: ShardedBatch, count: int, steps: int, micro_batches: int = 1
) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of a first step and of `steps` more, and the last one's loss; memory peaks begin anew."""
    device = bench.engine.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 1):
        wait(device)
        began = time.perf_counter()
        loss = take_step(bench, batch, count, micro_batches)
        wait(device)
        times.append(time.perf_counter() - began)
    return times, loss


def measure(
    bench: Bench,
    length: int,
    choice: Plan,
    *,
    documents: int = 1,
    micro_batches: int = 1,
    steps: int = 3,
) -> dict[str, Any]:
    """Time `steps` steps after a first one (0: the first one itself); return the case's row, the same on all ranks.

    A step of several micro-batches takes the same one again and again; its seconds are those of all.

    mfu counts model FLOPs, 6 N T + 6 L (H E) sum(length^2), executed what is computed, as shares of the peak.
    peak_gib is what tensors took at most and reserved_gib what the allocator did (it gives the rest back when memory
    is short), of the fullest GPU; host_gib the resident memory of all processes.
    """
    config, shape, mesh, device = bench.config, bench.shape, bench.mesh, bench.engine.device
    tokens, groups = length * documents, mesh.data_parallel_size
    batch = random_pack(bench, length, documents)
    count = (length - 1) * documents * groups
    times, loss = timed_steps(bench, batch, count, steps, micro_batches)
    seconds = median(times[1:] or times)
    peaks, name = (0, 0), "CPU"
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        name = torch.cuda.get_device_name()
    own = float(loss), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, *peaks
    losses, hosts, allocated, reserved = zip(*gather(own))
    model = choice.question.model
    adapters = 0 if model.is_full else model.trained
    flops = model_flops(model, tokens, batch.num_squares, tokens)
    # of each GPU: packs per second
    rate = groups * micro_batches / seconds / mesh.world_size
    # what a rank's step really computes, as the planner counts it
    executed = sum(step_flops(choice)) * mesh.sequence_parallel_size
    limit, dtype = (device_peaks() or (None,))[0], getattr(torch, config.model.dtype)
    kernel = resolve_kernel(config.model.attention, device, dtype, shape.head_dim).name
    return {
        "engine": "ours", "gpu": name, "stage": "sft",
        "arch": config.model.arch, "layers": shape.num_hidden_layers, "vocab_size": shape.vocab_size,
        "adapters": adapters, "unmet": model.idle_adapters, "quantize": config.model.quantize, "gpus": mesh.world_size,
        "sp": mesh.sequence_parallel_size, "dp": groups, "seq": length, "documents": documents, "tokens": tokens,
        "kernel": kernel, "recompute": choice.name, "weights": config.memory.weights, "graphs": choice.graphs,
        "micro_batches": micro_batches, "offload": choice.offloaded_layers,
        "optimizer": "host" if config.memory.offload_optimizer else "gpu",
        "seconds": round(seconds, 4), "tok_s_gpu": round(tokens * rate),
        "mfu": limit and round(flops * rate / limit, 3),
        "executed": limit and round(executed * rate / limit, 3), "peak_gib": round(max(allocated) / GIB, 1),
        "reserved_gib": round(max(reserved) / GIB, 1), "host_gib": round(sum(hosts), 1),
        "loss": round(sum(losses) / count, 4),
    }  # fmt: skip


def wait(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()


def say(row: dict[str, Any], out: str = "") -> None:
    """Print a row as JSON on rank 0, and append it to the file `out`."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if out:
            with Path(out).open("a") as file:
                file.write(json.dumps(row) + "\n")


def leave() -> None:
    """End a rank at once, when all have come here: libraries leave threads behind."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def torchrun(gpus: int) -> list[str]:
    """Return the beginning of a command line that starts as many processes."""
    module = "torch.distributed.run"
    return [sys.executable, "-m", module, "--standalone", f"--nproc_per_node={gpus}"]


def launch(
    gpus: int, arguments: Several[str], timeout: float = 590.0
) -> tuple[list[dict[str, Any]], bool]:
    """Run a program under torchrun, its text passed on; return its JSON lines and whether it ended well and in time."""
    limited = ["timeout", "--kill-after=10", str(timeout)]  # it ends the workers too
    process = subprocess.Popen(
        [*limited, *torchrun(gpus), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    rows = []
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if line.startswith("{"):
            row = json.loads(line)
            # Other harnesses call it step_s.
            rows.append({**row, "seconds": row["step_s"]} if "step_s" in row else row)
    return rows, process.wait() == 0


def table(rows: list[dict[str, Any]], columns: Several[str]) -> str:
    """Lay rows out as Markdown; what a row lacks is left blank, and what all lack is left out."""
    columns = [name for name in columns if any(name in row for row in rows)]
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    header, *lines = ("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in cells)
    return "\n".join([header, re.sub(r"[^|]", "-", header), *lines])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)
