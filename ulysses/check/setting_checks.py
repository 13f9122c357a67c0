"""What can be refused from the settings and the installed packages alone, before any file is opened."""

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import version
from pkgutil import resolve_name

import torch

from ulysses import environment
from ulysses.config.command_line import contradictions
from ulysses.config.schema import Config
from ulysses.config.section import collecting, refuse, visible
from ulysses.options import TRACKERS, build_policies, check_parts, stage_of
from ulysses.parallel.mesh import divisors
from ulysses.stages.base import Stage
from ulysses.zero.settings import check_raw

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
TESTED = "0.19.8"  # of DeepSpeed, as pyproject.toml pins it


def check_settings(config: Config, world_size: int, findings: list[str] | None = None) -> Stage:
    """Refuse what the settings show to be wrong, and return the stage; arguments and errors are those of `prepare`."""
    if config.run.deterministic:  # set here, before anything starts CUDA
        require_determinism()
    stage = stage_of(config)
    errors = []
    world_size = world_size or environment.world_size()
    degree = config.parallel.sequence_parallel_size
    if degree != "auto" and world_size % degree:
        errors.append(
            f"parallel.sequence_parallel_size is {degree} but must divide the {world_size} processes; set it to "
            f"one of {divisors(world_size)}"
        )
    errors += contradictions(config, stage)
    errors += check_packages(config)
    if findings is None:  # a dry run starts no trackers, whose packages it does not need
        errors += check_trackers(config)
        gpus = torch.cuda.device_count()
        processes = environment.local_world_size()
        # a launcher says how many there are of this node; without one they may be those of several nodes
        if environment.launchers() and 0 < gpus < processes:
            errors.append(
                f"this node has {processes} processes but its number of GPUs is {gpus}; start one process for each GPU"
            )
    # wrong keys in the tables of DeepSpeed and of the gradient policies
    with collecting(errors):
        if raw := config.deepspeed.zero_optimization:
            check_raw(raw)
        build_policies(config.gradients)
    refuse(errors, findings)
    return stage


def check_packages(config: Config) -> Iterator[str]:
    """Yield which settings need a package, or a part of this engine, that is not installed."""
    if config.model.quantize == "nf4":
        yield from _absent("model.quantize", "bitsandbytes")
    if config.optimizer.moments == "8bit":
        yield from _absent("optimizer.moments", "bitsandbytes")
    yield from check_parts(config)
    if importlib.util.find_spec("deepspeed") is None:
        yield f"the package deepspeed is not installed; install deepspeed {TESTED}"
    elif (installed := version("deepspeed")) != TESTED:
        yield (
            f"deepspeed {installed} is installed, whose gradients and updates this engine was not tested with; install "
            f"deepspeed {TESTED}"
        )


def check_trackers(config: Config, strict: bool = True) -> Iterator[str]:
    """Yield which trackers need a package that is not installed or, if `strict`, cannot be imported."""
    if config.run.wandb:
        yield from _absent("run.wandb", "wandb")
    for name in config.run.trackers:
        if name in TRACKERS:
            yield from _absent("run.trackers", name)
            continue
        module = re.split("[.:]", name)[0]
        try:
            if strict:
                resolve_name(name)
            elif importlib.util.find_spec(module) is None:
                raise ImportError(f"there is no module {module}")
        except (Exception, SystemExit) as error:  # the module is the user's code
            yield (
                f"run.trackers has {name!r}, which cannot be imported ({visible(str(error))}); name "
                f"{', '.join(TRACKERS)}, or a class as module:Class, with the module's folder on PYTHONPATH"
            )


def _absent(key: str, package: str) -> Iterator[str]:
    if importlib.util.find_spec(package) is None:
        yield f"{key} is set but the package {package} is not installed; pip install {package}"


def require_determinism() -> None:
    """Make this process choose deterministic kernels only; call it before CUDA starts, when cuBLAS reads its setting.

    torch's operations then raise where they have no deterministic kernel, resolve_kernel refuses attention kernels that
    are not deterministic, and our own Triton kernels use no atomics. torch refuses a setting of cuBLAS that is not
    deterministic.
    """
    environment.preset({CUBLAS: ":4096:8"})
    torch.use_deterministic_algorithms(True)
