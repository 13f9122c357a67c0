"""Llama, Qwen and Mistral models on packed, sequence-sharded batches."""

from models.arch import ARCHITECTURES, ModelConfig, architecture
from models.decoder import CausalLM, RewardModel, init_parameter, init_weights
from ulysses.memory.levels import LayerMemory

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "LayerMemory",
    "ModelConfig",
    "RewardModel",
    "architecture",
    "init_parameter",
    "init_weights",
]
