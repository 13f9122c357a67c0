"""What must be the same: in all processes of a run, and in a run and the checkpoint that it continues."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from models.arch import ModelConfig
from models.folders import ADAPTER_CONFIG
from ulysses.check.input_files import RunInputs
from ulysses.check.run_folder import HELD_OUT, read_run_state
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError, error_context, flat
from ulysses.data.read.tokenizer import tokenizer_digest
from ulysses.disk import digest_of, sampled_digest
from ulysses.environment import NODE, local_rank
from ulysses.options import build_policies
from ulysses.parallel.mesh import gather
from ulysses.stages.base import Stage

PACKAGES = Path(__file__).parents[2]
# Nodes tokenise for themselves, so that the libraries which make tokens of rows must be the same too.
COMPARED = "torch deepspeed transformers tokenizers jinja2 datasets".split()
# What a run may only change between a checkpoint and its continuation if run.resume_anyway says so.
ALLOWED_ANYWAY = (
    "stage", "batch.examples", "run.seed", "ppo.minibatches", "ppo.epochs", "ppo.advantage",
)  # fmt: skip
# The numbers of a rollout depend on these, and a checkpoint in its middle holds them.
OF_ROLLOUTS = (
    "ppo.temperature", "ppo.ratio", "ppo.loss_aggregation", "ppo.importance_cap", "ppo.kl_in", "ppo.kl_coefficient",
)  # fmt: skip
# What may differ between the model's config.json of a checkpoint and that of the run that continues it.
FREE_KEYS = (
    "initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


# ---------------------------------------------------------------- all processes


def facts_of(inputs: RunInputs, digests: Mapping[str, str]) -> dict[str, object]:
    """Return what must be equal on all ranks, by the words that name it; one process of each node reads the files.

    `digests` are those of the run's inputs (run_folder.py). Of a weight file 64 blocks are compared.
    """
    facts = flat(inputs.config.model_dump(mode="json"))
    facts |= digests | {"the checkpoint to resume": str(inputs.resume_from)}
    facts |= {package: version(package) for package in COMPARED}
    if local_rank() == 0:
        facts["the tokenizer"] = tokenizer_digest(inputs.tokenizer)
        for package in ("losses", "models", "ulysses"):
            for path in (PACKAGES / package).rglob("*"):
                if path.suffix in (".py", ".toml", ".json", ".jinja"):
                    facts[str(path.relative_to(PACKAGES))] = digest_of(path)
        for setting, weights in {"model.path": inputs.weights, **inputs.others}.items():
            for path in weights.paths:
                facts[f"{setting} {path.name}"] = sampled_digest(path)
    return facts


def agree(facts: Mapping[str, object]) -> None:
    """Raise ConfigError on every rank if a rank has other facts than rank 0, naming the first and both nodes."""
    of_ranks = gather((NODE, facts))
    home, first = of_ranks[0]
    for rank, (node, theirs) in enumerate(of_ranks):
        for what, value in theirs.items():
            if value != first.get(what):
                raise ConfigError(
                    f"{what} is {value!r} on {node} (rank {rank}) but {first.get(what)!r} on {home} (rank 0); "
                    "start all processes with the same settings, files and library versions"
                )


# ---------------------------------------------------------------- a checkpoint and its continuation


def check_same_run(stage: Stage, shape: ModelConfig, checkpoint: Path) -> None:
    """Refuse a checkpoint of a run with another stage, model or chain of gradient policies; nothing is loaded yet."""
    config, state = stage.config, read_run_state(checkpoint)
    ours = {**flat(config.model_dump(mode="json")), **shape.to_hf()}
    theirs = {
        "model.lora.train": [],
        **flat(state["config"]),
        **ModelConfig.from_hf(state["shape"]).to_hf(),
    }
    fixed = [key for key in shape.to_hf() if key not in FREE_KEYS]
    adapted = ["model.quantize", "model.lora.rank"]
    if config.model.lora.rank:
        adapted += ["model.lora.targets", "model.lora.train"]
        if (Path(str(theirs["model.path"])) / ADAPTER_CONFIG).exists():
            adapted.append("model.path")  # an adapter that was merged into its base
        adapted += ["model.lora.alpha", "model.lora.rslora"]  # what adapters are multiplied by
    same_stage = ours["stage"] == theirs["stage"]
    if same_stage and state["step"] % stage.requirements.steps_per_load:
        fixed += OF_ROLLOUTS
    for name in (*ALLOWED_ANYWAY, *fixed, *adapted):
        anyway = name in ALLOWED_ANYWAY
        if ours[name] != theirs.get(name) and not (anyway and config.run.resume_anyway):
            more = ", or run.resume_anyway = true" if anyway else ""
            if name in OF_ROLLOUTS:
                more = ", or continue a checkpoint between two rollouts"
            raise ConfigError(
                f"the run that wrote {checkpoint} had {name} {theirs.get(name)!r} but this run has {ours[name]!r}; "
                f"set the same, or another run.output{more}",
                "run.resume",
            )
    with error_context("run.resume"):
        build_policies(config.gradients).load_state_dict(state["policies"])


def changes(config: Config, checkpoint: Path, inputs: dict[str, str]) -> dict[str, str]:
    """Return what has changed since the checkpoint that the run continues: by its name, a sentence about it.

    `inputs` are digests. Raises ConfigError if the training data are others than those that the run began with, or the
    weights of a frozen model.
    """
    state = read_run_state(checkpoint)
    old = state["inputs"]
    changed = [key for key in inputs if key != HELD_OUT and old.get(key) != inputs[key]]
    if changed and not config.run.resume_anyway:
        raise ConfigError(
            f"{' and '.join(changed)} have changed since {checkpoint} was written; restore them, or set "
            "run.resume_anyway = true or another run.output",
            "run.resume",
        )
    before = flat(state["config"]) | old
    return {
        key: f"{key} was {before.get(key)!r} and is {value!r}"
        for key, value in (flat(config.model_dump(mode="json")) | inputs).items()
        if value != before.get(key) and not key.startswith("run.resume")
    }
