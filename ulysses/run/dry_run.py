"""--dry-run and --inspect: what can be known of a run without training.

A dry run needs no weights, no data and no GPU: it reports what is absent as findings and plans the rest.
"""

import math

import torch

from ulysses.check.preflight import Prepared, prepare
from ulysses.config.schema import Config, Options
from ulysses.config.section import AbsentError, ConfigError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.preview import preview_examples
from ulysses.environment import wants_debug, world_size
from ulysses.memory.levels import LEVELS
from ulysses.plan.memory_choice import (
    ASSUMED_GIB,
    choose_memory,
    first_fit,
    longest_sequence,
    memory_line,
    micro_batch_line,
    planned_machine,
    planner_run,
)
from ulysses.plan.planner import (
    CPU_FLOPS,
    GIB,
    Machine,
    Workload,
    predict,
    step_flops,
    step_seconds,
)
from ulysses.run.checkpoint import resume_point
from ulysses.run.metrics import cpu_flops, slow_products

# exit code of a right configuration that names something which is not on this machine
ABSENT = 3


def dry_run(config: Config, options: Options) -> int:
    """Check everything and print the plan and a verdict; return the exit code, 3 if weights or data are absent.

    Raises ConfigError for a configuration that cannot be honoured, or that does not fit the GPU it names.
    """
    findings: list[str] = []
    world = options.gpus or world_size()
    if not torch.cuda.is_available():
        print(
            f"this machine has no GPU: the plan is for {world} GPU{'s' * (world > 1)} of "
            f"{options.gpu_memory or ASSUMED_GIB:g} GiB; --gpus and --gpu-memory name others"
        )
    prepared = prepare(config, world, findings)
    if options.debug or wants_debug([]):
        print(config.model_dump_json(indent=2))
    verdict = "the run can start"
    try:
        resume_point(config.run)
    except ValueError as error:
        verdict = f"the run would be refused: {error}"
    if prepared.shape is None:
        print(
            "without the model's config.json there is no plan of its memory",
            *findings,
            sep="\nfinding: ",
        )
    else:
        machine = planned_machine(config, options, world)
        train = _open(prepared, findings)
        _plan_steps(prepared, planner_run(prepared, machine, train), train, findings)
        if not (torch.cuda.is_available() or options.gpus or options.gpu_memory):
            _plan_cpu(prepared, machine, train)
    if findings:
        verdict = f"the settings are right; absent on this machine: {len(findings)}, see the findings above"
    print(f"verdict: {verdict}")
    return ABSENT if findings else 0


def _open(prepared: Prepared, findings: list[str]) -> TokenizedDataset | None:
    """Return the training data, or None if anything is absent."""
    if not findings:
        try:
            return prepared.open_data()[0]
        except AbsentError as error:  # the hub may not have the data
            findings.append(str(error))
    return None


def _plan_steps(
    prepared: Prepared, case: Workload, train: TokenizedDataset | None, findings: list[str]
) -> None:
    """Print how the run is divided, how long it is, and what it takes."""
    config, machine = prepared.config, case.machine
    stage, run, facts = prepared.stage, config.run, prepared.stage.requirements
    groups = machine.gpus // case.sp
    print(
        f"{machine.gpus} process{'es' * (machine.gpus > 1)}: data parallel {groups} x sequence parallel {case.sp}, "
        "among neighbours"
    )
    if train:
        loader = prepared.loader(train, case.tokens, groups)
        per_epoch = loader.steps_per_epoch * facts.steps_per_load
        total = stage.total_steps(loader)
        print(
            f"{len(train)} examples, {per_epoch} steps per epoch, {total} steps; {train.report}",
            *prepared.remarks(loader),
            sep="\n",
        )
    else:
        print(f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs of unknown length")
    for finding in findings:
        print("finding:", finding)
    rate, reason = config.usual_lr
    if config.optimizer.lr == rate:
        more = "; adapters take ten times as much" * bool(config.model.lora.rank)
        print(f"optimizer.lr {rate:g} is the default of {stage.name}: {reason}{more}")
    _plan_memory(prepared, case)


def _plan_memory(prepared: Prepared, case: Workload) -> None:
    """Print what every level takes, the longest sequence and what the run itself would choose.

    Raises ConfigError for a run that does not fit.
    """
    config, machine, model = prepared.config, case.machine, case.model
    world, batches = machine.gpus, case.micro_batches
    sequences = prepared.stage.sequences_per_example
    if config.model.path and prepared.folder is None:
        print(f"\nthe model is planned with the published shape of {config.model.path}")
    print(
        f"\n{prepared.shape.describe_window()}\n"
        f"predicted for {world} GPU{'s' * (world > 1)} of {machine.gpu_bytes / GIB:.1f} GiB (--gpu-memory), "
        f"{machine.host_bytes / GIB:.0f} GiB of host memory per node (--host-memory; 0 is unknown):\n"
        f"{model.parameters:,} parameters, {model.trained:,} trained; {batches} "
        f"micro-batch{'es' * (batches > 1)} per group and step, the fullest: {case.tokens:,} tokens in "
        f"{case.documents} sequence{'s' * (case.documents > 1)}; weights "
        f"{'resident' if case.resident else 'sharded'}:\n"
        f"  {'recompute':<16}{'GPU GiB':>9}{'host GiB / node':>17}{'layers offloaded':>18}{'s / step':>10}"
    )
    for level in LEVELS:
        choice = first_fit(case._replace(recompute=level))
        p = predict(choice)
        print(
            f"  {level:<16}{p.gpu / GIB:9.1f}{p.host * machine.local_processes / GIB:17.1f}"
            f"{choice.offloaded_layers:18}{step_seconds(choice):10.2f}{'' if p.fits else '   does not fit'}"
        )
    if case.rollout:
        print("  (the time of sampling comes on top)")
    note = " on each side of a pair" * (sequences == 2)
    for sp in sorted({case.sp, world}):
        longest = longest_sequence(case._replace(sp=sp, documents=sequences))
        print(f"longest sequence at sequence_parallel_size {sp}: {longest:,} tokens{note}")
    choice = choose_memory(case)
    print(f"{memory_line(choice)}; {step_seconds(choice):.2f} s / step")
    print(micro_batch_line(choice, config.batch.tokens_per_microbatch == "auto"))


def _plan_cpu(prepared: Prepared, machine: Machine, train: TokenizedDataset | None) -> None:
    """Print how long a step takes on this machine's CPU, which recomputes nothing."""
    config = prepared.config
    dtype, count = config.model.dtype, config.batch.tokens_per_microbatch
    cpu = Machine(machine.gpus, math.inf, math.inf, 1, CPU_FLOPS, CPU_FLOPS)
    choice = choose_memory(planner_run(prepared, cpu, train))
    flops = sum(step_flops(choice)) * choice.micro_batches
    seconds = flops * machine.gpus / cpu_flops(dtype)
    needed = predict(choice).gpu
    line = f"on this machine's CPU a step takes about {seconds:.1f} s"
    line += f", and each process about {needed / GIB:.1f} GiB of memory"
    if needed * machine.gpus > machine.host_bytes:
        line += ", which is more than is free"
    print("; ".join(filter(None, (line, slow_products(dtype)))))
    print(micro_batch_line(choice, count == "auto"))


def inspect(config: Config, samples: int) -> int:
    """Print training samples as the loss sees them; return the exit code."""
    # neither the number of processes nor the weights, the disk or the folder's checkpoints matter here
    findings: list[str] = []
    degree = config.parallel.sequence_parallel_size
    prepared = prepare(config, 1 if degree == "auto" else degree, findings)
    if prepared.tokenizer is None:
        raise ConfigError(findings[0])
    preview_examples(prepared.open_data()[0], prepared.tokenizer, samples)
    print(prepared.shape.describe_window())
    return 0
