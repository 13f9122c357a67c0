"""What is worth a line before a run begins, because a setting has no effect or not the one that its number promises."""

from collections.abc import Iterator

from ulysses.check.preflight import RunInputs
from ulysses.data.read.sources import parse_sources, repeated_data
from ulysses.data.serve.steps import StepLoader

# Share of a vocabulary that its own tokenizer knows at least; the rest is padding.
LEAST_KNOWN = 0.9


def remarks(inputs: RunInputs, loader: StepLoader) -> Iterator[str]:
    """Yield the lines about a run's settings and the steps that it takes."""
    if inputs.disk_warning:
        yield inputs.disk_warning
    config, total = inputs.config, inputs.stage.total_steps(loader)
    data = config.data
    if both := repeated_data(parse_sources(data.train), parse_sources(data.eval)):
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
