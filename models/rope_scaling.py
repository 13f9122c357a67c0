"""The scaling of rotary frequencies to windows longer than the original one, as transformers computes it."""

import math

import torch

from models.families import RopeScaling


def scaled(periods: torch.Tensor, s: RopeScaling, theta: float) -> tuple[torch.Tensor, float]:
    """Return float32 inverse frequencies [E/2] for the periods of base `theta`, and the factor of cosine and sine."""
    dim, frequencies, factor = 2 * len(periods), 1.0 / periods, 1.0
    # `stays` is 0 for long waves, whose frequency is divided by the factor, and 1 for short ones
    if s.rope_type == "linear":
        frequencies = frequencies / s.factor
    elif s.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = s.original_max_position_embeddings / wavelengths
        assert s.low_freq_factor is not None and s.high_freq_factor is not None
        low, high = s.low_freq_factor, s.high_freq_factor
        stays = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - stays) * frequencies / s.factor + stays * frequencies
    else:  # yarn, 2309.00071: a ramp between the dimensions that turn beta_fast and beta_slow times
        low, high = (
            dim
            * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (s.beta_fast or 32, s.beta_slow or 1)
        )
        if s.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (
            high - low or 0.001
        )
        stays = 1 - ramp.clamp(0, 1)
        frequencies = (1 - stays) * (1.0 / (s.factor * periods)) + stays * frequencies
        # attention over more keys stays as sharp as it was
        above, below = (s.mscale, s.mscale_all_dim) if s.mscale and s.mscale_all_dim else (1, 0)
        growth = 0.1 * math.log(s.factor)
        factor = s.attention_factor or (above * growth + 1) / (below * growth + 1)
    return frequencies, factor
