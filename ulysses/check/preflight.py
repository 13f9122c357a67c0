"""The table of a run's checks: when each is made, what it reads and what it finds. `prepare` makes the first ones.

    settings     each process by itself, before any file is opened
    files        each process by itself: all that is wrong or absent is told at once
    all files    each process by itself, if nothing was absent
    data         after the data are tokenised and open
    resuming     before a checkpoint is continued
    processes    after the processes have met
    folder       after they agree; nothing is written there yet but who holds it
    plan         after the run is planned, before it takes memory

Each error is one sentence: what was given, what is required and what to change.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import Values, error_context, refuse
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.sources import parse_sources, repeated_data
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.kernels.choice import KernelChoice
from ulysses.registry import load, stage_of
from ulysses.stages.base import Stage

ROUTERS = {"router_aux_loss_coefficient", "freeze_router"}  # settings of experts
# Share of a vocabulary that its own tokenizer knows at least; the rest is padding.
LEAST_KNOWN = 0.9

# When a check is made, where it is, what it reads and what it finds. It is a function of this room, or of another one
# that is named, and is imported when it is made. Its arguments are what it reads. One with "?" may be unknown; without
# any other the check is left out, because that it is absent or wrong has been told. A check that finds nothing returns
# the sentences or errors about what is wrong.
TABLE = """
settings   setting_checks:check_processes      config world_size
settings   setting_checks:contradictions       config
settings   setting_checks:check_packages       config
settings   setting_checks:check_tables         config
files      input_files:check_sources           config
files      plan.question:published_shape       config absent                                   shape
files      input_files:read_shape              config strict                                   shape folder
files      input_files:check_model             config stage shape folder?
files      input_files:fit_window              config shape                                    shape
files      adapter_settings:check_routers      model shape routers
files      adapter_settings:check_adapters     adapters shape config
files      adapter_settings:choose_targets     config adapters shape                           config
files      input_files:read_tokenizer          config stage shape folder?  shape tokenizer place template
files      other_models:read_others            config models strict others
files      kernel_proof:choose_kernel          config stage shape strict                       attention kernel
files      other_models:check_rewards          rewards strict
files      run_folder:resume_point             run                                             resume_from
files      resuming:check_same_run             config shape resume_from
all files  other_models:check_vocabularies     stage shape tokenizer models others
all files  input_files:initial_weights         config stage shape tokenizer template? folder? place?  shape weights
all files  run_folder:check_folders            config folder? place? weights others
all files  run_folder:check_disk               config shape resume_from?                       disk_warning
data       input_files:check_examples          config train held_out?
resuming   resuming:changes                    config resume_from digests                      changes
processes  agreement:facts_of                  inputs digests verify                           facts
processes  agreement:agree                     facts
folder     run_folder:hold_output              config resources                                run_id left_by
plan       kernel_proof:check_kernel           config stage shape attention device mesh
plan       plan.planner:choose_memory          question                                          memory
plan       plan.planner:check_host             config memory
"""


@dataclass
class RunInputs:
    """What a run starts from, as the checks found it; after a dry run with findings some of it is None."""

    config: Config
    stage: Stage
    shape: ModelConfig
    folder: Path | None  # of the model; None for a shape given by name or keys
    tokenizer: PreTrainedTokenizerFast
    place: Path  # the folder, or the tokenizer.json, that the tokenizer was read from
    template: ChatTemplate | None  # None for plain text
    weights: InitialWeights
    # of the stage's other models, by the settings that name them
    others: dict[str, InitialWeights]
    attention: str  # what the layers are told of the kernel
    kernel: KernelChoice
    resume_from: Path | None
    disk_warning: str


def make_checks(moment: str, findings: list[str] | None = None, **known: object) -> Values:
    """Make a moment's checks in their order, and return `known` with what they found.

    Args:
        findings: as in `prepare`.
        known: what the checks read, by name.

    Raises ConfigError for all that is wrong.
    """
    errors: list[object] = []
    for line in TABLE.strip().splitlines():
        when, check, reads, *finds = re.split(" {2,}", line)
        given = {name: known.get(name.rstrip("?")) for name in reads.split()}
        lacks = [name for name, value in given.items() if value is None and name[-1] != "?"]
        if when != moment or lacks:
            continue
        room = "ulysses" if "." in check else "ulysses.check"
        with error_context(errors=errors):
            found = load(f"{room}.{check}")(*given.values())
            if not finds:
                errors += found or ()
                continue
            names = finds[0].split()
            known |= zip(names, found if len(names) > 1 else [found])
    refuse(errors, findings)
    return known


def prepare(
    config: Config, world_size: int = 0, findings: list[str] | None = None
) -> RunInputs:
    """Check a configuration against the machine and the files, and read what they say about the model.

    Nothing is written, and no data are opened. With `run.deterministic`, torch's switches are set here.

    Args:
        world_size: number of processes; 0 asks the launcher.
        findings: collects, for a dry run, what is merely absent: weights, data, tokenizer, hub, disk space. Without it
            absence refuses the run like everything else. A dry run downloads no weights and checks no kernel.

    Raises ConfigError: all errors about settings or, if there are none, about what they name.
    """
    known = make_checks("settings", findings, config=config, world_size=world_size)
    stage, model = stage_of(config), config.model
    known |= {
        "stage": stage,
        "strict": findings is None,
        # a dry run that continues no checkpoint says itself that the folder is taken
        "run": config.run if findings is None or config.run.resume != "never" else None,
        "absent": model.path if model.path and not Path(model.path).is_dir() else None,
        "model": model,
        "routers": model.model_dump(include=ROUTERS, exclude_defaults=True) or None,
        "adapters": model.lora if model.lora.rank else None,
        "models": [other for other in stage.requirements.models if other.path] or None,
        "rewards": config.ppo.reward or None,
        "others": {},
    }
    for moment in ("files", "all files"):
        if not findings:
            known = make_checks(moment, findings, **known)
    return RunInputs(**{field.name: known.get(field.name) for field in fields(RunInputs)})


def remarks(inputs: RunInputs, loader: StepLoader) -> Iterator[str]:
    """Yield the lines about a run's settings and the steps that it takes."""
    if inputs.disk_warning:
        yield inputs.disk_warning
    config, total = inputs.config, inputs.stage.total_steps(loader)
    data = config.data
    if data.eval and (
        both := repeated_data(parse_sources(data.train), parse_sources(data.eval))
    ):
        yield f"data.eval reads what data.train trains on, so it is not held out: {', '.join(both)}"
    rate, warmup = config.optimizer.lr, config.optimizer.warmup
    if not rate:
        yield "optimizer.lr is 0: no weight will change"
    elif warmup > max(total, 1):
        yield (
            f"optimizer.warmup is {warmup:g} steps but the run has {total}: the learning rate stays below {rate:g}"
        )
    if config.model.tokenizer and config.model.init == "pretrained":
        known, vocabulary = len(inputs.tokenizer), inputs.shape.vocab_size
        if known < LEAST_KNOWN * vocabulary:
            yield (
                f"model.tokenizer has {known} tokens but the model's vocabulary has {vocabulary}: it may belong to "
                "another model, whose tokens mean something else"
            )
    groups, per_epoch = loader.data_parallel_size, loader.examples_per_epoch
    examples = min(loader.examples_per_step, per_epoch)
    if examples < groups:
        yield (
            f"a step has {examples} examples for {groups} data-parallel groups: {groups - examples} of them "
            "compute nothing; raise batch.examples or parallel.sequence_parallel_size"
        )
    if loader.examples_per_step > per_epoch:
        yield (
            f"a step takes {loader.examples_per_step} examples (batch.examples) but the data has only {per_epoch}: "
            "every step trains on all of them"
        )
