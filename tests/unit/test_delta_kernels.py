"""The kernels of linear attention are called as fla-core has them and proven before a run; on a GPU the real ones."""

import pytest
import torch

from models.ops import delta_kernels, delta_rule
from ulysses.parallel.waves import Recurrence

HEADS = 2, 6, 16, 24, 4  # key and value heads, their widths, and the convolution's


def stand_in(wrong: float = 0.0):
    """Functions with fla-core's arguments and shapes, in plain torch; `wrong` is added to what the rule returns."""

    def rule(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert q.shape[:2] == g.shape[:2] == (1, int(cu_seqlens[-1]))
        wave = Recurrence(cu_seqlens.tolist(), {}, q.device).waves[0]
        given = (x[0] for x in (q, k, v, g, beta))
        out, last = delta_rule.delta_rule(*given, wave, initial_state)
        return out[None] + wrong, last if output_final_state else None

    def convolution(x, weight, *, activation, cu_seqlens):
        assert activation == "silu"
        recurrence = Recurrence(cu_seqlens.tolist(), {}, x.device)
        return delta_rule.convolve(x[0], weight, recurrence)[None], None

    return rule, convolution


def test_right_kernels_are_proven_and_wrong_ones_refused(monkeypatch) -> None:
    case = "rule", torch.device("cpu"), *HEADS
    monkeypatch.setattr(delta_kernels, "load", stand_in)
    delta_kernels.prove_rule(*case)
    monkeypatch.setattr(delta_kernels, "load", lambda: stand_in(0.02))
    with pytest.raises(
        FloatingPointError, match="rule: the kernels of fla-core give a wrong output"
    ):
        delta_kernels.prove_rule(*case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be kernels")
def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match=r"install them with pip install -e .\.\[hybrid\]"):
        delta_kernels.load()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(4, 8, 128, 128, 4), (3, 6, 128, 128, 4), (16, 32, 128, 128, 4)]
)
def test_the_kernels_are_as_near_to_float64_as_their_dtype(heads) -> None:
    pytest.importorskip("fla")
    delta_kernels.prove_rule("rule", torch.device("cuda"), *heads)
