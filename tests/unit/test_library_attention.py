"""What packing and attention cannot compute, they refuse in one sentence, before the ranks exchange anything."""

import pytest
import torch

from tests import rows_of
from tests.unit.test_layout import simulated_mesh  # noqa: F401 (a row names it)
from ulysses import ParallelMesh, Sequence, UlyssesAttention, pack_shard

# what is given in the place of a good argument => what is said
WRONG = r"""
sink=torch.zeros(2) => sink is \[2\] but must be \[4\]
sink=torch.zeros(5) => sink is \[5\] but must be \[4\]
sink=torch.zeros(1) => sink is \[1\] but must be \[4\]
sink=torch.zeros(4, 1) => sink is \[4, 1\] but must be \[4\]
sink=[0.0] * 4 => sink is of type list but UlyssesAttention takes torch tensors; use torch.as_tensor\(sink\)
cu_seqlens=[0, 6] => cu_seqlens is of type list but UlyssesAttention takes
cu_seqlens=torch.tensor([0.0, 6.0]) => cu_seqlens is torch.float32 \[2\] but must hold whole numbers \[N \+ 1\]
cu_seqlens=torch.tensor([[0, 6]]) => cu_seqlens is torch.int64 \[1, 2\] but must hold whole
query=q.numpy() => query is of type ndarray but UlyssesAttention takes
key=k.tolist() => key is of type list but
query=q.long(), key=k.long(), value=k.long() => torch.int64 .* one length S, at least 1, of floats
query=q[:0], key=k[:0], value=k[:0], cu_seqlens=torch.tensor([0]) => \[0, 4, 8\], .* at least 1
query=q[None, :0], key=k[None, :0], value=k[None, :0], cu_seqlens=None => \[1, 0, 4, 8\], .* at least 1
query=q[None][:0], key=k[None][:0], value=k[None][:0], cu_seqlens=None => \[0, 6, 4, 8\], .* at least 1
window=2.5 => window is 2.5 but .* whole tokens
window=(4, 0) => window is \(4, 0\) but
softmax_scale=0.0 => softmax_scale is 0.0 but must be above 0
softmax_scale=-0.5 => softmax_scale is -0.5 but must be above 0
softmax_scale=float("nan") => softmax_scale is nan but must be above 0
cu_seqlens=None => needs plan or cu_seqlens
query=k => are torch.float32 \[6, 2, 8\], .*they must have one dtype and \(4, 2, 2\) heads of 8
key=q, value=q => \[6, 4, 8\]; they must have one dtype and \(4, 2, 2\) heads of 8
key=k.double(), value=k.double() => torch.float64 \[6, 2, 8\]; they must have one dtype and \(4, 2, 2\) heads of 8
key=k[:5], value=k[:5] => \[5, 2, 8\]; they must have one dtype and \(4, 2, 2\) heads of 8: .*, and one length S
value=torch.ones(7, 2, 8) => \[7, 2, 8\]; .*, and one length S
cu_seqlens=torch.tensor([0, 5]).int() => cu_seqlens ends at 5 but the 1 ranks hold 6 tokens
cu_seqlens=torch.tensor([]).int() => cu_seqlens ends at 0 but the 1 ranks hold 6 tokens
cu_seqlens=torch.tensor([2, 6]).int() => must describe .* and rise from 0, here 2
cu_seqlens=torch.tensor([0, 5, 3, 6]).int() => must describe .* and rise from 0, here 0
window=4, causal=False => window is 4 but causal is False; .* leave one of them
window=0 => window is 0 but a token sees at least
window=-1 => window is -1 but a token sees at least
cu_seqlens=None, plan=pack_shard([Sequence(range(5), [1] * 5)], ParallelMesh()).attention_plan \
=> query has 6 tokens but the plan gives this rank 5
"""


@pytest.mark.parametrize("wrong, said", rows_of(WRONG))
def test_a_call(wrong, said):
    q, k = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    given = {"query": q, "key": k, "value": k, "cu_seqlens": torch.tensor([0, 6])}
    attention = UlyssesAttention(None, 4, 2, 8)
    attention(**given)
    given |= eval(f"dict({wrong})")
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        attention(**given)
    assert "\n" not in str(caught.value)


WRONG_MODULES = r"""
window=0 => window is 0 but a token sees at least itself; set it
num_heads=-4 => must divide the .* query heads
num_heads=0, num_kv_heads=0 => must divide the .* query heads
num_heads=0 => must divide the .* query heads
num_kv_heads=3 => num_kv_heads is 3 but must divide the 4 query heads
kernel="flash" => kernel 'flash' is unknown; set auto, flash4, cudnn
mesh=simulated_mesh(4, 0, 4), num_heads=14 => splits heads 4 ways, .* as ParallelMesh\(..., num_heads=14\)
"""


@pytest.mark.parametrize("wrong, said", rows_of(WRONG_MODULES))
def test_a_module(wrong, said):
    good = {"mesh": None, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=said):
        UlyssesAttention(**good | eval(f"dict({wrong})"))


def test_a_scale_of_the_module_that_is_zero_is_not_taken_for_the_default():
    q, k = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    with pytest.raises(ValueError, match=r"^softmax_scale is 0\.0 but must be above 0"):
        UlyssesAttention(None, 4, 2, 8, softmax_scale=0.0)(q, k, k, torch.tensor([0, 6]))


def test_sequences_of_one_pack_have_the_same_columns():
    plain = Sequence([1, 2], [1, 1])
    others = (
        Sequence([3, 4], [1, 1], token_columns={"old": [0.5, 0.5]}),
        Sequence([3, 4], [1, 1], columns={"score": 1.0}),
    )
    for other in others:
        # one column of the second sequence alone was dropped without a word
        for pair in ([plain, other], [other, plain]):
            with pytest.raises(
                ValueError, match="^the sequences of a pack .* give all the same$"
            ):
                pack_shard(pair, ParallelMesh())
        assert pack_shard([other, other], ParallelMesh()).num_tokens == 4
