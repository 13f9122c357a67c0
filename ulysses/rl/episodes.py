"""Episodes of several turns: the user's function calls the model, and the sampler answers all episodes together.

    main thread        the sampler: takes requests, decodes them (with others that are at work), hands over completions
    episodes' thread   an event loop with one task for each episode: function(row, model) -> its score, or None

An episode that computes or waits for a tool holds up none of the others. What goes wrong in one ends the run.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from ulysses.config.section import LARGEST, UserCodeError, visible
from ulysses.config.stage_sections import PpoSection
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.rl.endpoint import Endpoint
from ulysses.rl.model import Model
from ulysses.rl.rewards import Row, failure, load_function
from ulysses.rl.sampler import Completion, Request, Requests
from ulysses.rl.samplers import AnySampler
from ulysses.rl.trajectory import Trajectory

MOMENT = 0.01  # seconds that an idle sampler waits for one more request
LOOK_SECONDS = 0.2  # between two looks whether an episode takes too long
STOP_SECONDS = 0.5  # for the episodes that still run when one has failed


@dataclass(frozen=True)
class Episodes:
    """What all episodes of a run have in common.

    Args:
        vocabulary: the number of tokens that the policy knows.
        longest: the most tokens of a trajectory.
        renew: is called again and again while the run makes progress.
    """

    ppo: PpoSection
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate | None
    vocabulary: int
    longest: int
    renew: Callable[[], None] = lambda: None

    def run(
        self, sampler: AnySampler, rollout: int, rows: Mapping[int, tuple[int, Row]]
    ) -> list[Trajectory]:
        """Return the trajectories of episodes, those of each one after the other, with the scores of their functions.

        Args:
            rows: the number of the data row, and the row, by the numbers of the episodes in the rollout.

        Raises UserCodeError if one fails, takes too long, or returns what is no score; it names the example.
        """
        running = RunningEpisodes(self, rows)
        try:
            sampler.serve(running, rollout)
        finally:
            running.close()
        return [one for number in rows for one in running.done[number]]


class RunningEpisodes(Requests):
    """The episodes of a rollout while they run, and what they ask the sampler for.

    Attributes:
        done: the trajectories of episodes that have ended.
        models: of those that have not.
        since: when the function of an episode began, or went on after a call.
        futures: of the completions that episodes wait for, by the numbers of the episode and the call.
        queue: requests for the sampler, errors, and None for every episode that has ended.
    """

    def __init__(self, settings: Episodes, rows: Mapping[int, tuple[int, Row]]) -> None:
        super().__init__({}, settings.longest)
        self.settings, self.rows, self.count = settings, rows, len(rows)
        self.name = settings.ppo.rollout
        self.function = load_function(self.name, setting="ppo.rollout")
        self.loop = asyncio.new_event_loop()
        self.done: dict[int, list[Trajectory]] = {}
        self.models = {number: self._model(number) for number in rows}
        self.since = dict.fromkeys(rows, monotonic())
        self.futures: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self.queue = SimpleQueue[Request | UserCodeError | None]()
        for number in rows:
            asyncio.run_coroutine_threadsafe(self._episode(number), self.loop)
        self.thread = Thread(target=self.loop.run_forever, daemon=True, name="episodes")
        self.thread.start()

    def _model(self, number: int) -> Model:
        settings = self.settings
        return Model(
            partial(self._ask, number),
            settings.tokenizer,
            settings.template,
            settings.vocabulary,
            settings.longest,
            settings.ppo.max_new_tokens,
            lambda: self.endpoint.address(number),
        )

    @cached_property
    def endpoint(self) -> Endpoint:
        """Started when the first episode asks where it is."""
        return Endpoint(self.models, self.loop, self.settings.ppo)

    def close(self) -> None:
        """End what still runs; code that does not give way is left behind, and ends with the process."""
        if "endpoint" in vars(self):
            self.endpoint.close()
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop)
        self.thread.join(2 * STOP_SECONDS)
        if not self.thread.is_alive():
            self.loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=STOP_SECONDS)
        self.loop.stop()

    # ---------------------------------------------------------------- in the episodes' thread

    async def _episode(self, number: int) -> None:
        (index, row), model = self.rows[number], self.models[number]
        score, problem = None, ""
        try:
            # a copy, because the function may change a row, which several episodes share
            score = await self.function(deepcopy(row), model)
        except BaseException as error:
            # no room for another turn is an end like others, whatever the function makes of it
            problem = "" if model.is_over and model.calls else failure(error)
        if problem := problem or self._fault(score, model):
            sentence = f"the rollout {self.name} on example {index} {problem}"
            self.queue.put(UserCodeError(sentence))
            return
        found = model.trajectories(number, index)
        if score is None and not self.settings.ppo.reward:
            score = 0.0
        for one in found:
            one.scores = {} if score is None else {self.name: math.fsum([score])}
        del self.models[number]
        self.done[number] = found
        self.queue.put(None)

    def _fault(self, score: Any, model: Model) -> str:
        """Return the end of a sentence about what is wrong with a function that has returned, or nothing."""
        if not any(call.completion for call in model.calls):
            return "never called the model, so that there is nothing to train on; call model.chat or model.complete"
        if score is None:
            left = model.is_over or self.settings.ppo.reward
            return (
                ""
                if left
                else "returned no score, and ppo.reward is empty; return one, or set ppo.reward"
            )
        with suppress(TypeError, ValueError, OverflowError):
            if abs(math.fsum([score])) <= LARGEST:
                return ""
        return f"returned {visible(repr(score)):.200}; return None or a finite number, of at most 2^53"

    async def _ask(self, number: int, call: int, prompt: list[int], limit: int) -> Completion:
        future = self.futures[number, call] = self.loop.create_future()
        self.queue.put(Request(number, tuple(prompt), limit, call))
        try:
            return await future
        finally:
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
            self._check_time()
            try:
                new = self.queue.get(wait, MOMENT if found else LOOK_SECONDS)
            except Empty:
                if found or not wait:
                    break
                self.settings.renew()
                continue
            if isinstance(new, UserCodeError):
                raise new
            found += [new] if new else []
            if found and not self._at_work() and self.queue.empty():
                break  # all episodes wait for the model
        return found

    def _at_work(self) -> dict[int, float]:
        """Return since when the episodes that do not wait for the model are at work."""
        waiting = {number for number, _ in tuple(self.futures)}
        return {n: self.since[n] for n in tuple(self.models) if n not in waiting}

    def _check_time(self) -> None:
        at_work, timeout = self._at_work(), self.settings.ppo.reward_timeout
        number = min(at_work, key=at_work.__getitem__, default=None)
        if number is not None and monotonic() - at_work[number] > timeout:
            raise UserCodeError(
                f"the rollout {self.name} on example {self.rows[number][0]} took longer than ppo.reward_timeout, "
                f"{timeout:g} s, beside its calls of the model"
            )

    def answer(self, request: Request, completion: Completion) -> None:
        self.since[request.number] = monotonic()
        future = self.futures.pop((request.number, request.call), None)

        def deliver() -> None:
            if future and not future.done():  # the function may not wait any longer
                future.set_result(completion)

        self.loop.call_soon_threadsafe(deliver)
