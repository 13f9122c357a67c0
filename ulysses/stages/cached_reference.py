"""What the initial policy says of DPO's data, computed once before the first update and then memory-mapped.

    examples of the data    [ example 0: t t t t | t t t ][ example 1: ... ] ...
    the file                [ example 0: l l l l | l l l ][ ...          ] ...     float32, one for each token

The file is written under another name and renamed when it is complete; one process of each node writes it, so that it
need not lie on a shared disk, but may.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.data.cache import check_once, content_digest, digest_of_value
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import lock_file, write_digested, write_json, writing
from ulysses.environment import NODE, local_rank
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import gather
from ulysses.progress import progress
from ulysses.stages.base import RunParts
from ulysses.stages.passes import token_values

CHUNK = 32  # the fewest examples per data-parallel group that are computed between two writes


def cache_file(
    config: Config, weights: InitialWeights, kernel: str, data: TokenizedDataset
) -> Path:
    """Return the path of the file in data.cache; its name is a digest of all that the log-probabilities depend on."""
    cache = Path(config.data.cache)
    content = f"seed {weights.seed}"
    if weights.paths:
        content = content_digest(weights.paths, cache)
    # with adapters, even switched off, the base runs through other kernels, which round differently
    adapted = config.model.lora.rank > 0
    source = f"""{weights.shape} {content} {weights.quantize} {config.model.dtype}
            {kernel} {adapted}"""
    # the empty list stands for a part of the key that is gone; without it existing caches would not be found
    key = digest_of_value(f"{source} {data.fingerprint} []")
    return cache / f"reference-{key[:24]}.bin"


def read_reference(
    dataset: TokenizedDataset,
    path: Path,
    logprobs: Callable[[ShardedBatch], Tensor],
    parts: RunParts,
) -> np.ndarray:
    """Return the reference's log-probabilities of all examples end to end, float32.

    They are computed if any node lacks the file; all ranks call this together.

    Args:
        path: of `cache_file`; a .json beside it, which is written last, holds the file's digest.
        logprobs: maps a batch to its tokens' log-probabilities [S], without gradient.
        parts: of the run, for what `token_values` takes of them, and to say a line.
    """
    sizes = dataset.lengths.tolist()
    digest_file = path.with_suffix(".json")
    count, total = len(sizes), sum(sizes)
    if not all(gather(digest_file.exists())):
        parts.say(f"computing reference log-probabilities of {count} examples -> {path}")
        temporary = path.with_suffix(f".{NODE}-{os.getpid()}.tmp")
        # about four micro-batches of each data-parallel group
        per_group = max(CHUNK, 4 * parts.tokens_per_microbatch * count // total)
        per_chunk = parts.mesh.data_parallel_size * per_group

        def computed_chunks() -> Iterator[np.ndarray]:
            bar = progress(
                total=count, desc="reference", unit="examples", leave=False, disable=not parts.mesh.is_main
            )  # fmt: skip
            with bar:
                for first in range(0, count, per_chunk):
                    chunk = sizes[first : first + per_chunk]
                    yield token_values(
                        logprobs,
                        chunk,
                        lambda number, first=first: dataset[first + number].sequences,
                        parts,
                    ).numpy()
                    bar.update(len(chunk))

        chunks = computed_chunks()
        with writing(temporary, advice="set data.cache to another folder"):
            # all ranks compute the chunks together, and one of each node writes them
            if local_rank() == 0:
                digest = write_digested(temporary, chunks, 4 * total)
                _publish(path, digest_file, temporary, digest)
            for _ in chunks:
                pass
        gather(None)  # no node reads a file that is still written
    with error_context("data.cache"):
        check_once(digest_file, path.parent, digest_file)
    return np.asarray(np.memmap(path, np.float32, "r"))


def _publish(path: Path, digest_file: Path, temporary: Path, digest: str) -> None:
    """Give the complete file its name, unless another run has done so first; then that run's file is read."""
    lock = path.with_suffix(".lock")
    with lock_file(lock):
        if not digest_file.exists():
            os.replace(temporary, path)
            write_json(digest_file, {path.name: digest})
    # runs that wait for the lock will find the digest
    lock.unlink(missing_ok=True)
    temporary.unlink(missing_ok=True)
