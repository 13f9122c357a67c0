"""A server of vLLM or SGLang: how it is asked for answers, told to read weights, and recognised.

    "vllm+http://host:8000"       POST /v1/completions with token ids (return_token_ids: vLLM 0.10.2 and newer)
    "sglang+http://host:30000"    POST /generate with token ids

Everything that changes what a server draws is part of a request, because it takes what a request omits from the
generation_config.json of the folder that it was started with.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ulysses.config.section import UserCodeError
from ulysses.rl.sampler import Completion, Request, SamplingOptions
from ulysses.rl.servers import Json, LostError, RefusedError, call

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
# JSON. The first one is the name of pushed weights.
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
INFO_SECONDS = 60.0  # for what a server tells of itself


@dataclass(frozen=True)
class Server:
    """A server that samples.

    Args:
        address: as in ppo.sampler.
        timeout: seconds that a request may take.
    """

    address: str
    timeout: float

    def __str__(self) -> str:
        return self.address

    @property
    def dialect(self) -> str:
        return self.address.partition("+")[0]

    @property
    def url(self) -> str:
        return self.address.partition("+")[2].rstrip("/")

    def call(
        self, path: str, body: Json = None, *, seconds: float = INFO_SECONDS, attempts: int = 3
    ) -> Json:
        """Return the answer to a POST of the body or, without one, what the server tells in so many seconds, or None.

        Raises LostError if it takes no requests, and UserCodeError if a POST fails.
        """
        timeout = seconds if body is None else self.timeout
        try:
            return call(self.url + path, body, timeout=timeout, attempts=attempts)
        except (OSError, ValueError) as error:
            is_lost = isinstance(error, RefusedError)
            if body is None and not is_lost:
                return None  # as where it knows no such path
            raise (LostError if is_lost or not self._is_up() else UserCodeError)(
                f"the sampling server {self.url}{path} failed ({error}); look at its log, start it again and continue "
                "with --run.resume auto"
            ) from None

    def _is_up(self) -> bool:
        """Return whether the server answers anything but that it is not available."""
        try:
            call(f"{self.url}/health", timeout=INFO_SECONDS)
        except (RefusedError, TimeoutError):
            return False
        except (OSError, ValueError):
            pass
        return True

    def tell(self, path: str, body: Json) -> None:
        """Make a call that is a part of taking weights."""
        # one attempt: a server that has failed to take weights may hold a part of them
        answer = self.call(path, body, attempts=1)
        if isinstance(answer, dict) and answer.get("success", True) is not True:
            raise UserCodeError(
                f"{self}{path} did not take the new weights: {str(answer)[:200]}"
            )

    def told(self, path: str, *keys: str | int) -> Json:
        """Return what lies at these keys in the JSON that the server gives, or None."""
        value = self.call(path)
        with suppress(LookupError, TypeError):
            for key in keys:
                value = value[key]
            return value

    def marks(self) -> list[Json]:
        """Return MARKS as they are now, None for what the server does not tell."""
        return [self.told(*place) for place in MARKS[self.dialect]]

    def reload(self, folder: Path, calls: Mapping[str, Json]) -> None:
        """Have the server read the weights in a folder, by the calls that are given or its dialect's."""
        for path, body in (calls or RELOAD[self.dialect]).items():
            text = json.dumps(body).replace("FOLDER", str(folder.absolute()))
            self.tell(path, json.loads(text))

    def check(self, longest: int, temperature: float) -> bool:
        """Return whether the server tells that it computes in float32.

        Raises UserCodeError if it tells that it has no room for `longest` tokens, or that it returns log-probabilities
        which the temperature does not divide.
        """
        length = self.told("/v1/models", "data", 0, "max_model_len")
        if isinstance(length, int) and length < longest:
            raise UserCodeError(
                f"{self} has room for {length} tokens of a prompt with its answer, but ppo.max_episode_tokens, or "
                f"data.max_length + ppo.max_new_tokens is {longest}; {MORE_ROOM}"
            )
        info = "/server_info?config_format=json"
        of_model = ("vllm_config", "model_config") if self.dialect == "vllm" else ()
        mode = self.told(info, *of_model, "logprobs_mode")
        if mode not in (None, "processed_logprobs") and temperature != 1:
            raise UserCodeError(
                f"{self} returns {mode!r:.50}, which ppo.temperature does not divide; start it with --logprobs-mode "
                "processed_logprobs"
            )
        return str(self.told(info, *of_model, "dtype")).endswith("float32")

    def complete(
        self, request: Request, options: SamplingOptions, seed: int
    ) -> tuple[Completion, Json]:
        """Return a completion and why it ends: "stop" or "length" if all is well."""
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
        if self.dialect == "vllm":
            # without ignore_eos other tokens end answers, too; SGLang's ignore_eos ignores stop_token_ids as well
            settings |= {
                "prompt": request.prompt,
                "max_tokens": request.limit,
                "seed": seed,
                "ignore_eos": True,
                "logprobs": 1,
                "return_token_ids": True,
            }
            choice = self.call("/v1/completions", settings)["choices"][0]
            tokens, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            reason = choice["finish_reason"]
        else:
            settings |= {"max_new_tokens": request.limit, "sampling_seed": seed}
            body = {"input_ids": request.prompt, "sampling_params": settings}
            meta = self.call("/generate", {**body, "return_logprob": True})["meta_info"]
            rows = meta["output_token_logprobs"]
            tokens, logps = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
        # SGLang says "length" where the last token that was asked for is a stop token
        ended = any(token in options.stop_tokens for token in tokens[-1:])
        return Completion([*tokens], [*logps], ended), reason
