"""What can be refused from the configuration and the installed packages alone."""

import importlib.util
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name

import torch

from ulysses import environment
from ulysses.config.schema import Config
from ulysses.config.section import CREDENTIALS, visible
from ulysses.options import STAGES, TRACKERS, check_parts, gradient_policies, stage_of
from ulysses.parallel.mesh import divisors
from ulysses.zero.settings import check_raw

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
MOST_LR = 10.0
TESTED = "0.19.8"  # of DeepSpeed, as pyproject.toml pins it
# a path with parameters, or a field that holds a secret, in what a server is sent
SECRET_FIELDS = re.compile(
    r'"/[^"]*[?#;@&=]|"[^"]*(key|token|secret|passw(or)?d|pwd|auth(orization)?|bearer|credentials?|cookie)":',
    re.I,
)


def check_processes(config: Config, world_size: int) -> Iterator[str]:
    """Yield why so many processes cannot share sequences; 0 asks the launcher for their number."""
    if config.run.deterministic:  # before anything starts CUDA
        require_determinism()
    world_size = world_size or environment.world_size()
    degree = config.parallel.sequence_parallel_size
    if degree != "auto" and world_size % degree:
        yield (
            f"parallel.sequence_parallel_size is {degree} but must divide the {world_size} processes; set it to "
            f"one of {divisors(world_size)}"
        )


def check_packages(config: Config) -> Iterator[str]:
    """Yield which settings need a package that is not installed, or a class that cannot be imported."""
    for key, wanted, package in (
        ("model.lora.rank", config.model.lora.rank, "peft"),
        ("model.quantize", config.model.quantize == "nf4", "bitsandbytes"),
        ("optimizer.moments", config.optimizer.moments == "8bit", "bitsandbytes"),
        ("run.wandb", config.run.wandb, "wandb"),
        *(("run.trackers", name, name) for name in config.run.trackers if name in TRACKERS),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            yield (
                f"{key} is set but the package {package} is not installed; pip install {package}"
            )
    yield from check_parts(config)
    for name in sorted({*config.run.trackers} - {*TRACKERS}):
        try:
            resolve_name(name)
        except (Exception, SystemExit) as error:  # the module is the user's code
            yield (
                f"run.trackers has {name!r}, which cannot be imported ({visible(str(error))}); name "
                f"{', '.join(TRACKERS)}, or a class as module:Class, with the module's folder on PYTHONPATH"
            )
    if importlib.util.find_spec("deepspeed") is None:
        yield f"the package deepspeed is not installed; install deepspeed {TESTED}"
    elif (found := version("deepspeed")) != TESTED:
        yield (
            f"deepspeed {found} is installed, whose gradients and updates this engine was not tested with; install "
            f"deepspeed {TESTED}"
        )


def check_tables(config: Config) -> None:
    """Refuse what the tables of DeepSpeed and of the gradient policies hold; ValueError names the key."""
    if raw := config.deepspeed.zero_optimization:
        check_raw(raw)
    gradient_policies(config.gradients)


def require_determinism() -> None:
    """Make this process choose deterministic kernels only; it must be called before CUDA starts.

    torch's operations then raise where they have no deterministic kernel, resolve_kernel refuses attention kernels that
    have none, and our own Triton kernels use no atomics. cuBLAS reads its workspace setting once, when CUDA starts;
    torch refuses one that is not deterministic.
    """
    environment.preset({CUBLAS: ":4096:8"})
    torch.use_deterministic_algorithms(True)


def contradictions(config: Config) -> Iterator[str]:
    """Yield what is wrong with settings of which each is right by itself; the stage's own checks come last."""
    stage, model, data, run, memory = (
        config.stage,
        config.model,
        config.data,
        config.run,
        config.memory,
    )
    if model.path and model.arch:
        yield "model.path and model.arch are both set; set only one of them"
    elif not model.path and (model.init == "pretrained" or not (model.arch or model.config)):
        yield (
            "the model is missing; set model.path to a folder or hub id, or model.arch with model.init = "
            '"random"'
        )
    elif model.init == "pretrained" and model.config:
        yield (
            "model.config changes the shape, which pretrained weights do not fit; remove it, or set model.init = "
            '"random"'
        )
    if model.quantize != "none" and not model.lora.rank:
        yield (
            f'model.quantize is "{model.quantize}" but all weights are trained, which needs them as they are; set '
            'model.lora.rank, or model.quantize = "none"'
        )
    if model.add_tokens and model.lora.rank and not model.lora.train:
        yield (
            "model.add_tokens makes rows of the embedding, which adapters alone neither train nor hold; set "
            'model.lora.train = ["embeddings"]'
        )
    if config.optimizer.lr > MOST_LR:
        yield f"optimizer.lr is {config.optimizer.lr:g}, after which nothing of a model is left; rates lie below 1e-2"
    if memory.recompute == "none" and memory.offload == "checkpoints":
        yield (
            'memory.offload is "checkpoints" but memory.recompute "none" makes no checkpoints; set '
            'memory.recompute to "auto", or memory.offload to "none"'
        )
    if memory.weights == "resident" and memory.offload_parameters:
        yield (
            'memory.weights is "resident" but memory.offload_parameters keeps them in host memory; set '
            'memory.weights to "auto", or memory.offload_parameters to false'
        )
    if run.resume == "auto" and run.overwrite:
        yield (
            'run.resume is "auto", which continues the newest checkpoint, but run.overwrite deletes what an earlier '
            "run left; set only one of them"
        )
    for name, settings in config.model_dump(exclude={"stage"}).items():
        for key, value in settings.items():
            text = json.dumps(value, ensure_ascii=False)
            if CREDENTIALS.search(text) or (
                key == "sampler_reload" and SECRET_FIELDS.search(text)
            ):
                yield (
                    f"{name}.{key} holds a key, a name or parameters beside host, port and path of an address, which "
                    "the log and config.json would show; take them out, and set the environment variable "
                    f"{'ULYSSES_API_KEY, which servers get as a bearer token' if name == 'ppo' else 'HF_TOKEN'}"
                )
    if bool(run.steps) == bool(run.epochs):
        yield (
            f"run.steps is {run.steps} and run.epochs is {run.epochs:g}, but exactly one of them must be above "
            "0; set the one that you mean"
        )
    unread = {
        name: f"stage {stage!r} reads no settings of {name}; remove them, or set stage = {name!r}"
        for name in {*STAGES} - {stage}
    }
    if not model.lora.rank:
        unread["model.lora"] = (
            "model.lora.rank is 0, which trains all weights; set the rank, or remove them"
        )
    for table, reason in unread.items():
        # the defaults of a configuration that a run has written out are nobody's wish
        if given := attrgetter(table)(config).model_dump(exclude_defaults=True):
            yield f"{', '.join(f'{table}.{key}' for key in sorted(given))}: {reason}"
    if data.eval and data.eval_fraction:
        yield f"data.eval_fraction is {data.eval_fraction:g} but data.eval names held-out data; remove one of them"
    if run.patience and not run.eval_every:
        yield (
            f"run.patience is {run.patience} evaluations but only the end of the run is evaluated; set "
            "run.eval_every"
        )
    for key in ("eval_every", "samples"):
        if (value := getattr(run, key)) and not (data.eval or data.eval_fraction):
            yield (
                f"run.{key} is {value} but there is nothing to evaluate; set data.eval or data.eval_fraction, or "
                f"run.{key} = 0"
            )
    if run.samples and stage_of(config).dataset_type in ("text", "ranked"):
        yield f"run.samples is {run.samples} but stage {stage!r} answers no prompts; set it to 0"
    given = data.model_dump(include={"turns", "train_on"}, exclude_defaults=True)
    for key in given if stage_of(config).dataset_type != "sequence" else ():
        yield f"data.{key} is {given[key]!r} but stage {stage!r} trains the last answer only; remove it"
    if data.turns == "separate" and data.train_on != "assistant":
        yield (
            f'data.turns is "separate" but data.train_on is {data.train_on!r}, which trains each conversation as '
            'one sequence; set data.train_on = "assistant"'
        )
    yield from stage_of(config).check()
