"""Episodes of several turns: the user's function calls the model, and the sampler answers all episodes together.

    main thread        the sampler: takes requests, decodes them (with others that are at work), hands over completions
    episodes' thread   an event loop with one task for each episode: function(row, model) -> its score, or None

An episode that waits for a tool holds up none of the others. What goes wrong in one ends the run.
"""

import asyncio
import math
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from ulysses.config.section import LARGEST, UserCodeError, visible
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.endpoint import Endpoint
from ulysses.rl.engine_sampler import AnySampler
from ulysses.rl.model import EpisodeOverError, Model
from ulysses.rl.rewards import Row, failure, load_function
from ulysses.rl.sampler import Completion, Request, Requests
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.base import RunParts

Task = Future[list[Trajectory]]
MOMENT = 0.01  # seconds that an idle sampler waits for one more request
LOOK_SECONDS = 0.2  # between two looks whether an episode takes too long
THREADS = 1024  # the most that asyncio.to_thread starts, when all others are busy
STOP_SECONDS = 0.5  # for the episodes that still run when one has failed and the run ends


class EpisodeLoop(Thread):
    """One event loop for all rollouts of a run, because locks and clients in a user's module belong to one loop.

    Args:
        longest: the most tokens of a trajectory.

    Attributes:
        endpoint: at which programs reach the models of running episodes.
    """

    def __init__(self, ppo: PpoSection, parts: RunParts, longest: int) -> None:
        super().__init__(daemon=True, name="episodes")
        self.ppo, self.parts, self.longest = ppo, parts, longest
        self.loop = asyncio.new_event_loop()
        # by default as many as there are cores: the others' waiting would count against ppo.reward_timeout
        self.loop.set_default_executor(ThreadPoolExecutor(THREADS))
        self.endpoint = Endpoint(self.loop, ppo)
        self.start()

    def draw(
        self, rows: Mapping[int, tuple[int, Row]], sampler: AnySampler, rollout: int
    ) -> list[Trajectory]:
        """Run episodes, and return the trajectories of one after the other, with the scores that functions return.

        An episode without a turn, because its first prompt has no room for one or it gave up on its calls, has none.

        Args:
            rows: the number of the data row, and the row, by the numbers of the episodes in the rollout.

        Raises UserCodeError if an episode fails, takes too long, or returns what is no score; it names the example.
        """
        episodes = Episodes(self, rows)
        sampler.serve(episodes, rollout)
        return [one for task in episodes.tasks for one in task.result()]

    def run(self) -> None:
        with closing(self.loop):
            stopped = False
            while not stopped:
                # sys.exit in a task ends the loop's work; the error comes to whoever waits for the task, too
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
                    stopped = True
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))

    def close(self) -> None:
        """Cancel all tasks, and end; code that does not give way is left behind."""
        self.endpoint.close()
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(2 * STOP_SECONDS)


@dataclass(eq=False)
class Episode:
    """An episode that runs.

    index, row: the number of the data row, and the row.
    since: when its function began, or went on after a call; infinite while it waits for the event loop.
    futures: of the completions that it waits for, by the numbers of the calls.
    """

    index: int
    row: Row
    model: Model
    since: float = math.inf
    futures: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)


class Episodes(Requests):
    """The episodes of a rollout, and what they ask the sampler for.

    Args:
        thread: runs the functions.
        rows: the number of the data row, and the row, by the numbers of the episodes in the rollout.

    Attributes:
        running: the episodes that have not ended.
        tasks: those that run the functions, and return the trajectories.
        queue: requests for the sampler, and the tasks that have ended.
    """

    def __init__(self, thread: EpisodeLoop, rows: Mapping[int, tuple[int, Row]]) -> None:
        super().__init__({}, thread.longest)
        self.thread, self.ppo, self.count = thread, thread.ppo, len(rows)
        self.function = load_function(self.ppo.rollout, setting="ppo.rollout")
        self.queue = SimpleQueue[Request | Task]()
        self.running: dict[int, Episode] = {}
        for number, (index, row) in rows.items():
            key = secrets.token_urlsafe()
            model = thread.endpoint.models[key] = Model(
                partial(self._ask, number),
                thread.endpoint.url,
                key,
                thread.parts.tokenizer,
                thread.parts.template,
                thread.parts.weights.shape.vocab_size,
                thread.longest,
                self.ppo.max_new_tokens,
            )
            self.running[number] = Episode(index, row, model)
        self.tasks = [
            asyncio.run_coroutine_threadsafe(self.run(number), thread.loop) for number in rows
        ]
        for task in self.tasks:
            task.add_done_callback(self.queue.put)

    # ---------------------------------------------------------------- in the episodes' thread

    async def run(self, number: int) -> list[Trajectory]:
        episode = self.running[number]
        model, score, problem = episode.model, None, ""
        episode.since = monotonic()
        try:
            # a copy, because the function may change a row, which several episodes share
            score = await self.function(deepcopy(episode.row), model)
        except BaseException as error:
            # no room for another turn is an end like others; what a program makes of that is its own
            if not (model.was_refused or _comes_from_the_end(error)):
                problem = failure(error)
        if problem := problem or self._fault(score, model):
            raise UserCodeError(
                f"the rollout {self.ppo.rollout} on example {episode.index} {problem}"
            )
        found = model.trajectories(number, episode.index)
        if score is not None or not self.ppo.reward:
            for one in found:
                one.scores = {self.ppo.rollout: math.fsum([score or 0])}
        del self.running[number], self.thread.endpoint.models[model.api_key]
        for future in tuple(episode.futures.values()):
            future.cancel()  # nobody will answer a program that still waits
        return found

    def _fault(self, score: Any, model: Model) -> str:
        """Return the end of a sentence about what is wrong with a function that has returned, or nothing."""
        if not model.calls:
            return (
                "never called the model, or was refused at model.base_url, so that there is nothing to train on; call "
                "model.chat or model.complete, or read what was answered there"
            )
        if score is None and (model.without_room >= 0 or self.ppo.reward):
            return ""
        with suppress(Exception):  # of whatever type it is
            if abs(math.fsum([score])) <= LARGEST:
                return ""
        given = f"returned {visible(repr(score)):.200}; return a finite number, of at most 2^53"
        return f"{given}, or set ppo.reward and return None"

    async def _ask(self, number: int, call: int, prompt: list[int], limit: int) -> Completion:
        episode = self.running[number]
        future = episode.futures[call] = self.thread.loop.create_future()
        self.queue.put(Request(number, tuple(prompt), limit, call))
        try:
            return await future
        finally:
            episode.since = monotonic()
            episode.futures.pop(call, None)

    # ---------------------------------------------------------------- in the sampler's threads

    @property
    def is_open(self) -> bool:
        # one that fails stays, and `take` raises what has gone wrong in it
        return bool(self.running)

    def take(self, wait: bool) -> list[Request]:
        """Return the new requests.

        With `wait`, wait for one, and then as long as others follow within a moment, so that they begin together.
        """
        found: list[Request] = []
        while self.is_open:
            if not self.thread.is_alive():
                raise InterruptedError("the run has ended")
            at_work = [one for one in tuple(self.running.values()) if not one.futures]
            if wait and found and not at_work and self.queue.empty():
                break
            slowest = min(at_work, key=attrgetter("since"), default=None)
            if slowest and monotonic() - slowest.since > self.ppo.reward_timeout:
                raise UserCodeError(
                    f"the rollout {self.ppo.rollout} on example {slowest.index} took longer than "
                    f"ppo.reward_timeout, {self.ppo.reward_timeout:g} s, beside its calls of the model"
                )
            try:
                new = self.queue.get(wait, MOMENT if found else LOOK_SECONDS)
            except Empty:
                if found or not wait:
                    break
                # one that waits for the event loop may wait for code that never gives way, which is no progress
                if slowest and slowest.since < math.inf:
                    self.thread.parts.renew()
                continue
            if isinstance(new, Request):
                found.append(new)
            else:
                new.result()  # raises what has gone wrong in it
        return found

    def answer(self, request: Request, completion: Completion) -> None:
        episode = self.running.get(request.number)
        if episode and (future := episode.futures.pop(request.call, None)):
            episode.since = math.inf

            def deliver() -> None:
                if not future.done():  # the function may not wait any longer
                    future.set_result(completion)

            self.thread.loop.call_soon_threadsafe(deliver)


def _comes_from_the_end(error: BaseException | None) -> bool:
    """Return whether an error is EpisodeOverError, was raised from it, or is a group of such errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_comes_from_the_end, error.exceptions))
    return error is not None and (
        isinstance(error, EpisodeOverError) or _comes_from_the_end(error.__cause__)
    )
