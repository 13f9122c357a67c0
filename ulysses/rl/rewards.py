"""Where PPO's scores come from: Python functions of text, servers, or a frozen reward model.

    ppo.reward = "package.module:function"     function(prompt: str, completion: str, row: dict) -> float, or
                                               function(prompts, completions, rows) -> one float for each answer
                 "http://host:8000/score"      POST {"rows": [{"prompt", "completion", "row"}, ...]} -> {"scores": []}
                 "runs/rm/export"              a model trained by stage rm, scored at the answer's last token
                 a list of these               their sum; {reward = weight} weighs them

Functions and servers get the texts without special tokens (the prompt as the chat template wrote it) and the whole data
row. They are called by the process that decoded the answers, while the others call theirs.
"""

import inspect
import math
import multiprocessing
import pkgutil
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ulysses.config.section import ConfigError
from ulysses.rl.servers import post


def load_function(reward: str, timeout: float = 60.0) -> Callable[..., Any]:
    """Import "module:function", or return what asks a server for `timeout` seconds for each answer at most.

    Raises ConfigError if there is no such module or function.
    """
    if "//" in reward:
        return partial(_ask_server, url=reward, timeout=timeout)
    try:
        found = pkgutil.resolve_name(reward)
        if not callable(found):
            raise AttributeError("it is not a function")
    except (ImportError, AttributeError) as error:
        mend = "name a function as module:function, with the module's folder on PYTHONPATH"
        if reward.startswith("ulysses.training."):
            mend = f"it has moved: write {reward.replace('training', 'rl', 1)}"
        raise ConfigError(
            f"ppo.reward is {reward!r} but it cannot be imported ({error}); {mend}"
        ) from None
    return found


def _ask_server(
    prompts: list[str], completions: list[str], rows: list[Any], *, url: str, timeout: float
) -> Any:
    asked = [
        {"prompt": prompt, "completion": completion, "row": row}
        for prompt, completion, row in zip(prompts, completions, rows)
    ]
    return post(url, {"rows": asked}, timeout * len(asked))["scores"]


@dataclass
class Rewards:
    """Score answers by functions and servers.

    Args:
        names: module:function, or http://...
        tokenizer: decodes prompts and answers.
        workers: processes that call functions of one answer; 0 calls them in this process.
        timeout: seconds that a worker, or a server, may take for one answer.
        renew: is called before each answer and shows that the process makes progress.
    """

    names: list[str]
    tokenizer: Any
    workers: int = 0
    timeout: float = 60.0
    renew: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.pool = None
        if self.workers:
            # a forked copy of this process would hold its locks without the threads that release them
            context = multiprocessing.get_context("spawn")
            # a terminal's SIGINT reaches the workers too, but the run needs them for the step after which it saves
            ignore = (signal.SIGINT, signal.SIG_IGN)
            self.pool = context.Pool(self.workers, signal.signal, ignore)

    def close(self) -> None:
        """Stop the workers."""
        if self.pool is not None:
            self.pool.terminate()

    def __call__(
        self,
        prompts: list[list[int]],
        answers: list[list[int]],
        rows: list[Any],
        indices: list[int],
    ) -> list[dict[str, float]]:
        """Return each answer's scores by the names of the functions and servers.

        Args:
            prompts, answers: tokens.
            rows, indices: the data row that each prompt came from, and the number that errors call it by.

        Raises ValueError if one fails, takes too long, or returns no finite number; it names the example if it can.
        """
        if not answers:
            return []
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        asked = [*map(decode, prompts)], [*map(decode, answers)], rows
        columns = [self._scores(name, asked, indices) for name in self.names]
        return [dict(zip(self.names, scores)) for scores in zip(*columns, strict=True)]

    def _scores(self, name: str, asked: Any, indices: list[int]) -> list[float]:
        """Return the scores by one function; `asked` holds prompts, completions and rows."""
        function, where = load_function(name, self.timeout), ""
        try:
            if next(iter(inspect.signature(function).parameters), "") == "prompts":
                found = function(*asked)
            else:
                calls = [*zip(*asked)]
                running = [self.pool and self.pool.apply_async(function, c) for c in calls]
                found = []
                for call, one, index in zip(calls, running, indices):
                    self.renew()
                    where = f" on example {index}"
                    # those before it have ended, so that this one has begun
                    found.append(one.get(self.timeout) if one else function(*call))
            if len(found) != len(indices):
                raise ValueError(
                    f"it returned {str(found)[:200]} for {len(indices)} answers; return one number for each"
                )
            for score, index in zip(found, indices):
                where = f" on example {index}"
                if not math.isfinite(score):
                    raise ValueError(f"it returned {score}; return a finite number")
            return [*map(float, found)]
        except multiprocessing.TimeoutError:
            reason = f"took longer than ppo.reward_timeout, {self.timeout:g} s"
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
        raise ValueError(f"the reward {name}{where} {reason}")


def gsm8k_reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Score a worked solution: 1 if its last number is the row's answer, else 0.

    The row's `answer` is a number, or a solution that ends in "#### number" as in GSM8K (2110.14168). Thousands marks,
    currency signs and a trailing point do not count.
    """
    wanted = last_number(str(row["answer"]))
    return float(wanted is not None and last_number(completion) == wanted)


def last_number(text: str) -> float | None:
    """Return the last number of a text, or None if it has none."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None
