"""The gated delta rule on GPUs in half precision: fla-core's kernels, which run FlashQLA's where it is installed.

Other precisions run models/ops/delta_rule.py, with which these kernels are also compared (`prove_rule`).
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from models.families import Delta
from models.ops import delta_compile, delta_triton
from models.ops import delta_rule as plain
from ulysses.parallel.ranges import Range
from ulysses.parallel.recurrence import Recurrence, TreeLevel


def check_installed() -> None:
    """Raise what `load` raises if fla-core is not installed; its import, which takes seconds, can come later."""
    if find_spec("fla") is None:
        load()


@cache
def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return fla-core's kernel of the rule; ValueError, one sentence, where it cannot be imported."""
    gc.disable()  # the collector would look through all modules again and again
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # of any kind: the packages compile, and look for a driver
        raise ValueError(
            f"layers of linear attention need fla-core and flash-qla on a GPU, which cannot be imported ({error}); "
            'install them with pip install -e ".[hybrid]"'
        ) from error
    finally:
        gc.enable()
    return chunk_gated_delta_rule


def delta_rule(*rows: Tensor, level: TreeLevel, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Do models/ops/delta_rule.py's `delta_rule`."""
    out, states = load()(
        *(x.contiguous()[None] for x in rows),
        initial_state=start,
        output_final_state=level.final_states is not None,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=level.cu_seqlens,
        cu_seqlens_cpu=torch.tensor(level.bounds),
    )
    # squeeze, because the backward of out[0] would fill zeros first and copy the gradient into them
    return out.squeeze(0), states


def convolve(
    x: Tensor, weight: Tensor, recurrence: Recurrence, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Do models/ops/delta_rule.py's `convolve`."""
    from fla.modules.causal_conv1d import causal_conv1d  # as slow an import as the rule's

    pack = recurrence.with_copies(weight.shape[1] - 1)
    out, _ = causal_conv1d(
        x[pack.rows][None],
        weight,
        activation="silu",
        cu_seqlens=pack.cu_seqlens,
        cu_seqlens_cpu=torch.tensor(pack.bounds),
    )
    return out.squeeze(0)[pack.originals].split(widths, 1)


def mix_step(delta: Delta, *inputs: Tensor) -> Tensor:
    """Do models/ops/delta_rule.py's `mix_step`."""
    return delta_triton.step(delta, *inputs)


# Lengths of the documents of prove_rule, some of which end inside a chunk, and the rows that two of them leave out.
PROOF_LENGTHS, PREFIXES = (300, 1, 129, 70), {2: [(0, 200)], 3: [(0, 200), (301, 340)]}
PROOF_ERROR = 2e-2  # as a part of a tensor's norm; half precision reaches 3e-3 to 4e-3
LONG = 65536  # rows of a document that runs in parts, by other kernels
CHUNK = 64  # rows of the other documents for which kernels are compiled
NAMES = "rows", "b", "a", "filters", "A_log", "dt_bias"  # of mix_pack's inputs


def prove_rule(name: str, device: torch.device, shares: bool, *case: int) -> None:
    """Compare values and gradients of the kernels with plain torch in float64, on a small pack.

    shares: whether prompts are shared, which needs further kernels; all that a run needs compile first, side by side.
    case: the fields of Delta, with as many heads as a rank has.
    Decays are those of trained models: some heads forget within a token, others hardly anything.
    Raises FloatingPointError, which names the wrong tensor and the size of its error; ValueError without kernels.
    """
    delta, prefixes = Delta(*case), PREFIXES if shares else {}
    recurrence = Recurrence([0, *accumulate(PROOF_LENGTHS)], prefixes, device)
    kernels = sys.modules[__name__]
    by_kernels = partial(_computed, delta, recurrence, kernels)
    in_plain_torch = partial(_computed, delta, recurrence, plain, torch.float64)
    if device.type == "cuda":
        packs = [*_packs(delta, device, shares)]
        # all kernels of FlashQLA compile, and meanwhile Triton's and torch's, which are tuned for the longest pack
        found = [partial(_computed, delta, pack, delta_compile) for pack in packs]
        tuned = partial(_computed, delta, packs[0], kernels)
        meanwhile = tuned, by_kernels, in_plain_torch
        delta_compile.compile_side_by_side(found, meanwhile)
    for tensor, got, wanted in zip(("output", *NAMES), by_kernels(), in_plain_torch()):
        error = float((got.double() - wanted).norm() / wanted.norm())
        if not error < PROOF_ERROR:
            raise FloatingPointError(
                f"{name}: the kernels of fla-core give a wrong {tensor} on {device}, or its gradient: off by "
                f"{error:.1%} of its norm; install other versions of fla-core, flash-qla and tilelang"
            )


def _packs(delta: Delta, device: torch.device, shares: bool) -> Iterator[Recurrence]:
    """Yield packs, the longest first, that need all variants of the kernels, which depend on these:

    how many of the GPU's multiprocessors the heads of all parts of a level occupy, whether a document is so long that
    it runs in parts, and with shared prompts whether parts start from a state and whether their last states are needed.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    heads, parts = delta.linear_num_value_heads, 1
    yield Recurrence([0, LONG], {}, device)
    while True:
        yield Recurrence([*range(0, parts * CHUNK + 1, CHUNK)], {}, device)
        if shares:  # documents that continue others, which continue others
            prefixes: dict[int, list[Range]] = {}
            for i in range(parts, 3 * parts):
                before = (i - parts) * CHUNK
                prefixes[i] = [*prefixes.get(i - parts, []), (before, before + CHUNK)]
            yield Recurrence([*range(0, 3 * parts * CHUNK + 1, CHUNK)], prefixes, device)
        if parts * heads >= processors:
            break
        parts *= 2


def _computed(
    delta: Delta,
    recurrence: Recurrence,
    kernels: ModuleType,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the output of a pack [rows, heads, width] and the gradients of the inputs, the tensors NAMES.

    All but the decays are drawn in bfloat16, and are computed in `dtype`, or as they are.
    """
    device, rows = recurrence.device, recurrence.documents[-1][1]
    heads, columns = delta.linear_num_value_heads, sum(delta.widths)
    draw = torch.Generator(device).manual_seed(0)
    sizes = (
        (rows, columns),
        (rows, heads),
        (rows, heads),
        (columns, delta.linear_conv_kernel_dim),
    )
    drawn = (torch.randn(size, generator=draw, device=device) for size in sizes)
    decays = torch.linspace(-6, 3, heads), torch.linspace(-4, 1, heads)
    given = *(x.bfloat16() for x in drawn), *(x.to(device) for x in decays)
    inputs = [x.to(dtype=dtype).requires_grad_() for x in given]
    out = plain.mix_pack(delta, recurrence, kernels, *inputs)
    upstream = torch.randn(out.shape, generator=draw, device=device)
    return [out, *torch.autograd.grad((out * upstream).sum(), inputs)]
