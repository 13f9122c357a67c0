"""Choose the attention kernel, and prove it before a run, once for each machine, version and shape."""

import math
from collections.abc import Callable
from dataclasses import astuple
from importlib.metadata import distributions
from pathlib import Path

import torch

from models.arch import ModelConfig
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.data.cache import digest_of_value
from ulysses.disk import lock_file, write_json
from ulysses.environment import local_rank
from ulysses.parallel.attention import prove_kernel
from ulysses.parallel.kernels.choice import KernelChoice, resolve_kernel
from ulysses.parallel.layout import head_layout
from ulysses.parallel.mesh import ParallelMesh
from ulysses.stages.base import Stage

# Tokens of a sequence up to which torch's attention is as fast as flash4, whose import takes seconds.
SHORT = 1024


def choose_kernel(stage: Stage, shape: ModelConfig) -> tuple[str, KernelChoice]:
    """Return the kernel's name for the layers, and the kernel that computes attention without a window here.

    Raises ConfigError for a kernel that cannot run here; ValueError if the kernels of linear attention are absent.
    """
    model = stage.config.model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = model.attention
    is_short = stage.requirements.longest_example <= SHORT
    if name == "auto" and device == "cuda" and model.dtype == "bfloat16" and is_short:
        name = "torch"
    dtype = getattr(torch, model.dtype)
    with error_context("model.attention"):
        for window in (*shape.windows, None):  # the last one, without a window, is reported
            kernel = resolve_kernel(name, device, dtype, shape.head_dim, window=window)
    if shape.delta and _needs_delta_kernels(stage.config, name, device):
        from models.ops.delta_kernels import check_installed

        check_installed()
    return name, kernel


def _needs_delta_kernels(config: Config, kernel: str, device: str) -> bool:
    """Return whether layers of linear attention run the kernels of other packages."""
    return device == "cuda" and config.model.dtype == "bfloat16" and kernel != "reference"


def check_kernel(
    stage: Stage,
    shape: ModelConfig,
    kernel: str,
    device: torch.device,
    mesh: ParallelMesh,
    shares: bool,
) -> None:
    """Prove the kernel on the heads that a rank has, and on the longest example; FloatingPointError if it is wrong.

    shares: whether sequences share prompts. ValueError if the kernels of linear attention cannot be imported.
    """
    config = stage.config
    cache = Path(config.data.cache)
    heads = head_layout(
        shape.num_attention_heads, shape.num_key_value_heads, mesh.head_parallel_size
    )
    prove_once(
        cache,
        kernel,
        device,
        getattr(torch, config.model.dtype),
        heads.query,
        heads.key,
        shape.head_dim,
        stage.requirements.longest_example,
        shape.windows or (None,),
    )
    if shape.delta and _needs_delta_kernels(config, kernel, device.type):
        from models.ops.delta_kernels import load, prove_rule

        keys, values, *widths = astuple(shape.delta)
        heads = head_layout(values, keys, math.gcd(mesh.sequence_parallel_size, values))
        if local_rank() > 0:
            load()  # while the machine's first process compiles, which imports fla-core meanwhile
        prove_once(
            cache,
            "gated delta rule",
            device,
            shares,
            heads.key,
            heads.query,
            *widths,
            prove=prove_rule,
        )
        load()  # in any case before memory is taken


def prove_once(
    cache: Path,
    kernel: str,
    device: torch.device,
    *case: object,
    prove: Callable[..., None] = prove_kernel,
) -> None:
    """Call prove(kernel, device, *case), unless a file in `cache` says that the same was proved before.

    Raises FloatingPointError for a kernel that is wrong; no file is written then.
    """
    facts = [kernel, *map(str, case), torch.__version__, torch.get_deterministic_debug_mode()]
    names = "ulysses-engine", "flash-attn-4", "triton", "fla-core", "flash-qla", "tilelang"
    for name in names:  # a package that is not installed adds its name alone
        facts += [name, *(package.version for package in distributions(name=name))]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts += [gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, gpu.total_memory]
        facts.append(torch.backends.cudnn.version())
    path = cache / f"kernel-{digest_of_value(facts)[:24]}.json"
    if path.exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    # one process of a machine compiles kernels, with all cores, and the others find them
    lock = path.with_suffix(".lock")
    with lock_file(lock):
        if not path.exists():
            prove(kernel, device, *case)
            write_json(path, facts)
    lock.unlink(missing_ok=True)  # processes that wait for it will find the proof
