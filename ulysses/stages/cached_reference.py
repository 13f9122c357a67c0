"""What the initial policy says of DPO's data, computed once before the first update and then memory-mapped.

    examples of the data    [ example 0: t t t t | t t t ][ example 1: ... ] ...
    what the file holds     [            l l l l | l l l ][ ...                    float32, same positions

The file is written under another name and renamed when it is complete; one process of each node writes it, so that it
need not lie on a shared disk, but may.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.data.cache import check_once, content_digest, digest_of_value
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import lock_file, write_digested, write_json, writing
from ulysses.environment import NODE, local_rank
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.progress import progress
from ulysses.stages.passes import token_values

CHUNK = 32  # items per data-parallel group that are computed before their values are written


def cache_file(
    config: Config, weights: InitialWeights, kernel: str, data: TokenizedDataset
) -> Path:
    """Return the file in data.cache of the initial policy's values, named after everything that they depend on."""
    cache, content = Path(config.data.cache), f"seed {weights.seed}"
    if weights.paths:
        content = content_digest(weights.paths, cache)
    # adapters, even switched off, take the base another way through the kernels
    adapted = config.model.lora.rank > 0
    source = f"""{weights.shape} {content} {weights.quantize} {config.model.dtype}
            {kernel} {adapted}"""
    # the empty list has been part of the name since KTO had such files
    key = digest_of_value(f"{source} {data.fingerprint} []")
    return cache / f"reference-{key[:24]}.bin"


def read_reference(
    dataset: TokenizedDataset,
    path: Path,
    logprobs: Callable[[ShardedBatch], Tensor],
    mesh: ParallelMesh,
    device: torch.device,
    tokens_per_microbatch: int,
    say: Callable[[str], None],
) -> np.ndarray:
    """Return the reference's log-probabilities of all examples end to end, float32.

    They are computed if any node lacks the file; all ranks call this together.

    Args:
        path: of `cache_file`; a .json next to it holds the file's digest.
        logprobs: maps a batch to its tokens' log-probabilities [S], without gradient.
        tokens_per_microbatch: the most of a packed one.
    """
    sizes, seal = dataset.lengths.tolist(), path.with_suffix(".json")
    if not all(gather(seal.exists())):
        numbers = range(len(dataset))
        say(f"computing reference log-probabilities of {len(numbers)} examples -> {path}")
        temporary = path.with_suffix(f".{NODE}-{os.getpid()}.tmp")
        # several micro-batches of them, or CHUNK
        size = mesh.data_parallel_size * max(
            CHUNK, 4 * tokens_per_microbatch * len(numbers) // sum(sizes)
        )
        bar = {
            "desc": "reference",
            "unit": "examples",
            "leave": False,
            "disable": not mesh.is_main,
        }

        def computed_chunks() -> Iterator[np.ndarray]:
            with progress(total=len(numbers), **bar) as shown:
                for at in numbers[::size]:
                    some = sizes[at : at + size]
                    yield token_values(
                        logprobs,
                        some,
                        lambda number, at=at: dataset[at + number].sequences,
                        mesh,
                        device,
                        tokens_per_microbatch,
                    ).numpy()
                    shown.update(len(some))

        chunks = computed_chunks()
        with writing(temporary, advice="set data.cache to another folder"):
            if local_rank() == 0:
                _keep(path, seal, temporary, write_digested(temporary, chunks, 4 * sum(sizes)))
            for (
                _
            ) in chunks:  # all ranks compute them together, and one of each node writes them
                pass
        gather(None)  # no node reads what is still written
    with error_context("data.cache"):
        check_once(seal, path.parent)
    return np.asarray(np.memmap(path, np.float32, "r"))


def _keep(path: Path, seal: Path, temporary: Path, digest: str) -> None:
    """Give the complete file its name, unless another run came first, whose file is read then."""
    lock = path.with_suffix(".lock")
    with lock_file(lock):
        if not seal.exists():
            os.replace(temporary, path)
            write_json(seal, {path.name: digest})
    lock.unlink(missing_ok=True)  # those who wait for it will find the seal
    temporary.unlink(missing_ok=True)
