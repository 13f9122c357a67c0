"""Where PPO's scores come from: Python functions of text, servers, or a frozen reward model.

    ppo.reward = "package.module:function"     function(prompt: str, completion: str, row: dict) -> float, or
                                               function(prompts, completions, rows) -> one float for each answer
                 "http://host:8000/score"      POST {"rows": [{"prompt", "completion", "row"}, ...]} -> {"scores": []}
                 "runs/rm/export"              a model trained by stage rm, scored at the answer's last token
                 a list of these               their sum, weighted by ppo.reward_weights

Functions and servers get the texts without special tokens (the prompt as the chat template wrote it) and the whole data
row. They are called by the process that decoded the answers, while the others call theirs.
"""

import inspect
import math
import multiprocessing
import pkgutil
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ulysses.training.section import ConfigError
from ulysses.training.servers import post


class Answered(NamedTuple):
    """A prompt's tokens, an answer's tokens, the prompt's row of the data and its index."""

    prompt: list[int]
    answer: list[int]
    row: dict[str, Any]
    index: int


def is_function(reward: str) -> bool:
    """Return whether ppo.reward names a Python function or a server rather than a model."""
    return re.fullmatch(r"https?://.*|[\w.]+:\w+", reward) is not None


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
        raise ConfigError(
            f"ppo.reward is {reward!r} but it cannot be imported ({error}); name a function as module:function, with "
            "the module's folder on PYTHONPATH"
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
        # started afresh: a copy of this process would hold its locks without the threads that release them
        # a terminal's SIGINT reaches them too, and the run still needs them for the step after which it saves
        context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
        workers = self.workers
        self.pool = context.Pool(workers, signal.signal, ignore) if workers else None

    def close(self) -> None:
        """Stop the workers."""
        if self.pool is not None:
            self.pool.terminate()

    def __call__(self, answers: list[Answered]) -> list[list[float]]:
        """Return each answer's scores, one of every function or server.

        Raises ValueError if one fails, takes too long, or returns no finite number; it names the example if it can.
        """
        if not answers:
            return []
        decode = self.tokenizer.decode
        texts = [
            tuple(decode(tokens, skip_special_tokens=True) for tokens in answer[:2])
            for answer in answers
        ]
        columns = [self._column(name, texts, answers) for name in self.names]
        return [list(scores) for scores in zip(*columns, strict=True)]

    def _column(
        self, name: str, texts: list[tuple[str, ...]], answers: list[Answered]
    ) -> list[float]:
        rows, function = [answer.row for answer in answers], load_function(name, self.timeout)
        if next(iter(inspect.signature(function).parameters), "") == "prompts":
            prompts, completions = map(list, zip(*texts))
            with self._named(name):
                found = function(prompts, completions, rows)
        else:
            calls = [(*pair, row) for pair, row in zip(texts, rows)]
            running = [self.pool and self.pool.apply_async(function, call) for call in calls]
            found = []
            for call, one, answer in zip(calls, running, answers):
                self.renew()
                with self._named(f"{name} on example {answer.index}"):
                    # those before it have ended, so that this one has begun
                    found.append(one.get(self.timeout) if one else function(*call))
        try:
            scores = [float(score) for score in found]
        except (TypeError, ValueError):
            scores = []
        if len(scores) != len(answers):
            raise ValueError(
                f"the reward {name} returned {str(found)[:200]} for {len(answers)} answers; return one number for each"
            )
        for score, answer in zip(scores, answers):
            if not math.isfinite(score):
                raise ValueError(
                    f"the reward {name} returned {score} for example {answer.index}; return a finite number"
                )
        return scores

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
            return
        except multiprocessing.TimeoutError:
            reason = f"took longer than ppo.reward_timeout, {self.timeout:g} s"
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
        raise ValueError(f"the reward {what} {reason}")


def gsm8k_reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Score a worked solution: 1 if its last number is the row's answer, else 0.

    The row's `answer` is a number, or a solution that ends in "#### number" as in GSM8K (2110.14168). Thousands marks,
    currency signs and a trailing point do not count.
    """
    found, wanted = (
        [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))][-1:]
        for text in (completion, str(row["answer"]))
    )
    return float(found == wanted != [])
