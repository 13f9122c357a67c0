"""Choose who samples: this process with the weights that it trains, or servers (ppo.sampler)."""

from collections.abc import Iterator

import torch

from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.advantages import ADVANTAGES
from ulysses.rl.engine_sampler import AnySampler, EngineSampler
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.sampler import SamplingOptions
from ulysses.stages.base import RunParts


def unread_settings(ppo: PpoSection) -> dict[str, tuple[str, ...]]:
    """Return which settings are not read in the mode that others choose, as `Stage.unread` does.

    What a loss term reads may stand where its weight is 0, or where there is no value: it is switched on with one word.
    """
    found: dict[str, tuple[str, ...]] = {}

    def leave_out(mode: str, *names: str) -> None:
        found[f"not read, because {mode}; change that, or leave this out"] = names

    if ppo.takes_rows:
        names = "data.eval", "data.truncation", "run.eval_every", "run.patience", "run.samples"
        rows = 'ppo.sampler is "rows", which are drawn and scored elsewhere'
        leave_out(rows, *names, "ppo.reward", "ppo.rollout", "ppo.sampler_")
    elif not ppo.sampler:
        leave_out("ppo.sampler names no servers", "ppo.sampler_", "ppo.rollouts_")
    elif ppo.sampler_sync != "disk":
        mode = f'ppo.sampler_sync is "{ppo.sampler_sync}", which needs no disk'
        leave_out(mode, "ppo.sampler_folder", "ppo.sampler_reload")
    if not ppo.rollout:
        leave_out("there is no ppo.rollout", "ppo.max_episode_tokens")
    leave_out(f'ppo.advantage is "{ppo.advantage}"', *ADVANTAGES[ppo.advantage])
    return found


def check_sampling(config: Config, longest: int) -> Iterator[str]:
    """Yield the errors in the settings of sampling; the longest prompt with its answer has so many tokens."""
    ppo, budget = config.ppo, config.batch.tokens_per_microbatch
    if ppo.sampler and ppo.sampler_sync == "nccl" and not torch.cuda.is_available():
        yield 'ppo.sampler_sync is "nccl" but this machine has no GPU of NVIDIA; use "disk"'
    if budget != "auto" and budget < longest:
        parts = "data.max_length (prompts) + ppo.max_new_tokens"
        parts = "ppo.max_episode_tokens" if ppo.max_episode_tokens else parts
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
    return OutsideSampler(config, parts, options, longest)
