"""The checks before a run takes memory, and what they find.

Values and keys are checked before, as the configuration is read (config/command_line.py). `prepare` makes the checks
that a process can make alone. The others are called later (run/training_run.py):

    data         check_examples, once the data are open (run/build.py)
    resuming     changes, before a checkpoint is continued
    processes    agree, once the processes have met
    folder       hold_output, after they agree; until then nothing is written into the run's folder
    plan         check_kernel and choose_memory, before the run takes memory

Each error is one sentence: what was given, what is required and what to change.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ulysses.check.agreement import check_same_run
from ulysses.check.input_files import (
    RunInputs,
    check_routers,
    check_sources,
    check_weights,
    check_window,
    initial_weights,
    published_shape,
    read_shape,
    read_tokenizer,
)
from ulysses.check.kernel_proof import choose_kernel
from ulysses.check.run_folder import check_disk, check_folders, resume_point
from ulysses.check.setting_checks import check_settings
from ulysses.config.schema import Config
from ulysses.config.section import collecting, error_context, refuse
from ulysses.data.read.sources import parse_sources, repeated_data
from ulysses.data.serve.steps import StepLoader
from ulysses.options import check_parts

# The least share of a vocabulary that a model's own tokenizer knows; the rest is padding.
LEAST_KNOWN = 0.9


def prepare(
    config: Config, world_size: int = 0, findings: list[str] | None = None
) -> RunInputs:
    """Check a configuration against the machine and the files, and read what they say about the model.

    Nothing is written, and no data are opened. With `run.deterministic`, torch's switches are set here. What cannot be
    read stays None: its error is told, and the checks that need it are left out.

    Args:
        world_size: number of processes; 0 asks the launcher.
        findings: of a dry run: collects what is merely absent: weights, data, tokenizer, hub, disk space. No weights
            are downloaded then, and no kernel is checked. Without findings absence refuses the run like other errors.

    Raises ConfigError: all errors about settings or, if there are none, about what they name.
    """
    stage = check_settings(config, world_size, findings)
    model = config.model
    strict = findings is None
    others = [other for other in stage.requirements.models if other.path]
    shape = folder = tokenizer = tokenizer_path = template = None
    weights = kernel = resume_from = None
    attention = model.attention
    other_weights = {}
    errors = []

    # ---------------------------------------------------------------- files, each of which may be absent
    with collecting(errors):
        check_sources(config)
    with collecting(errors):
        # a dry run can plan with the shape of a well-known model that is not on this machine
        if model.path and not Path(model.path).is_dir():
            shape = published_shape(config)
        shape, folder = read_shape(config, strict)
    if shape:
        if absent := [*check_parts(config, shape)]:
            refuse(errors + absent)
        with collecting(errors):
            shape.to_hf(reward=stage.reward)  # refuses a shape whose export could not be loaded
            if folder and model.init == "pretrained":
                with error_context("model.path"):
                    check_weights(shape, folder, reward=stage.reward, quantize=model.quantize)
        with collecting(errors):
            check_window(stage, shape)
            longest = max(stage.requirements.longest_example, shape.max_position_embeddings)
            shape = replace(shape, max_position_embeddings=longest)
        errors += check_routers(model, shape)
        if model.lora.rank:
            from ulysses.check.adapter_settings import (
                check_adapters,
                choose_base,
                choose_targets,
            )

            errors += check_adapters(config, shape)
            # the targets come first, because an adapter in the model's folder is compared with them
            stage = replace(stage, config=choose_targets(config, shape))
            if folder and model.init == "pretrained":
                with collecting(errors):
                    stage = replace(stage, config=choose_base(stage, folder))
            config = stage.config
        with collecting(errors):
            shape, tokenizer, tokenizer_path, template = read_tokenizer(stage, shape, folder)
        if strict:  # a dry run may plan for another machine
            with collecting(errors):
                attention, kernel = choose_kernel(stage, shape)
    if others:
        from ulysses.check.other_models import check_vocabularies, read_other

        for other in others:
            with collecting(errors):
                read = read_other(other, need_weights=strict)
                check_window(stage, read.shape, other.setting)
                other_weights[other.setting] = read
    if config.ppo.reward or config.ppo.rollout:
        from ulysses.rl.rewards import check_rewards

        errors += check_rewards(config.ppo, strict)
    # a dry run that continues no checkpoint looks at the run's folder later, for its verdict
    if strict or config.run.resume != "never":
        with collecting(errors):
            resume_from = resume_point(config.run)
    if shape and resume_from:
        with collecting(errors):
            check_same_run(stage, shape, resume_from)
    refuse(errors, findings)

    # ---------------------------------------------------------------- all of them together, if nothing was absent
    if not findings:
        if others:
            errors += check_vocabularies(stage, shape, tokenizer, others, other_weights)
        with collecting(errors):
            shape, weights = initial_weights(
                stage, shape, tokenizer, template, folder, tokenizer_path
            )
    inputs = RunInputs(
        stage=stage,
        shape=shape,
        folder=folder,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        template=template,
        weights=weights,
        others=other_weights,
        attention=attention,
        kernel=kernel,
        resume_from=resume_from,
    )
    if not findings:
        if weights:
            with collecting(errors):
                check_folders(inputs)
        with collecting(errors):
            inputs = replace(inputs, disk_warning=check_disk(inputs))
        refuse(errors, findings)
    return inputs


def remarks(inputs: RunInputs, loader: StepLoader) -> Iterator[str]:
    """Yield lines about settings that are right and may still not be meant."""
    if inputs.disk_warning:
        yield inputs.disk_warning
    config = inputs.config
    total = inputs.stage.total_steps(loader)
    files = inputs.weights and inputs.weights.files  # a dry run may have found none
    if files and files.adapter:
        how = "merged into its base; exports are whole models"
        if inputs.weights.adapters:
            how = f"continued; its base is {config.model.path}"
        yield f"model.path {files.folder} is an adapter, which is {how}"
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


def remarks_on_data(config: Config, loader: StepLoader) -> Iterator[str]:
    """Yield remarks about the data that `TrainingRun.train` trains on; a program with its own loop hears none."""
    data = config.data
    train = parse_sources(data.train)
    if data.eval and (both := repeated_data(train, parse_sources(data.eval))):
        yield f"data.eval reads what data.train trains on, so it is not held out: {', '.join(both)}"
    for i, source in enumerate(train if data.eval_fraction else []):
        if twice := repeated_data(train[:i], [source]):
            yield (
                f"data.train reads {', '.join(twice)} again, and data.eval_fraction holds other rows of it out: what "
                "is held out is trained on, too"
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
    # the examples of an epoch's last step, which is a whole one if none is left over
    last = per_epoch % loader.examples_per_step or examples
    parts = config.ppo.minibatches
    if last < parts:
        yield (
            f"the last rollout of an epoch has {last} prompts for {parts} minibatches (ppo.minibatches): "
            f"{parts - last} steps of each pass train nothing"
        )
