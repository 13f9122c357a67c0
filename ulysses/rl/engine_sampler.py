"""Sample from the weights that are being trained: gather them, and choose how many answers are decoded at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.sampler import Completion, Sampler, SamplingOptions, fitting_slots

MOST_SLOTS = 512  # of an automatic batch


@dataclass
class EngineSampler:
    """Decode a process's answers on its own device.

    Args:
        engine: trains the policy.
        options: of sampling.
        automatic_batch: decode as many answers at a time as a GPU's free memory holds, and not `options.batch`.
        lora: the table of the policy's adapters, which are added to a copy of the matrices they adapt, or None.
        renew: is told of progress.
    """

    engine: Any
    mesh: ParallelMesh
    options: SamplingOptions
    automatic_batch: bool = True
    lora: Any = None
    renew: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.warned = False  # that there are no CUDA graphs

    def synchronise(self) -> None:
        """Do nothing: every call of `sample` reads the current weights."""

    def sample(self, prompts: Mapping[int, Tensor], rollout: int = 0) -> dict[int, Completion]:
        """Return the completion of every prompt, by the prompt's number; all ranks call it together."""
        # deepspeed, which a configuration alone does without
        from ulysses.zero.gather import gathered_weights

        with gathered_weights(self.engine) as weights:
            if self.lora:
                from models.lora import merged  # peft is an optional dependency

                weights = dict(merged(weights.items(), weights, self.lora))
            found = self._decode(weights, prompts, rollout)
        if self.engine.device.type == "cuda":  # graphs and cache make room for training
            torch.cuda.empty_cache()
        return found

    def _decode(
        self, weights: Mapping[str, Tensor], prompts: Mapping[int, Tensor], rollout: int
    ) -> dict[int, Completion]:
        model, options = self.engine.module.config, self.options
        fitting, why = 0, "there is no GPU"
        if self.engine.device.type == "cuda":
            from ulysses.zero.gather import free_bytes

            free = free_bytes(self.engine.device)
            longest = max(map(len, prompts.values()), default=0) + options.max_new_tokens
            dtype = next(self.engine.module.parameters()).dtype
            fitting = fitting_slots(model, longest, dtype, free)
            why = f"{free / 2**30:.1f} GiB of memory hold {fitting} answers with their graphs"
            if self.automatic_batch:
                options = replace(options, batch=max(1, min(fitting, MOST_SLOTS)))
        graphs = min(options.batch, len(prompts)) <= fitting
        main = self.mesh.is_main
        with tqdm(desc="sampling", unit=" tokens", leave=False, disable=not main) as bar:
            if main and not graphs and not self.warned:
                bar.write(f"sampling without CUDA graphs: {why}")
                self.warned = True

            def progress(tokens: int) -> None:
                self.renew()
                bar.update(tokens)

            return Sampler(model, weights, prompts, options, rollout, progress, graphs).sample()
