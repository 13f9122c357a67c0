"""Prove the attention kernel before a run, once for each machine, version and shape."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ulysses.data.cache import digest_of_value
from ulysses.disk import write_json
from ulysses.parallel.attention import prove_kernel


def prove_once(
    cache: Path,
    kernel: str,
    device: torch.device,
    *case: Any,
    prove: Callable[..., None] = prove_kernel,
) -> None:
    """Call prove(kernel, device, *case), unless `cache` holds that this was done with the same of everything.

    Raises FloatingPointError for a kernel that is wrong; nothing is kept then.
    """
    facts = [kernel, *map(str, case), torch.__version__, torch.get_deterministic_debug_mode()]
    for name in (
        "ulysses-engine",
        "flash-attn-4",
        "triton",
        "fla-core",
        "flash-qla",
        "tilelang",
    ):
        try:
            facts.append(version(name))
        except PackageNotFoundError:
            facts.append("")
    if device.type == "cuda":
        facts += [str(torch.cuda.get_device_properties(device)), torch.backends.cudnn.version()]
    path = cache / f"kernel-{digest_of_value(facts)[:24]}.json"
    if not path.exists():
        prove(kernel, device, *case)
        cache.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)
