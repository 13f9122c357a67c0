"""Choose who samples: this process with the weights that it trains, or servers (ppo.sampler)."""

from collections.abc import Iterator

import torch

from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.sampler import SamplingOptions
from ulysses.stages.base import RunParts

AnySampler = EngineSampler | OutsideSampler


def check_sampler(ppo: PpoSection) -> Iterator[str]:
    """Yield the errors in the settings of who samples."""
    if ppo.sampler_sync == "disk":
        return
    if not ppo.sampler:
        yield (
            f'ppo.sampler_sync is "{ppo.sampler_sync}" but ppo.sampler names no servers; name them, or leave it out'
        )
    for name in ("sampler_folder", "sampler_reload"):
        if getattr(ppo, name):
            yield (
                f'ppo.{name} is about weights on a disk, but ppo.sampler_sync is "{ppo.sampler_sync}"; leave one of '
                "them out"
            )
    if ppo.sampler_sync == "nccl" and not torch.cuda.is_available():
        yield 'ppo.sampler_sync is "nccl" but this machine has no GPU of NVIDIA; use "disk"'


def check_budget(config: Config, longest: int) -> Iterator[str]:
    """Yield an error if the longest prompt with its answer, of so many tokens, does not fit into a micro-batch."""
    budget = config.batch.tokens_per_microbatch
    if budget != "auto" and budget < longest:
        parts = "data.max_length (prompts) + ppo.max_new_tokens"
        parts = "ppo.max_episode_tokens" if config.ppo.max_episode_tokens else parts
        yield (
            f"batch.tokens_per_microbatch is {budget} but {parts} is {longest}; raise it to at least {longest}, or "
            "lower one of them"
        )


def build_sampler(config: Config, parts: RunParts, *, longest: int) -> AnySampler:
    """Build the sampler of a run's policy, from the settings of sampling in the [ppo] table.

    Args:
        longest: tokens of the longest prompt with its answer.
    """
    ppo, shape = config.ppo, parts.weights.shape
    automatic = ppo.generation_batch == "auto"
    options = SamplingOptions(
        ppo.max_new_tokens,
        ppo.temperature,
        ppo.top_p,
        ppo.top_k,
        shape.eos_token_id,
        config.run.seed,
        64 if automatic else ppo.generation_batch,
    )
    if ppo.takes_rows or not ppo.sampler:
        return EngineSampler(
            parts.engine, parts.mesh, options, automatic, config.model, parts.renew
        )
    return OutsideSampler(
        ppo,
        parts.export,
        parts.served_weights,
        config.sampler_folder,
        parts.mesh.is_main,
        options,
        longest=longest,
        vocabulary=shape.vocab_size,
        float32=config.model.dtype == "float32",
        renew=parts.renew,
        say=parts.say,
    )
