"""`run.deterministic`: the same bits on every repeat, or a refusal.

torch's operations take their deterministic kernels and raise where they have none; attention kernels are told, and those
that cannot are refused by name (ulysses.parallel.kernels); our own Triton kernels use no atomics; cuBLAS needs a workspace
setting that it reads once, when CUDA starts.
"""

import os

import torch

CUBLAS, FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def require_determinism() -> None:
    """Turn on deterministic kernels everywhere in this process; to be called before CUDA starts in it.

    Raises ValueError if cuBLAS can no longer be told, or was told otherwise.
    """
    setting = os.environ.get(CUBLAS)
    if setting is not None and setting not in FIXED_WORKSPACES:
        raise ValueError(
            f"{CUBLAS} is {setting!r} but deterministic runs need {' or '.join(FIXED_WORKSPACES)}; unset it"
        )
    if setting is None and torch.cuda.is_initialized():
        raise ValueError(
            f"CUDA has started in this process, too late to set {CUBLAS}; set {CUBLAS}={FIXED_WORKSPACES[0]} before Python starts"
        )
    os.environ[CUBLAS] = setting or FIXED_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
