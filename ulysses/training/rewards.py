"""Where PPO's scores come from: a Python function of text, or a frozen reward model.

    ppo.reward = "package.module:function"     function(prompt: str, completion: str, row: dict) -> float
                 "runs/rm/export"              a model trained by stage rm, scored at the answer's last token

A function gets the texts without special tokens (the prompt as the chat template wrote it) and the whole data row. It
runs in the process that decoded the answer, while the others run theirs.
"""

import math
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RewardFunction = Callable[[str, str, dict[str, Any]], float]


def is_function(reward: str) -> bool:
    """Return whether ppo.reward names a Python function rather than a model."""
    return bool(re.fullmatch(r"[\w.]+:\w+", reward)) and not Path(reward).exists()


def load_function(reward: str) -> RewardFunction:
    """Import "module:function".

    Raises ValueError if there is no such module or function.
    """
    try:
        found = pkgutil.resolve_name(reward)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"ppo.reward is {reward!r} but it cannot be imported ({error}); name a function as module:function, with "
            "the module's folder on PYTHONPATH"
        ) from None
    if not callable(found):
        raise ValueError(
            f"ppo.reward is {reward!r} but that is not a function; name one as module:function"
        )
    return found


def score_text(
    function: RewardFunction, prompt: str, completion: str, row: dict[str, Any], index: int
) -> float:
    """Call the function on one answer.

    Raises ValueError if it fails or returns no finite number, naming the example.
    """
    try:
        score = float(function(prompt, completion, row))
    except Exception as error:
        raise ValueError(
            f"the reward function failed on example {index}: {type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(score):
        raise ValueError(
            f"the reward function returned {score} for example {index}; return a finite number"
        )
    return score


def gsm8k_reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Score a worked solution: 1 if its last number is the row's answer, else 0.

    The row's `answer` is a number, or a solution that ends in "#### number" as in GSM8K (2110.14168). Thousands marks,
    currency signs and a trailing point do not count.
    """
    found, wanted = last_number(completion), last_number(str(row["answer"]))
    return float(found is not None and found == wanted)


def last_number(text: str) -> float | None:
    """Return the last number written in a text, or None."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
