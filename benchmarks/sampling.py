"""Sampled tokens per second on one GPU: CUDA graphs, plain steps, and transformers.generate with a static cache.

    python benchmarks/sampling.py --arch qwen2.5-1.5b --prompts 64 --prompt-tokens 128 --new 256
    python benchmarks/sampling.py --arch llama3-8b --variants graphs plain

Weights and prompts are random, and no answer ends early. Prints a JSON line for every variant: `seconds` of the fastest
of `--times` calls, prefill, captures and the release of memory included; `first_s` of one before, which compiles
kernels. That all ways draw the same tokens is what tests/unit/test_sampler.py shows.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import add_options, plain_parser, say

from models.arch import ModelConfig, architecture
from models.kinds import empty_model
from ulysses.rl.sampler import Requests, Sampler, SamplingOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
VARIANTS = ("graphs", "plain", "transformers")


def main() -> None:
    p = plain_parser(__doc__)
    add_options(
        p,
        arch=("qwen2.5-1.5b", "architecture, as in model.arch"),
        layers=(0, "use only this many layers; 0 is all"),
        prompts=(64, "number of prompts"),
        prompt_tokens=(128, "tokens of every prompt"),
        new=(256, "tokens of every answer"),
        times=(3, "timed repetitions"),
    )
    p.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    a = p.parse_args()
    shape = architecture(a.arch)
    if a.layers:
        shape = replace(shape, num_hidden_layers=a.layers)
    ids = torch.randint(shape.vocab_size, (a.prompts, a.prompt_tokens))
    options = SamplingOptions(a.new, batch=a.prompts)
    weights = random_weights(shape)

    def sample(*, graphs: bool) -> Any:
        """Sample anew: the capture of the graphs is part of the time."""
        requests = Requests(dict(enumerate(ids)), a.new)
        return Sampler(shape, weights, requests, options, graphs=graphs).sample()

    for variant in a.variants:
        call = partial(sample, graphs=variant == "graphs")
        if variant == "transformers":
            call = generate(shape, ids, a.new)
        say({"variant": variant, **vars(a), **timed(call, a)})


def timed(call: Callable[[], Any], a: Any) -> dict[str, float]:
    """Time a call, and then some more; reserved_gib is the most that the allocator held."""
    times = []
    for _ in range(a.times + 1):
        began = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        times.append(time.perf_counter() - began)
    seconds, peak = min(times[1:]), torch.cuda.max_memory_reserved()
    return {
        "tokens_per_second": round(a.prompts * a.new / seconds), "seconds": round(seconds, 3),
        "first_s": round(times[0], 3), "reserved_gib": round(peak / 2**30, 1),
    }  # fmt: skip


def random_weights(shape: ModelConfig) -> dict[str, torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    return {
        name: torch.empty(p.shape, device=DEVICE, dtype=DTYPE).normal_(
            float("norm" in name), 0.02, generator=draw
        )
        for name, p in empty_model(shape).named_parameters()
    }


def generate(shape: ModelConfig, ids: torch.Tensor, new: int) -> Callable[[], Any]:
    """Return a call of transformers.generate that samples as many tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = shape.to_hf()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    model.generation_config.eos_token_id = None
    ids = ids.to(DEVICE)
    return lambda: model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0,
        min_new_tokens=new, max_new_tokens=new, cache_implementation="static",
    )  # fmt: skip


if __name__ == "__main__":
    main()
