"""Choose who samples: this process with the weights that it trains, or servers (ppo.sampler)."""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import torch

from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.batch import Sequence
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.rl.advantages import ADVANTAGES
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.stages.base import RunParts
from ulysses.stages.passes import token_values
from ulysses.zero.engine import ZeroEngine

AnySampler = EngineSampler | OutsideSampler


def unread_settings(ppo: PpoSection) -> dict[str, tuple[str, ...]]:
    """Return which settings are not read in the mode that others choose, as `Stage.unread` does.

    What a loss term reads may stand where its weight is 0, or where there is no value: it is switched on with one word.
    """
    modes = (
        (
            ppo.takes_rows,
            'ppo.sampler is "rows", which are drawn and scored elsewhere',
            (
                *(
                    "data.eval",
                    "data.truncation",
                    "run.eval_every",
                    "run.patience",
                    "run.samples",
                ),
                *("ppo.reward", "ppo.rollout", "ppo.sampler_"),
            ),
        ),
        (not ppo.sampler, "ppo.sampler names no servers", ("ppo.sampler_", "ppo.rollouts_")),
        (
            ppo.sampler and ppo.sampler_sync != "disk",
            f'ppo.sampler_sync is "{ppo.sampler_sync}", which needs no disk',
            ("ppo.sampler_folder", "ppo.sampler_reload"),
        ),
        (not ppo.rollout, "there is no ppo.rollout", ("ppo.max_episode_tokens",)),
        (True, f'ppo.advantage is "{ppo.advantage}"', ADVANTAGES[ppo.advantage].unread),
    )
    return {
        f"not read, because {mode}; change that, or leave this out": names
        for is_chosen, mode, names in modes
        if is_chosen
    }


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


def sample_together(
    sampler: AnySampler,
    engine: ZeroEngine,
    mesh: ParallelMesh,
    prompts: Mapping[int, list[int]],
    number: int,
    tokens_per_microbatch: int,
) -> dict[int, Completion]:
    """Answer prompts, each on one rank, and return all completions by the prompts' numbers; all ranks call it together.

    Where servers have just had their first weights, those that fit into a micro-batch are compared with the trainer's.

    Args:
        number: of the rollout, from which random numbers follow.
    """
    mine = [*prompts][mesh.rank :: mesh.world_size]
    drawn = gather(sampler.sample({n: torch.tensor(prompts[n]) for n in mine}, number))
    found = dict(sorted(chain(*(each.items() for each in drawn))))
    rows = {n: answered(prompts[n], answer) for n, answer in found.items()}
    rows = {n: row for n, row in rows.items() if len(row.tokens) <= tokens_per_microbatch}
    if sampler.wants_gap and rows:
        compared = [*rows.values()]
        with engine.inference():
            ours = token_values(
                lambda batch: engine(batch, temperature=sampler.options.temperature).logps,
                [len(row.tokens) for row in compared],
                lambda i: [compared[i]],
                mesh,
                engine.device,
                tokens_per_microbatch,
            )
        # row i predicts token i + 1, and the first token of a prompt is not drawn
        drawn = np.roll(np.concatenate([row.loss_weights for row in compared]), -1)
        theirs = torch.tensor([logp for n in rows for logp in found[n].logps])
        sampler.check_gap((ours[drawn > 0] - theirs).abs().mean().item())
    return found


def answered(prompt: list[int], completion: Completion, weight: float = 1.0) -> Sequence:
    """Return a prompt with its answer, which is trained."""
    tokens = prompt + completion.tokens
    return Sequence(tokens, (np.arange(len(tokens)) >= len(prompt)) * weight)


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
