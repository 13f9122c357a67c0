"""The gated delta rule on GPUs in half precision: fla-core's kernels, which run FlashQLA's where it is installed.

Other precisions run models/ops/delta_rule.py, with which these kernels are also compared (`prove_rule`).
"""

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from models.families import Delta
from models.ops import delta_rule as plain
from models.ops import delta_triton
from models.ops.delta_compile import compile_side_by_side
from ulysses.parallel.recurrence import Recurrence, TreeLevel


@functools.cache
def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return fla-core's kernel of the rule; ValueError, one sentence, where it cannot be imported."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # of any kind: the packages compile, and look for a driver
        raise ValueError(
            f"layers of linear attention need fla-core and flash-qla on a GPU, which cannot be imported ({error}); "
            'install them with pip install -e ".[hybrid]"'
        ) from error
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


def prove_rule(name: str, device: torch.device, *case: int) -> None:
    """Compare values and gradients of the kernels with plain torch in float64, on a small pack with shared prompts.

    case: the fields of Delta, with as many heads as a rank has.
    Decays are those of trained models: some heads forget within a token, others hardly anything.
    Raises FloatingPointError, which names the wrong tensor and the size of its error; ValueError without kernels.
    """
    delta, kernels = Delta(*case), sys.modules[__name__]
    recurrence = Recurrence([0, *accumulate(PROOF_LENGTHS)], PREFIXES, device)
    tensors = _proof_tensors(delta, sum(PROOF_LENGTHS), device)
    if device.type == "cuda":
        long = {
            key: x.new_zeros(LONG, *x.shape[1:]) if len(x) == len(tensors["rows"]) else x
            for key, x in tensors.items()
        }
        alone = Recurrence([0, LONG], {}, device)
        compile_side_by_side(
            lambda: _computed(delta, recurrence, kernels, tensors),
            lambda: _computed(delta, alone, kernels, long),
        )
    results = (
        _computed(delta, recurrence, kernels, tensors),
        _computed(delta, recurrence, plain, tensors, torch.float64),
    )
    for tensor, got, wanted in zip(("output", *tensors), *results):
        error = float((got.double() - wanted).norm() / wanted.norm())
        if not error < PROOF_ERROR:
            raise FloatingPointError(
                f"{name}: the kernels of fla-core give a wrong {tensor} on {device}, or its gradient: off by "
                f"{error:.1%} of its norm; install other versions of fla-core, flash-qla and tilelang"
            )


def _proof_tensors(delta: Delta, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of `mix_pack` by their names; all but the decays are in the model's dtype."""
    draw = torch.Generator().manual_seed(0)
    heads, columns = delta.linear_num_value_heads, sum(delta.widths)
    tensors = {
        "rows": torch.randn(rows, columns, generator=draw),
        "b": torch.randn(rows, heads, generator=draw),
        "a": torch.randn(rows, heads, generator=draw),
        "filters": torch.randn(columns, delta.linear_conv_kernel_dim, generator=draw),
        "A_log": torch.linspace(-6, 3, heads),
        "dt_bias": torch.linspace(-4, 1, heads),
    }
    return {
        key: x.to(device, torch.bfloat16 if x.dim() > 1 else None) for key, x in tensors.items()
    }


def _computed(
    delta: Delta,
    recurrence: Recurrence,
    kernels: ModuleType,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the output of a pack [rows, heads, width] and the gradients of the inputs."""
    inputs = [x.to(dtype=dtype).detach().requires_grad_() for x in tensors.values()]
    out = plain.mix_pack(delta, recurrence, kernels, *inputs)
    draw = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=draw).to(out.device)
    return [out, *torch.autograd.grad((out * upstream).sum(), inputs)]
