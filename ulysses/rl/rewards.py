"""Where PPO's scores come from: Python functions of text, servers, or a frozen reward model.

    ppo.reward = "package.module:function"     function(prompt: str, completion: str, row: dict) -> float, or
                                               function(prompts, completions, rows) -> one float for each answer
                 "http://host:8000/score"      POST {"rows": [{"prompt", "completion", "row"}, ...]} -> {"scores": []}
                 "runs/rm/export"              a model trained by stage rm, scored at the answer's last token
                 a list of these               their sum; {reward = weight} weighs them

Functions and servers get the texts without special tokens (the prompt as the chat template wrote it) and the whole data
row. Each process has the answers scored that it has decoded.
"""

import inspect
import math
import multiprocessing
import pkgutil
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue
from traceback import extract_tb, format_exception_only
from typing import TYPE_CHECKING

from ulysses.config.section import LARGEST, ConfigError, UserCodeError, collecting, visible
from ulysses.config.stage_sections import PpoSection, is_function
from ulysses.rl.servers import call

if TYPE_CHECKING:  # every worker imports this file, and needs no torch
    from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
    from ulysses.rl.trajectory import Trajectory

HERE = Path(__file__).parents[1]
Reward = Callable[..., object]  # what users write: it may return anything
Row = dict[str, object]
Batch = tuple[list[str], list[str], list[Row]]  # prompts, completions and rows


def load_function(reward: str, timeout: float = 60.0, setting: str = "ppo.reward") -> Reward:
    """Import "module:function", or return a function that asks a server, for at most `timeout` seconds an answer.

    Raises ConfigError, which names the setting, if there is no such module or function.
    """
    if "//" in reward:
        return partial(_ask_server, url=reward, timeout=timeout)
    try:
        function = pkgutil.resolve_name(reward)
        if not callable(function):
            raise AttributeError("it is not a function")
        if setting == "ppo.rollout" and not inspect.iscoroutinefunction(function):
            raise TypeError("it is not written as async def")
    except (Exception, SystemExit) as error:  # the module is the user's code
        raise ConfigError(
            f"{setting} is {reward!r} but it cannot be imported ({visible(str(error))}); name a function as "
            "module:function, with the module's folder on PYTHONPATH"
        ) from None
    return function


def _ask_server(
    prompts: list[str], completions: list[str], rows: list[Row], *, url: str, timeout: float
) -> object:
    body = [
        {"prompt": prompt, "completion": completion, "row": row}
        for prompt, completion, row in zip(prompts, completions, rows)
    ]
    return call(url, {"rows": body}, timeout=timeout * len(body))["scores"]


@dataclass
class Rewards:
    """Score answers by functions and servers.

    Args:
        names: module:function, or http://...
        tokenizer: decodes prompts and answers.
        workers: how many processes call the functions that score one answer; 0 calls them in this process.
        timeout: seconds that a worker, or a server, may take for one answer.
        renew: is called with every result and shows that the process makes progress.

    Attributes:
        processes: the workers, by our ends of their pipes.
        idle: the pipes of workers that wait for an answer to score.
    """

    names: list[str]
    tokenizer: "PreTrainedTokenizerFast"
    workers: int
    timeout: float
    renew: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # a forked worker could wait for a lock for ever: no thread of this process would be there to release it
        context = multiprocessing.get_context("spawn")
        self.processes: dict[Connection, SpawnProcess] = {}
        self.idle: Queue[Connection] = Queue()
        for _ in range(self.workers):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes[pipe] = process
            self.idle.put(pipe)
        # in any order, so that a failure waits for no slower answer
        self.map = ThreadPool(self.workers).imap_unordered if self.workers else map

    def close(self) -> None:
        """Stop the workers."""
        for process in self.processes.values():
            process.kill()

    def __call__(self, answers: "list[Trajectory]", row_of: Callable[[int], Row]) -> None:
        """Give answers their scores, by the names of the functions and servers.

        Args:
            row_of: returns a data row by its number, which error messages name.

        Raises UserCodeError if one fails, takes too long, or returns no finite number; it names the example if it can.
        """
        if not answers:
            return
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        indices = [one.row for one in answers]
        prompts = [decode(one.prompt) for one in answers]
        texts = [decode(one.tokens) for one in answers]
        batch = prompts, texts, [*map(row_of, indices)]
        for name in self.names:
            scores = self._scores(name, batch, indices)
            for one, score in zip(answers, scores, strict=True):
                one.scores[name] = score

    def _scores(self, name: str, batch: Batch, indices: list[int]) -> list[float]:
        """Return the scores of all answers by one function."""
        scores_all, scores = takes_all(load_function(name)), [0.0] * len(indices)
        if scores_all:
            results = [(0, outcome(name, batch, self.timeout))]
        else:
            results = self.map(partial(self._score, name), enumerate(zip(*batch)))
        for place, result in results:
            self.renew()
            if isinstance(result, str):
                where = "" if scores_all else f" on example {indices[place]}"
                raise UserCodeError(f"the reward {name}{where} {result}")
            scores[place : place + len(result)] = result
        for index, score in zip(indices, scores):
            # float32 can square LARGEST; no comparison with nan is true
            if not abs(score) <= LARGEST:
                raise UserCodeError(
                    f"the reward {name} on example {index} returned {score}; return a finite number, of at most 2^53"
                )
        return scores

    def _score(
        self, name: str, numbered: tuple[int, tuple[str, str, Row]]
    ) -> tuple[int, list[float] | str]:
        """Return an answer's place, and its score or the end of a sentence about what went wrong."""
        place, answer = numbered
        # without workers this is the main thread, which alone may set timers and handle signals
        if not self.workers:
            return place, outcome(name, answer)
        pipe = self.idle.get()
        try:
            pipe.send((name, answer))
            result = f"took longer than ppo.reward_timeout, {self.timeout:g} s"
            if pipe.poll(self.timeout):
                result = pipe.recv()
        except (EOFError, OSError):
            self.processes[pipe].join()
            result = f"has ended its process with exit code {self.processes[pipe].exitcode}"
        self.idle.put(pipe)
        return place, result


def serve(pipe: Connection) -> None:
    """Score the answers that come through a pipe until it is closed: the main function of a worker."""
    # signals that ask the run to stop reach the workers too, but the run needs them until it has saved a checkpoint
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError):
        while True:
            pipe.send(outcome(*pipe.recv()))


def takes_all(function: Reward) -> bool:
    """Return whether a reward function scores all answers at once."""
    return next(iter(inspect.signature(function).parameters), "") == "prompts"


def outcome(
    name: str, answers: Batch | tuple[str, str, Row], timeout: float = 0.0
) -> list[float] | str:
    """Call a reward function, and return its scores or, if anything goes wrong, the end of a sentence about it."""
    try:
        function = load_function(name, timeout)
        # a copy, because the function may change a row, which several answers and functions share
        scores = function(*deepcopy(answers))
        if not takes_all(function):
            scores = [scores]
        else:
            scores = scores.tolist() if hasattr(scores, "tolist") else scores
            count = len(answers[0])
            if not isinstance(scores, list | tuple) or len(scores) != count:
                return (
                    f"returned {visible(repr(scores)):.200} for {count} answers; return one number for each, in "
                    "a list, tuple, array or Series"
                )
        return [math.fsum([score]) for score in scores]  # float() would take texts
    except BaseException as error:
        return failure(error, is_server="//" in name)


def failure(error: BaseException, is_server: bool = False) -> str:
    """Return the end of a sentence about an error of the user's code, with the last of its lines that took part."""
    said = visible(format_exception_only(error)[-1].strip())
    lines = [(file, number) for file, number, *_ in extract_tb(error.__traceback__)]
    own = [each for each in lines if not Path(each[0]).is_relative_to(HERE)] or lines
    where = "" if is_server else f" ({Path(own[-1][0]).name}, line {own[-1][1]})"
    return f"failed: {said}{where}"


def gsm8k_reward(prompt: str, completion: str, row: Row) -> float:
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


def check_rewards(ppo: PpoSection, strict: bool) -> list[object]:
    """Return errors for functions of rewards and rollouts that do not exist.

    Only a run that starts (`strict`) imports them, because that runs the user's code.
    """
    errors: list[object] = []
    settings = dict.fromkeys(ppo.reward, "ppo.reward") | {ppo.rollout: "ppo.rollout"}
    for reward in filter(is_function, settings):
        with collecting(errors):
            if strict:
                load_function(reward, setting=settings[reward])
            elif "//" not in reward and find_spec(re.split("[.:]", reward)[0]) is None:
                raise ConfigError(
                    f"{settings[reward]} is {reward!r} but there is no such module; name a function as "
                    "module:function, with the module's folder on PYTHONPATH"
                )
    return errors
