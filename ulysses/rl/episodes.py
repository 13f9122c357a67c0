"""Episodes of several turns: the user's function calls the model, and the sampler answers all episodes together.

    main thread        the sampler: takes requests, decodes them (with others that are at work), hands over completions
    episodes' thread   an event loop with one task for each episode: function(row, model) -> its score, or None

An episode that waits for a tool holds up none of the others. What goes wrong in one ends the run.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from copy import deepcopy
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from ulysses.config.section import LARGEST, UserCodeError, visible
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.endpoint import Endpoint
from ulysses.rl.model import EpisodeOverError, Model
from ulysses.rl.rewards import Row, failure, load_function
from ulysses.rl.sampler import Completion, Request, Requests
from ulysses.rl.samplers import AnySampler
from ulysses.rl.trajectory import Trajectory

MOMENT = 0.01  # seconds that an idle sampler waits for one more request
LOOK_SECONDS = 0.2  # between two looks whether an episode takes too long
STOP_SECONDS = 0.5  # for the episodes that still run when one has failed and the run ends


class EpisodeLoop(Thread):
    """One event loop for all rollouts of a run, because locks and clients in a user's module belong to one loop.

    endpoint: at which programs reach the models of the episodes that the loop runs.
    """

    def __init__(self, ppo: PpoSection) -> None:
        super().__init__(daemon=True, name="episodes")
        self.loop = asyncio.new_event_loop()
        self.endpoint = Endpoint(self.loop, ppo)
        self.start()

    def run(self) -> None:
        with closing(self.loop):
            while True:
                # sys.exit in a task ends the loop's work; the error comes to whoever waits for the task, too
                with suppress(SystemExit, KeyboardInterrupt):
                    return self.loop.run_forever()

    def close(self) -> None:
        """Cancel all tasks, and end; code that does not give way is left behind."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_SECONDS)

        self.endpoint.close()
        if self.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(cancel(), self.loop).result(2 * STOP_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(STOP_SECONDS)


class Episodes(Requests):
    """The episodes of a rollout, and what they ask the sampler for.

    Args:
        make_model: returns a Model for what it asks, its URL and its key.
        longest: the most tokens of a trajectory.
        renew: is called again and again while the run makes progress.
        thread: runs the functions.
        rows: the number of the data row, and the row, by the numbers of the episodes in the rollout.

    Attributes:
        done: the trajectories of episodes that have ended.
        models: of those that have not.
        running: the episodes, which nothing else might keep alive.
        since: when the function of an episode began, or went on after a call; not while it waits for the event loop.
        futures: of the completions that episodes wait for, by the numbers of the episode and the call.
        queue: requests for the sampler, errors, and None for every episode that has ended.
    """

    def __init__(
        self,
        ppo: PpoSection,
        make_model: Callable[..., Model],
        longest: int,
        renew: Callable[[], None],
        thread: EpisodeLoop,
        rows: Mapping[int, tuple[int, Row]],
    ) -> None:
        super().__init__({}, longest)
        self.ppo, self.renew, self.rows, self.count = ppo, renew, rows, len(rows)
        self.function = load_function(ppo.rollout, setting="ppo.rollout")
        self.thread, self.loop = thread, thread.loop
        self.models: dict[int, Model] = {}
        for number in rows:
            key = secrets.token_urlsafe()
            model = make_model(partial(self._ask, number), thread.endpoint.url, key)
            self.models[number] = thread.endpoint.models[key] = model
        self.done: dict[int, list[Trajectory]] = {}
        self.since: dict[int, float] = {}
        self.futures: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self.queue = SimpleQueue[Request | UserCodeError | None]()

    def run(self, sampler: AnySampler, rollout: int) -> list[Trajectory]:
        """Return the trajectories, those of each episode one after the other, with the scores that functions return.

        Raises UserCodeError if an episode fails, takes too long, or returns what is no score; it names the example.
        """
        self.running = [
            asyncio.run_coroutine_threadsafe(self._episode(number), self.loop)
            for number in self.rows
        ]
        sampler.serve(self, rollout)
        return [one for number in self.rows for one in self.done[number]]

    # ---------------------------------------------------------------- in the episodes' thread

    async def _episode(self, number: int) -> None:
        (index, row), model = self.rows[number], self.models[number]
        score, problem = None, ""
        self.since[number] = monotonic()
        try:
            # a copy, because the function may change a row, which several episodes share
            score = await self.function(deepcopy(row), model)
        except BaseException as error:
            # no room for another turn is an end like others; what a program makes of that is its own
            is_end = model.was_refused or _comes_from_the_end(error)
            problem = "" if is_end and model.turns else failure(error)
        if problem := problem or self._fault(score, model):
            sentence = f"the rollout {self.ppo.rollout} on example {index} {problem}"
            self.queue.put(UserCodeError(sentence))
            return
        found = model.trajectories(number, index)
        if score is not None or not self.ppo.reward:
            for one in found:
                one.scores = {self.ppo.rollout: math.fsum([score or 0])}
        del self.models[number], self.thread.endpoint.models[model.api_key]
        self.done[number] = found
        self.queue.put(None)

    def _fault(self, score: Any, model: Model) -> str:
        """Return the end of a sentence about what is wrong with a function that has returned, or nothing."""
        if not model.turns:
            return "never called the model, so that there is nothing to train on; call model.chat or model.complete"
        if score is None and (model.is_over or self.ppo.reward):
            return ""
        with suppress(Exception):  # of whatever type it is
            if abs(math.fsum([score])) <= LARGEST:
                return ""
        given = f"returned {visible(repr(score)):.200}; return a finite number, of at most 2^53"
        return f"{given}, or set ppo.reward and return None"

    async def _ask(self, number: int, call: int, prompt: list[int], limit: int) -> Completion:
        future = self.futures[number, call] = self.loop.create_future()
        self.queue.put(Request(number, tuple(prompt), limit, call))
        try:
            return await future
        finally:
            self.since[number] = monotonic()
            self.futures.pop((number, call), None)

    # ---------------------------------------------------------------- in the sampler's threads

    @property
    def is_open(self) -> bool:
        return len(self.done) < self.count or not self.queue.empty()

    def take(self, wait: bool) -> list[Request]:
        """Return the new requests.

        With `wait`, wait for one, and then as long as others follow within a moment, so that they begin together.
        """
        found: list[Request] = []
        while self.is_open:
            if not self.thread.is_alive():
                raise InterruptedError("the run has ended")
            waiting = {number for number, _ in tuple(self.futures)}
            at_work = {
                n: self.since.get(n, math.inf) for n in tuple(self.models) if n not in waiting
            }
            if wait and found and not at_work and self.queue.empty():
                break
            number = min(at_work, key=at_work.__getitem__, default=-1)
            if monotonic() - at_work.get(number, math.inf) > self.ppo.reward_timeout:
                raise UserCodeError(
                    f"the rollout {self.ppo.rollout} on example {self.rows[number][0]} took longer than "
                    f"ppo.reward_timeout, {self.ppo.reward_timeout:g} s, beside its calls of the model"
                )
            try:
                new = self.queue.get(wait, MOMENT if found else LOOK_SECONDS)
            except Empty:
                if found or not wait:
                    break
                self.renew()
                continue
            if isinstance(new, UserCodeError):
                raise new
            found += [new] if new else []
        return found

    def answer(self, request: Request, completion: Completion) -> None:
        key = request.number, request.call
        if key in self.futures:
            self.since.pop(request.number, None)
        future = self.futures.pop(key, None)

        def deliver() -> None:
            if future and not future.done():  # the function may not wait any longer
                future.set_result(completion)

        self.loop.call_soon_threadsafe(deliver)


def _comes_from_the_end(error: BaseException | None) -> bool:
    """Return whether an error is EpisodeOverError, was raised from it, or is a group of such errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_comes_from_the_end, error.exceptions))
    return error is not None and (
        isinstance(error, EpisodeOverError) or _comes_from_the_end(error.__cause__)
    )
