"""Sampling on servers of vLLM or SGLang: they get prompts, return tokens with log-probabilities, and take weights.

    what the servers are -> refused if they cannot do what is asked          before the first rollout
    trained weights -> export folder -> reload calls to every server        before a rollout that synchronises
                    -> or over the network (weight_push.py)
    this process's prompts -> POST, one request for each answer -> tokens, log-probabilities

The folder must be on a disk that servers and rank 0 share. Where a server ends, the others get its requests, until it
is there again and has had new weights. Servers draw their own random numbers, so that a rollout does not repeat bit for
bit; ppo.importance_cap corrects where their probabilities differ from the trainer's.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ulysses.config.schema import Config
from ulysses.config.section import UserCodeError
from ulysses.parallel.mesh import gather
from ulysses.parallel.random_keys import seed_of
from ulysses.rl.engine_sampler import AnySampler
from ulysses.rl.sampler import Completion, Request, Requests, SamplingOptions
from ulysses.rl.sampling_server import MORE_ROOM, Server
from ulysses.rl.servers import Json, LostError, in_thread
from ulysses.stages.base import RunParts
from ulysses.stages.passes import token_values

LOOK_SECONDS = 5.0  # between two looks whether the servers still take requests
POLL_SECONDS = 0.02  # between two looks for new requests
# The mean |trainer - server| per token that the same weights explain, where both compute in float32 and elsewhere. In
# float32 a server of vLLM on a CPU had 4e-6, and 0.04 with a repetition penalty of 1.1 and 2 with other weights. In
# bfloat16 two ways through a model of 135M parameters had 0.03; servers may have quantised weights, too.
FLOAT32_GAP, MOST_GAP = 1e-2, 0.2


@dataclass
class OutsideSampler(AnySampler):
    """Ask servers for completions.

    Args:
        config: of the run; prompts go to the servers of `ppo.sampler` in turn.
        longest: tokens of the longest prompt with its answer.

    Attributes:
        push: gives the servers the weights (WeightPush), unless they read them from a folder.
        lost: the servers that take no requests, until the next call of `synchronise`, with what is wrong.
        marks: what the servers told when they had got the weights; empty before the first ones.
        float32: whether the trainer computes in float32 and, after the first call of `synchronise`, all servers, too.
        compared: whether `check_gap` has seen a rollout since the last server came.
        is_current: whether the servers got the trainer's weights in the last call of `synchronise`.
        closed: whether nobody wants the completions any more.
    """

    config: Config
    parts: RunParts
    options: SamplingOptions
    longest: int
    push: Any = None
    lost: dict[Server, LostError] = field(default_factory=dict)
    marks: dict[Server, list[Json]] = field(default_factory=dict)
    compared: bool = False
    is_current: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        ppo, self.mesh = self.config.ppo, self.parts.mesh
        self.servers = [Server(address, ppo.sampler_timeout) for address in ppo.sampler]
        self.float32 = self.config.model.dtype == "float32"
        if ppo.sampler_sync != "disk":
            from ulysses.rl.weight_push import WeightPush

            self.push = WeightPush(ppo.sampler_sync, self.parts)

    @property
    def serving(self) -> list[Server]:
        """The servers that take requests."""
        return [server for server in self.servers if server not in self.lost]

    @contextmanager
    def _leaving_out(self, server: Server) -> Iterator[None]:
        """If the server takes no requests, ask it no more until it has had new weights; raise if none is left."""
        try:
            yield
        except LostError as error:
            is_new = server not in self.lost
            self.lost[server] = error
            if not self.serving:
                raise
            if is_new:
                what = str(error).partition(";")[0]
                self.parts.say(f"warning: {what}; the other servers are asked in its place")

    # ---------------------------------------------------------------- weights

    def synchronise(self, rollout: int = 0) -> None:
        """Give every server the weights, if the rollout asks for it; all ranks call it together.

        The first call also asks the servers what they are. Raises UserCodeError if one does not fit or does not take
        them, or if none is left.
        """
        config, is_first = self.config, not self.marks
        self.is_current = is_first or rollout % config.ppo.sampler_sync_every == 0
        if is_first:
            for server in self.servers:
                self._check_server(server)
        elif self.is_current:
            for server in self.servers:
                with self._leaving_out(server):
                    # one that is starting answers all else before it takes weights
                    server.call("/health", seconds=LOOK_SECONDS)
                    if server in self.lost:
                        self._check_server(server)
                        del self.lost[server]
                        self.compared = False
                        self.parts.say(f"{server} is there again")
        else:
            # one that has ended since then has lost its weights, even if it is there again for the next ones
            for server in self.serving:
                with self._leaving_out(server):
                    self._check_marks(server, LostError)
        if self.is_current and self.push:
            self.push(self.serving)
        elif self.is_current:
            self.parts.export(config.sampler_folder)
            if self.mesh.is_main:
                for server in self.serving:
                    server.reload(config.sampler_folder, config.ppo.sampler_reload)
        # no process asks a server before all servers have the new weights, nor one that any process has lost
        for lost, compared in gather((self.lost, self.compared)):
            self.lost |= lost
            self.compared &= compared
        if self.is_current:
            for server in self.serving:
                with self._leaving_out(server):
                    self.marks[server] = server.marks()
        if not self.serving:
            raise next(iter(self.lost.values()))

    def _check_server(self, server: Server) -> None:
        """Raise UserCodeError if a server does not fit, and note whether it computes in float32."""
        self.float32 &= server.check(self.longest, self.options.temperature)

    def _check_marks(self, server: Server, kind: type[UserCodeError]) -> None:
        """Raise such an error if a server was started again, or given weights by others, since it got these."""
        for old, new in zip(self.marks.get(server, ()), server.marks()):
            if None not in (old, new) and old != new:
                raise kind(
                    f"{server} holds other weights than it was given ({new!r:.100} in place of {old!r:.100}): it was "
                    "started again, or serves another run, too; continue with --run.resume auto"
                )

    @property
    def wants_gap(self) -> bool:
        """Whether `check_gap` will compare; the same on every rank."""
        return self.is_current and not (self.compared or self.options.top_k)

    def check_gap(self, gap: float) -> None:
        if not self.wants_gap:
            return
        self.compared = True
        # servers of vLLM divide by the probability of the tokens that top_p keeps
        allowed = (FLOAT32_GAP if self.float32 else MOST_GAP) - math.log(self.options.top_p)
        if not gap <= allowed:
            folder = self.config.sampler_folder.absolute()
            raise UserCodeError(
                "the servers of ppo.sampler and the trainer should have the same weights, but their log-probabilities "
                f"differ by {gap:.3g} per token (at most {allowed:.3g} is rounding); look in the servers' logs whether "
                f"they have {'taken what was sent to them' if self.push else f'read {folder}'}, and start vLLM with "
                "--logprobs-mode processed_logprobs"
            )

    # ---------------------------------------------------------------- answers

    def serve(self, requests: Requests, rollout: int) -> None:
        """Answer requests until there will be none.

        Raises UserCodeError if a server fails several times, or if its answer cannot be trained on.
        """
        unasked: deque[Request] = deque()
        asked: dict[Future[Completion], tuple[Request, Server]] = {}
        look = time.monotonic() + LOOK_SECONDS
        while unasked or asked or requests.is_open:
            if self.closed:
                raise InterruptedError("the run has ended")
            unasked += requests.take(wait=not (unasked or asked))
            while unasked and len(asked) < self.options.batch:
                request = unasked.popleft()
                # an episode stays with a server, which may hold the keys and values of its earlier turns
                server = self.serving[request.number % len(self.serving)]
                asked[in_thread(self._complete, server, request, rollout)] = request, server
            pause = POLL_SECONDS if requests.is_open else LOOK_SECONDS
            for answer in wait(asked, pause, FIRST_COMPLETED).done:
                request, server = asked[answer]
                with self._leaving_out(server):
                    requests.answer(request, answer.result())
                    del asked[answer]
                    self.parts.renew()
            # a server that was told to end takes no requests, but may never answer those that it has
            if asked and time.monotonic() > look:
                for server in self.serving:
                    with self._leaving_out(server):
                        server.call("/health", seconds=LOOK_SECONDS)
                look = time.monotonic() + LOOK_SECONDS
            for answer, (request, server) in [*asked.items()]:
                if server in self.lost:
                    del asked[answer]
                    unasked.append(request)
        for server in self.serving:
            with self._leaving_out(server):
                # which of its answers come from other weights cannot be told
                self._check_marks(server, UserCodeError)

    def sample_together(
        self, prompts: Mapping[int, list[int]], rollout: int
    ) -> dict[int, Completion]:
        answers, parts = super().sample_together(prompts, rollout), self.parts
        if not self.wants_gap:
            return answers
        rows = [answer.after(prompts[n]) for n, answer in answers.items()]
        with parts.engine.inference():
            ours = token_values(
                lambda batch: parts.engine(batch, temperature=self.options.temperature).logps,
                [len(row.tokens) for row in rows],
                lambda i: [rows[i]],
                parts,
            )
        # row i predicts token i + 1, and the first token of a prompt is not drawn
        drawn = np.roll(np.concatenate([row.loss_weights for row in rows]), -1)
        theirs = torch.tensor([logp for answer in answers.values() for logp in answer.logps])
        self.check_gap((ours[drawn > 0] - theirs).abs().mean().item())
        return answers

    def close(self) -> None:
        self.closed = True

    def _complete(self, server: Server, request: Request, rollout: int) -> Completion:
        seed = seed_of(self.options.seed, rollout, request.key) % 2**31
        try:
            completion, reason = server.complete(request, self.options, seed)
            fault = self._fault(completion, reason, request.limit)
        except (LookupError, TypeError) as error:
            fault = f"JSON of another form ({error!r})"
        if fault:
            raise UserCodeError(f"{server} answered prompt {request.number} with {fault}")
        return completion

    def _fault(self, completion: Completion, reason: Json, limit: int) -> str:
        """Return why a completion cannot be trained on, or nothing."""
        tokens, logps = completion.tokens, completion.logps
        vocabulary = self.parts.weights.shape.vocab_size
        if reason not in ("stop", "length"):
            return f"an answer that it broke off (its finish reason is {reason!r:.100})"
        if not 0 < len(tokens) == len(logps) <= limit:
            return f"{len(tokens)} tokens and {len(logps)} log-probabilities"
        if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            return f"tokens that are none of the {vocabulary} of the vocabulary"
        if not all(isinstance(x, int | float) and -math.inf < x <= 1e-3 for x in logps):
            return "log-probabilities that are no numbers, not finite or above 0"
        if any(token in self.options.stop_tokens for token in tokens[:-1]):
            return "an answer that goes on behind a token that ends it"
        if reason == "stop" and not completion.ended:
            return f"an end but without the token that ends it (its last one is {tokens[-1]})"
        if not completion.ended and len(tokens) < limit:
            return f"{len(tokens)} of {limit} tokens and no end, as if it had no room for more; {MORE_ROOM}"
        return ""
