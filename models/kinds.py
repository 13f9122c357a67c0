"""The classes of models by their purpose, and models without memory, for the names and shapes of parameters."""

import functools
from collections.abc import Mapping

import torch

from models.arch import ModelConfig
from models.decoder import CausalLM, HeadedDecoder


def model_class(*, reward: bool, value: bool = False) -> type[HeadedDecoder]:
    """Return the class of a reward model, of a policy with a value, or else of a language model."""
    if reward or value:
        from models.scored import PolicyValue, RewardModel

        return RewardModel if reward else PolicyValue
    return CausalLM


def empty_model(
    config: ModelConfig, *, reward: bool = False, value: bool = False, quantize: str = "none"
) -> HeadedDecoder:
    """Build a model on torch's meta device, which has no memory."""
    with torch.device("meta"):
        return model_class(reward=reward, value=value)(config, quantize=quantize)


@functools.cache
def parameter_shapes(config: ModelConfig, *, reward: bool = False) -> Mapping[str, torch.Size]:
    """Return the shapes of a model's parameters by their names, in the model's order."""
    return {name: p.shape for name, p in empty_model(config, reward=reward).named_parameters()}


@functools.cache
def count_parameters(config: ModelConfig, *, reward: bool = False) -> int:
    """Count a model's parameters, tied embeddings once."""
    return sum(x.numel() for x in parameter_shapes(config, reward=reward).values())
