"""Losses of language-model post-training as pure functions on small tensors; they need torch and nothing else.

    from losses import dpo_loss
    losses, chosen_rewards, rejected_rewards = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected)

Every function returns values per token, pair or sequence; divide their sums by counts over the whole optimizer step.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .logprobs import LogProbs, linear_logprobs

if TYPE_CHECKING:
    from .dpo import (
        DPO_LOSS_TYPES,
        LENGTH_NORMALISED,
        REFERENCE_FREE,
        dpo_loss,
        ld_dpo_weights,
    )
    from .kto import KTO_LOSS_TYPES, kto_loss
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
    from .preference import aot_margins
    from .reward_model import reward_loss
from .token_nll import dft_nll, label_smoothed_nll, token_nll, weighted_sum, z_loss

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


def __getattr__(name: str) -> object:
    """Import the file of a loss when the loss is first asked for."""
    if name in __all__:
        for file in ("dpo", "kto", "ppo", "preference", "reward_model"):
            names = vars(import_module(f".{file}", __name__))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
