"""The checks of the frozen models that a run reads besides the trained one."""

from collections.abc import Iterator

from models.arch import ModelConfig
from models.folders import read_config, resolve_model
from models.initial_weights import InitialWeights
from ulysses.check.input_files import check_weights
from ulysses.config.section import error_context
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.stages.base import AuxiliaryModel, Stage


def read_other(other: AuxiliaryModel, *, need_weights: bool = True) -> InitialWeights:
    """Return the weights of one frozen model; ConfigError if they are not what they must be."""
    folder = resolve_model(other.path, need_weights=need_weights, key=other.setting)
    with error_context(other.setting):
        weights = InitialWeights(read_config(folder), 0, folder)
        check_weights(weights.shape, folder, reward=other.is_reward)
        if other.is_reward and "score.weight" not in weights.stored:
            raise ValueError(
                f"{folder} has no score.weight, so it is not a reward model; train one with stage rm, or name a "
                "function as module:function"
            )
        return weights


def check_vocabularies(
    stage: Stage,
    shape: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    models: list[AuxiliaryModel],
    others: dict[str, InitialWeights],
) -> Iterator[str]:
    """Yield which frozen models lack tokens of the trained one, and what the stage objects to in its tokenizer."""
    # a policy that is sampled may write any token of its vocabulary, whether its tokenizer knows it or not
    needed = shape.vocab_size if stage.requirements.rollout else len(tokenizer)
    for model in models:
        tokens = others[model.setting].shape.vocab_size
        if model.is_reward and tokens != needed:
            yield (
                f"{model.setting} {model.path} has {tokens} tokens and the policy {needed}, but it must read the "
                "policy's tokens; train the reward model from the same base model"
            )
        elif tokens < needed:
            yield (
                f"{model.setting} {model.path} has {tokens} tokens but the policy {needed}; use a model with the "
                "policy's tokenizer"
            )
    yield from stage.check_tokenizer(tokenizer)
