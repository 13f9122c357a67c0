"""Losses of language-model post-training as pure functions on small tensors; they need torch and nothing else.

    from losses import dpo_loss
    losses, chosen_rewards, rejected_rewards = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected)

Every function returns values per token, pair or sequence; divide their sums by counts over the whole optimizer step.
"""

from contextlib import suppress

from .logprobs import LogProbs, linear_logprobs
from .token_nll import dft_nll, label_smoothed_nll, token_nll, weighted_sum, z_loss

# each of these files may be taken away, together with the stages that need it
with suppress(ModuleNotFoundError):
    from .dpo import (
        DPO_LOSS_TYPES,
        LENGTH_NORMALISED,
        REFERENCE_FREE,
        dpo_loss,
        ld_dpo_weights,
    )
    from .preference import aot_margins
with suppress(ModuleNotFoundError):
    from .kto import KTO_LOSS_TYPES, kto_loss
with suppress(ModuleNotFoundError):
    from .ppo import (
        PolicyLoss,
        ValueLoss,
        gae,
        group_advantages,
        kl_estimate,
        packed_gae,
        ppo_policy_loss,
        ppo_value_loss,
        token_rewards,
        whiten,
    )
with suppress(ModuleNotFoundError):
    from .reward_model import reward_loss

__all__ = [
    "DPO_LOSS_TYPES",
    "KTO_LOSS_TYPES",
    "LENGTH_NORMALISED",
    "REFERENCE_FREE",
    "LogProbs",
    "PolicyLoss",
    "ValueLoss",
    "aot_margins",
    "dft_nll",
    "dpo_loss",
    "gae",
    "group_advantages",
    "kl_estimate",
    "kto_loss",
    "label_smoothed_nll",
    "ld_dpo_weights",
    "linear_logprobs",
    "packed_gae",
    "ppo_policy_loss",
    "ppo_value_loss",
    "reward_loss",
    "token_nll",
    "token_rewards",
    "weighted_sum",
    "whiten",
    "z_loss",
]
