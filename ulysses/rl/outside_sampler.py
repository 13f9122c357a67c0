"""Sampling on servers of vLLM or SGLang: they get prompts, return tokens with log-probabilities, and take weights.

    what the servers are -> refused if they cannot do what is asked          before the first rollout
    trained weights -> export folder -> reload calls to every server        before a rollout that synchronises
                    -> or over the network (weight_push.py)
    this process's prompts -> POST, one request for each answer -> tokens, log-probabilities

    "vllm+http://host:8000"       POST /v1/completions with token ids (return_token_ids: vLLM 0.10.2 and newer)
    "sglang+http://host:30000"    POST /generate with token ids

The folder must be on a disk that servers and rank 0 share. Where a server ends, the others get its requests, until it
is there again and has had new weights. Servers draw their own random numbers, so that a rollout does not repeat bit for
bit; ppo.importance_cap corrects where their probabilities differ from the trainer's. Everything that changes what they
draw is part of a request, because they take what it omits from the generation_config.json of the folder that they were
started with.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ulysses.config.section import UserCodeError
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.mesh import gather
from ulysses.parallel.random_keys import seed_of
from ulysses.rl.sampler import Completion, Request, Requests, SamplingOptions
from ulysses.rl.servers import Json, LostError, RefusedError, get, in_thread, is_up, post

# The calls, in order, that make a server read the weights in a folder: {path: body}, where FOLDER stands for it. vLLM
# needs VLLM_SERVER_DEV_MODE=1.
RELOAD: Mapping[str, dict[str, Json]] = {
    "vllm": {
        "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "FOLDER"}},
        "/reset_prefix_cache": {},
    },
    "sglang": {"/update_weights_from_disk": {"model_path": "FOLDER"}},
}
# What a server tells of itself that changes with its weights, or when it is started again: paths, and the keys in their
# JSON.
MARKS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        ("/weight_info", "weight_version"),
        ("/server_info?config_format=json", "vllm_config", "instance_id"),
    ),
    "sglang": (("/model_info", "weight_version"), ("/model_info", "model_path")),
}
MORE_ROOM = (
    "start it with more (--max-model-len of vLLM, --context-length of SGLang), or lower data.max_length or "
    "ppo.max_new_tokens"
)
LOOK_SECONDS = 5.0  # between two looks whether the servers still take requests
POLL_SECONDS = 0.02  # between two looks for new requests
INFO_SECONDS = 60.0  # for what a server tells of itself
# The mean |trainer - server| per token that the same weights explain, where both compute in float32 and elsewhere. In
# float32 a server of vLLM on a CPU had 4e-6, and 0.04 with a repetition penalty of 1.1 and 2 with other weights. In
# bfloat16 two ways through a model of 135M parameters had 0.03; servers may have quantised weights, too.
FLOAT32_GAP, MOST_GAP = 1e-2, 0.2


class OtherWeightsError(LostError):
    """A server holds other weights than it was given."""


@dataclass
class OutsideSampler:
    """Ask servers for completions.

    Args:
        ppo: the [ppo] table; prompts go to the servers of `ppo.sampler` in turn.
        export: writes the policy's weights into a folder; all ranks call it together.
        weights: yields them on a device instead; all ranks iterate together, and the first one gets them.
        folder: where the servers read the weights.
        main: whether this is the process that tells the servers to read them.
        options: of sampling.
        longest: tokens of the longest prompt with its answer.
        vocabulary: the number of tokens that the policy knows.
        float32: whether the trainer computes in float32, and after the first call of `synchronise` the servers, too.
        renew: is called after every completion.
        say: prints a line.

    Attributes:
        push: gives the servers the weights (WeightPush), unless they read them from the folder.
        lost: the servers that take no requests, until the next call of `synchronise`, with what is wrong.
        marks: what the servers told when they had got the weights; empty before the first ones.
        compared: whether `check_gap` has seen a rollout since the last server came.
        is_current: whether the servers got the trainer's weights in the last call of `synchronise`.
        closed: whether nobody wants the completions any more.
    """

    ppo: PpoSection
    export: Callable[[Path], None]
    weights: Callable[[torch.device], Iterable[tuple[str, Tensor]]]
    folder: Path
    main: bool
    options: SamplingOptions
    longest: int
    vocabulary: int
    float32: bool
    renew: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None
    push: Any = None
    lost: dict[str, LostError] = field(default_factory=dict)
    marks: dict[str, list[Json]] = field(default_factory=dict)
    compared: bool = False
    is_current: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        if self.ppo.sampler_sync != "disk":
            from ulysses.rl.weight_push import WeightPush

            self.push = WeightPush(
                self.ppo.sampler_sync,
                self.weights,
                self.main,
                self.ppo.sampler_timeout,
                self._tell,
                self._call,
            )

    @property
    def serving(self) -> list[str]:
        """The servers that take requests."""
        return [address for address in self.ppo.sampler if address not in self.lost]

    def synchronise(self, rollout: int = 0) -> None:
        """Give every server the weights, if the rollout asks for it; all ranks call it together.

        The first call also asks the servers what they are. Raises UserCodeError if one does not fit or does not take
        them, or if none is left.
        """
        self.is_current = not (self.marks and rollout % self.ppo.sampler_sync_every)
        # one that ends between two synchronisations has lost its weights, even if it is there again for the next one
        for address in self.ppo.sampler if self.is_current else self.serving:
            if not self.marks:
                self.float32 &= self._check_server(address)
            elif not self.is_current:
                self._look(address, self._check_mark)
            elif self._look(address, self._check_health) and self.lost.pop(address, None):
                self._check_server(address)
                self.compared = False
                self.say(f"{address} is there again")
        if self.is_current and self.push:
            self.push(self.serving)
        elif self.is_current:
            self.export(self.folder)
            for address in self.serving if self.main else ():
                self._reload(address)
        if self.is_current and self.main:
            self.marks = {}
            for address in self.serving:
                self._look(address, self._remember_mark)
        # no process asks a server before all servers have the new weights, nor one that any process has lost
        of_ranks = gather((self.lost, self.compared, self.marks))
        for lost, compared, _ in of_ranks:
            self.lost |= lost
            self.compared &= compared
        self.marks = of_ranks[0][2]
        if not self.serving:
            raise next(iter(self.lost.values()))

    def _reload(self, address: str) -> None:
        calls = self.ppo.sampler_reload or RELOAD[address.partition("+")[0]]
        for path, body in calls.items():
            text = json.dumps(body).replace("FOLDER", str(self.folder.absolute()))
            self._tell(address, path, json.loads(text))

    def _mark(self, address: str) -> list[Json]:
        """Return what a server tells now of that, None for what it does not."""
        kind = address.partition("+")[0]
        return [_at(self._call(address, path), *keys) for path, *keys in MARKS[kind]]

    def _remember_mark(self, address: str) -> None:
        self.marks[address] = self._mark(address)

    def _check_mark(self, address: str) -> None:
        """Raise OtherWeightsError if a server was started again, or given weights by others, since it got these.

        Raises LostError if it takes no requests.
        """
        if address not in self.marks:
            return
        for old, new in zip(self.marks[address], self._mark(address), strict=True):
            if None not in (old, new) and old != new:
                raise OtherWeightsError(
                    f"{address} holds other weights than it was given ({new!r:.100} in place of {old!r:.100}): it was "
                    "started again, or serves another run, too; continue with --run.resume auto"
                )

    def _check_health(self, address: str) -> None:
        self._call(address, "/health", seconds=LOOK_SECONDS)

    def _look(self, address: str, check: Callable[[str], None]) -> bool:
        """Return whether a server passes a check. Raises LostError if none is left."""
        try:
            check(address)
        except LostError as error:
            self._lose(address, error)
            return False
        return True

    def _lose(self, address: str, error: LostError) -> None:
        """Ask a server no more until it has had new weights. Raises the error if none is left."""
        is_new = address not in self.lost
        self.lost[address] = error
        if not self.serving:
            raise error
        if is_new:
            self.say(
                f"warning: {str(error).partition(';')[0]}; the other servers are asked in its place"
            )

    def _check_server(self, address: str) -> bool:
        """Return whether a server tells that it computes in float32.

        Raises UserCodeError if it tells that it cannot do what it will be asked for.
        """
        length = _at(self._call(address, "/v1/models"), "data", 0, "max_model_len")
        if isinstance(length, int) and length < self.longest:
            raise UserCodeError(
                f"{address} has room for {length} tokens of a prompt with its answer, but "
                f"ppo.max_episode_tokens, or data.max_length + ppo.max_new_tokens is {self.longest}; {MORE_ROOM}"
            )
        info = self._call(address, "/server_info?config_format=json")
        model = _at(info, "vllm_config", "model_config")
        mode = _at(model, "logprobs_mode")
        if mode not in (None, "processed_logprobs") and self.options.temperature != 1:
            raise UserCodeError(
                f"{address} returns {mode!r:.50}, which ppo.temperature does not divide; start it with --logprobs-mode "
                "processed_logprobs"
            )
        return str(_at(model or info, "dtype")).endswith("float32")

    @property
    def wants_gap(self) -> bool:
        """Whether `check_gap` will compare; the same on every rank."""
        return self.is_current and not (self.compared or self.options.top_k)

    def check_gap(self, gap: float) -> None:
        """Compare the log-probabilities of the first rollout, or the first one with a server that came back.

        Args:
            gap: mean |trainer - server| per token.

        Raises UserCodeError if the same weights cannot explain it.
        """
        if not self.wants_gap:
            return
        self.compared = True
        # servers of vLLM divide by the probability of the tokens that top_p keeps
        allowed = (FLOAT32_GAP if self.float32 else MOST_GAP) - math.log(self.options.top_p)
        if not gap <= allowed:
            took = (
                "taken what was sent to them" if self.push else f"read {self.folder.absolute()}"
            )
            raise UserCodeError(
                "the servers of ppo.sampler and the trainer should have the same weights, but their log-probabilities "
                f"differ by {gap:.3g} per token (at most {allowed:.3g} is rounding); look in the servers' logs whether "
                f"they have {took}, and start vLLM with --logprobs-mode processed_logprobs"
            )

    def sample(self, prompts: Mapping[int, Tensor], rollout: int = 0) -> dict[int, Completion]:
        """Return the completion of every prompt, by the prompt's number in the rollout.

        Raises UserCodeError if a server fails several times, or if its answer cannot be trained on.
        """
        requests = Requests(prompts, self.options.max_new_tokens)
        self.serve(requests, rollout)
        return requests.completions

    def serve(self, requests: Requests, rollout: int = 0) -> None:
        """Answer requests until there will be none, with the errors of `sample`."""
        unasked: deque[Request] = deque()
        asked: dict[Future[tuple[Completion, Json]], tuple[Request, str]] = {}
        look = time.monotonic() + LOOK_SECONDS
        while unasked or asked or requests.is_open:
            if self.closed:
                raise InterruptedError("the run has ended")
            unasked += requests.take(wait=not (unasked or asked))
            while unasked and len(asked) < self.options.batch:
                request = unasked.popleft()
                # an episode stays with a server, which may hold the keys and values of its earlier turns
                address = self.serving[request.number % len(self.serving)]
                asked[in_thread(self._complete, address, request, rollout)] = request, address
            pause = POLL_SECONDS if requests.is_open else LOOK_SECONDS
            for answer in wait(asked, pause, FIRST_COMPLETED).done:
                request, address = asked.pop(answer)
                try:
                    completion, reason = answer.result()
                    fault = self._fault(completion, reason, request.limit)
                except LostError as error:
                    self._lose(address, error)
                    unasked.append(request)
                    continue
                except (LookupError, TypeError) as error:
                    fault = f"JSON of another form ({error!r})"
                if fault:
                    raise UserCodeError(
                        f"{address} answered prompt {request.number} with {fault}"
                    )
                requests.answer(request, completion)
                self.renew()
            # a server that was told to end takes no requests, but may never answer those that it has
            if asked and time.monotonic() > look:
                for address in self.serving:
                    self._look(address, self._check_health)
                look = time.monotonic() + LOOK_SECONDS
            for answer, (request, address) in [*asked.items()]:
                if address in self.lost:
                    del asked[answer]
                    unasked.append(request)
        for address in self.serving:
            try:
                self._check_mark(address)
            except OtherWeightsError:  # which of its answers come from them cannot be told
                raise
            except LostError as error:
                self._lose(address, error)

    def close(self) -> None:
        """Let a call of `sample` in another thread end soon, without asking for more."""
        self.closed = True

    def _complete(
        self, address: str, request: Request, rollout: int
    ) -> tuple[Completion, Json]:
        """Return a completion and why it ends: "stop" or "length" if all is well."""
        options, prompt, limit = self.options, request.prompt, request.limit
        seed = seed_of(options.seed, rollout, request.key) % 2**31
        settings = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or -1,
            # these change nothing
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": options.stop_tokens,
        }
        if address.startswith("vllm"):
            # without ignore_eos other tokens end answers, too; SGLang's ignore_eos ignores stop_token_ids as well
            body = {**settings, "prompt": prompt, "max_tokens": limit, "seed": seed}
            body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
            choice = self._call(address, "/v1/completions", body)["choices"][0]
            tokens, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            reason = choice["finish_reason"]
        else:
            settings |= {"max_new_tokens": limit, "sampling_seed": seed}
            body = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
            meta = self._call(address, "/generate", body)["meta_info"]
            rows = meta["output_token_logprobs"]
            tokens, logps = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
        # SGLang says "length" where the last token that was asked for is a stop token
        ended = any(token in options.stop_tokens for token in tokens[-1:])
        return Completion(list(tokens), list(logps), ended), reason

    def _fault(self, completion: Completion, reason: Json, limit: int) -> str:
        """Return why a completion cannot be trained on, or nothing."""
        tokens, logps = completion.tokens, completion.logps
        if reason not in ("stop", "length"):
            return f"an answer that it broke off (its finish reason is {reason!r:.100})"
        if not 0 < len(tokens) == len(logps) <= limit:
            return f"{len(tokens)} tokens and {len(logps)} log-probabilities"
        if not all(type(token) is int and 0 <= token < self.vocabulary for token in tokens):
            return f"tokens that are none of the {self.vocabulary} of the vocabulary"
        if not all(isinstance(x, int | float) and -math.inf < x <= 1e-3 for x in logps):
            return "log-probabilities that are no numbers, not finite or above 0"
        if any(token in self.options.stop_tokens for token in tokens[:-1]):
            return "an answer that goes on behind a token that ends it"
        if reason == "stop" and not completion.ended:
            return f"an end but without the token that ends it (its last one is {tokens[-1]})"
        if not completion.ended and len(tokens) < limit:
            return f"{len(tokens)} of {limit} tokens and no end, as if it had no room for more; {MORE_ROOM}"
        return ""

    def _tell(self, address: str, path: str, body: Json) -> None:
        # one attempt: a server that has failed to take weights may hold a part of them
        answer = self._call(address, path, body, attempts=1)
        if isinstance(answer, dict) and answer.get("success", True) is not True:
            raise UserCodeError(
                f"{address}{path} did not take the new weights: {str(answer)[:200]}"
            )

    def _call(
        self,
        address: str,
        path: str,
        body: Json = None,
        *,
        seconds: float = INFO_SECONDS,
        attempts: int = 3,
    ) -> Json:
        """Return a server's answer to a POST of the body or, without one, to a GET in so many seconds.

        Raises UserCodeError if it fails, LostError if the server takes no requests.
        """
        host = address.partition("+")[2].rstrip("/")
        try:
            if body is None:
                return get(host + path, seconds)
            return post(host + path, body, self.ppo.sampler_timeout, attempts)
        except (OSError, ValueError) as error:
            is_lost = isinstance(error, RefusedError) or not is_up(
                f"{host}/health", INFO_SECONDS
            )
            raise (LostError if is_lost else UserCodeError)(
                f"the sampling server {host}{path} failed ({error}); look at its log, start it again and continue with "
                "--run.resume auto"
            ) from None


def _at(value: Json, *path: str | int) -> Json:
    """Return what lies at this path in JSON, or None."""
    with suppress(LookupError, TypeError):
        for key in path:
            value = value[key]
        return value
