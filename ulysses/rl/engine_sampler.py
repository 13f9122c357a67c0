"""Sample from the weights that are being trained: gather them, and decode as many answers at a time as fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from models.writing import whole_weights
from ulysses.config.schema import ModelSection
from ulysses.parallel.mesh import ParallelMesh
from ulysses.progress import progress
from ulysses.rl.any_sampler import AnySampler
from ulysses.rl.sampler import Requests, Sampler, SamplingOptions, fitting_slots
from ulysses.zero.engine import ZeroEngine, gathered_weights

MOST_SLOTS = 512  # of an automatic batch
RESERVE = 0.05  # the share of the free memory that is left for what sampling itself allocates


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

    def serve(self, requests: Requests, rollout: int = 0) -> None:
        """Answer requests until there will be none; all ranks call it together, and then wait for no other."""
        model, device, options = self.engine.module, self.engine.device, self.options
        main, fitting, why = self.mesh.is_main, 0, "there is no GPU"
        bar = progress(desc="sampling", unit="tokens", leave=False, disable=not main)
        with gathered_weights(self.engine) as weights, bar:
            if self.settings and self.settings.lora.rank:
                merged = whole_weights(model.config, weights.items(), weights, self.settings)
                weights = {n: w if base is None else w.to(base.dtype) for n, w, base in merged}
            if device.type == "cuda":
                free, dtype = free_bytes(device), next(model.parameters()).dtype
                fitting = fitting_slots(model.config, requests.longest, dtype, free)
                why = (
                    f"{free / 2**30:.1f} GiB of memory hold {fitting} answers with their graphs"
                )
                if self.automatic_batch:
                    options = replace(options, batch=max(1, min(fitting, MOST_SLOTS)))
            graphs = min(options.batch, requests.count) <= fitting
            if main and not graphs and not self.warned:
                bar.write(f"sampling without CUDA graphs: {why}")
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
