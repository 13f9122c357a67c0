"""Sampling on servers of vLLM or SGLang: they get prompts, return tokens with log-probabilities, and read weights.

    trained weights -> export folder -> reload calls to every server        before a rollout that synchronises
    this process's prompts -> POST, one request for each answer -> tokens, log-probabilities

    "vllm+http://host:8000"       POST /v1/completions with token ids (return_token_ids: vLLM 0.10.2 and newer)
    "sglang+http://host:30000"    POST /generate with token ids

The folder must be on a disk that servers and rank 0 share. Servers draw their own random numbers, so that a rollout
does not repeat bit for bit; ppo.importance_cap corrects where their probabilities differ from the trainer's.
"""

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ulysses.config.section import UserCodeError
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.mesh import gather
from ulysses.parallel.random_keys import seed_of
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.rl.servers import Json, post

# The calls, in order, that make a server read its weights again: {path: body}, where FOLDER stands for the folder. vLLM
# (with VLLM_SERVER_DEV_MODE=1) reads the folder that it was started with.
RELOAD: Mapping[str, dict[str, Json]] = {
    "vllm": {"/collective_rpc": {"method": "reload_weights"}, "/reset_prefix_cache": {}},
    "sglang": {"/update_weights_from_disk": {"model_path": "FOLDER"}},
}


@dataclass
class OutsideSampler:
    """Ask servers for completions.

    Args:
        ppo: the [ppo] table; prompts go to the servers of `ppo.sampler` in turn.
        export: writes the policy's weights into a folder; all ranks call it together.
        folder: where the servers read the weights.
        main: whether this is the process that tells the servers to read them.
        renew: is called after every completion.

    Attributes:
        synchronised: whether the servers have had weights of this run.
    """

    ppo: PpoSection
    export: Callable[[Path], None]
    folder: Path
    main: bool
    options: SamplingOptions
    renew: Callable[[], None] = lambda: None
    synchronised: bool = False

    def synchronise(self, rollout: int = 0) -> None:
        """Export the weights and have every server read them, if the rollout asks for it; all ranks call it together.

        Raises UserCodeError if a server does not.
        """
        if self.synchronised and rollout % self.ppo.sampler_sync_every:
            return
        self.synchronised = True
        self.export(self.folder)
        for address in self.ppo.sampler if self.main else ():
            calls = self.ppo.sampler_reload or RELOAD[address.partition("+")[0]]
            for path, body in calls.items():
                text = json.dumps(body).replace("FOLDER", str(self.folder.absolute()))
                answer = self._post(address, path, json.loads(text))
                if isinstance(answer, dict) and answer.get("success", True) is not True:
                    raise UserCodeError(
                        f"{address}{path} did not take the new weights: {str(answer)[:200]}"
                    )
        gather(None)  # no process asks a server before all servers have the new weights

    def sample(self, prompts: Mapping[int, Tensor], rollout: int = 0) -> dict[int, Completion]:
        """Return the completion of every prompt, by the prompt's number in the rollout.

        Raises UserCodeError if a server fails several times, or if its answer cannot be trained on.
        """
        servers = self.ppo.sampler

        def ask(number: int) -> Completion:
            address = servers[number % len(servers)]
            seed = seed_of(self.options.seed, rollout, number) % 2**31
            try:
                completion = self._complete(address, prompts[number].tolist(), seed)
                fault = self._fault(completion)
            except (LookupError, TypeError) as error:
                fault = f"JSON of another form ({error!r})"
            if fault:
                raise UserCodeError(f"{address} answered prompt {number} with {fault}")
            self.renew()
            return completion

        pool = ThreadPoolExecutor(self.options.batch)
        try:
            return dict(zip(prompts, pool.map(ask, prompts), strict=True))
        finally:  # after an error this process does not wait for the other requests
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, address: str, prompt: list[int], seed: int) -> Completion:
        options = self.options
        settings = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or -1,
            "stop_token_ids": options.stop_tokens,
        }
        limit = options.max_new_tokens
        if address.startswith("vllm"):
            body = {**settings, "prompt": prompt, "max_tokens": limit, "seed": seed}
            body |= {"logprobs": 1, "return_token_ids": True}
            choice = self._post(address, "/v1/completions", body)["choices"][0]
            tokens, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            reason = choice["finish_reason"]
        else:
            settings |= {"max_new_tokens": limit, "sampling_seed": seed}
            body = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
            meta = self._post(address, "/generate", body)["meta_info"]
            logps, tokens, *_ = zip(*meta["output_token_logprobs"])
            reason = meta["finish_reason"]["type"]
        return Completion(list(tokens), list(logps), reason == "stop")

    def _fault(self, completion: Completion) -> str:
        """Return why a completion cannot be trained on, or nothing."""
        tokens, logps = completion.tokens, completion.logps
        if not 0 < len(tokens) == len(logps) <= self.options.max_new_tokens:
            return f"{len(tokens)} tokens and {len(logps)} log-probabilities"
        if not all(math.isfinite(logp) and logp <= 1e-3 for logp in logps):
            return "log-probabilities that are not finite or above 0"
        if completion.ended and tokens[-1] not in self.options.stop_tokens:
            return f"an end but without the token that ends it (its last one is {tokens[-1]})"
        return ""

    def _post(self, address: str, path: str, body: Json) -> Json:
        url = address.partition("+")[2].rstrip("/") + path
        try:
            return post(url, body, self.ppo.sampler_timeout)
        except (OSError, ValueError) as error:
            raise UserCodeError(
                f"the sampling server {url} failed ({error}); look at its log, start it again and continue with "
                "--run.resume auto"
            ) from None
