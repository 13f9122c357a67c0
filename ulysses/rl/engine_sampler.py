"""What samplers have in common, and the one of this process: it gathers the weights that are being trained, and decodes
as many answers at a time as fit. Servers are the others (outside_sampler.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch

from models.writing import whole_weights
from ulysses.config.schema import ModelSection
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.progress import progress
from ulysses.rl.sampler import Completion, Requests, Sampler, SamplingOptions, fitting_slots
from ulysses.zero.engine import ZeroEngine, gathered_weights

MOST_SLOTS = 512  # of an automatic batch
RESERVE = 0.05  # the share of the free memory that is left for what sampling itself allocates


class AnySampler:
    """Who answers requests."""

    mesh: ParallelMesh
    options: SamplingOptions

    def synchronise(self, rollout: int = 0) -> None:
        """Bring it the current weights, if the rollout asks for it; all ranks call it together."""

    def check_gap(self, gap: float) -> None:
        """Compare the log-probabilities of the first rollout, or the first one with a server that came back.

        Args:
            gap: mean |trainer - sampler| per token.

        Raises UserCodeError if the same weights cannot explain it.
        """

    def sample_together(
        self, prompts: Mapping[int, list[int]], rollout: int
    ) -> dict[int, Completion]:
        """Answer prompts, each on one rank, and return all completions by the prompts' numbers in the rollout.

        All ranks call it together. Where servers have just had their first weights, their answers are compared with
        the trainer's log-probabilities.
        """
        mine = [*prompts][self.mesh.rank :: self.mesh.world_size]
        drawn = gather(self.sample({n: prompts[n] for n in mine}, rollout))
        return dict(sorted(chain(*(each.items() for each in drawn))))

    def sample(
        self, prompts: Mapping[int, Iterable[int]], rollout: int = 0
    ) -> dict[int, Completion]:
        """Return the completion of every prompt, by the prompt's number in the rollout, as `serve` does it."""
        requests = Requests(prompts, self.options.max_new_tokens)
        self.serve(requests, rollout)
        return requests.completions

    def serve(self, requests: Requests, rollout: int) -> None:
        """Answer requests until there will be none."""
        raise NotImplementedError

    def close(self) -> None:
        """Let a call of `serve` in another thread end soon, without asking for more."""


@dataclass
class EngineSampler(AnySampler):
    """Decode a process's answers on its own device, with the current weights at every call.

    Args:
        engine: of the policy.
        automatic_batch: decode as many answers at a time as a GPU's free memory holds, and not `options.batch`.
        settings: the policy's table [model]; adapters are added to a copy of the matrices that they adapt.
        renew: is called at every progress.

    Attributes:
        warned: whether a line has said that there are no CUDA graphs.
    """

    engine: ZeroEngine
    mesh: ParallelMesh
    options: SamplingOptions
    automatic_batch: bool = True
    settings: ModelSection | None = None
    renew: Callable[[], None] = lambda: None
    warned: bool = False

    def serve(self, requests: Requests, rollout: int) -> None:
        """Answer requests until there will be none; all ranks call it together, and then wait for no other."""
        model, device, options = self.engine.module, self.engine.device, self.options
        main, graphs = self.mesh.is_main, False
        bar = progress(desc="sampling", unit="tokens", leave=False, disable=not main)
        with gathered_weights(self.engine) as weights, bar:
            if self.settings and self.settings.lora.rank:
                merged = whole_weights(model.config, weights.items(), weights, self.settings)
                weights = {n: w if base is None else w.to(base.dtype) for n, w, base in merged}
            if device.type == "cuda":
                free, dtype = free_bytes(device), next(model.parameters()).dtype
                fitting = fitting_slots(model.config, requests.longest, dtype, free)
                if self.automatic_batch:
                    options = replace(options, batch=max(1, min(fitting, MOST_SLOTS)))
                graphs = min(options.batch, requests.count) <= fitting
                if main and not graphs and not self.warned:
                    bar.write(
                        f"sampling without CUDA graphs: {free / 2**30:.1f} GiB of memory hold {fitting} answers with "
                        "their graphs"
                    )
                    self.warned = True

            def count(tokens: int) -> None:
                self.renew()
                bar.update(tokens)

            Sampler(model.config, weights, requests, options, rollout, count, graphs).sample()
        torch.cuda.empty_cache()  # graphs and cache make room for training


def free_bytes(device: torch.device) -> int:
    """Return the bytes of GPU memory that this process can still allocate for a sampler's cache."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * (1 - RESERVE))
