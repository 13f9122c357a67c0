"""The planner's few measured constants, each with a physical meaning.

`benchmarks/plan_accuracy.py` fits them to every other row of benchmarks/measured.jsonl, starting from what is known of
the machine (`PRIOR`), and prints the errors on the rows it did not see. Speeds are shares of the machine's peaks.
"""

from typing import NamedTuple


class Calibration(NamedTuple):
    """Hold shares of peak speeds, seconds of the host and bytes that no tensor accounts for."""

    matrices: float = 0.602  # matrix products, of the peak FLOP/s
    attention: float = 0.623  # attention kernels with heads of 128, of the peak FLOP/s
    narrow_heads: float = 0.858  # attention with heads of 64, beside those of 128
    memory: float = 0.643  # elementwise kernels, casts and the update, of the memory bandwidth
    exchange: float = 0.328  # all-to-alls, which share the links with ZeRO-3's traffic, of the link
    gather: float = 0.365  # all-gathers and reduce-scatters, of the link
    layer_seconds: float = (
        0.004  # the host's time for one layer, forward and backward, hooks included
    )
    step_seconds: float = 0.0146  # per micro-batch: metadata, first gather, last reduction, metrics
    working: float = 1.01  # the working set of head or layer, of what peak.py counts
    slack: float = 0.03  # fragments that the allocator cannot give back, of its peak
    context_bytes: float = (
        1.3e9  # CUDA context and libraries: what the driver saw beside the allocator on one H200
    )
    communicator_bytes: float = (
        2.1e9  # NCCL's buffers, with more than one process: what it saw more on two
    )


PRIOR = Calibration(
    matrices=0.66, attention=0.62, narrow_heads=0.75, memory=0.5, exchange=0.3, gather=0.4, layer_seconds=0.004,
    step_seconds=0.015, working=1.0, slack=0.03, context_bytes=1.3e9, communicator_bytes=2.1e9,
)  # fmt: skip
