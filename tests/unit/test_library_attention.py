"""What packing and attention cannot compute, they refuse in one sentence, before the ranks exchange anything."""

import pytest
import torch

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
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_a_call(row):
    wrong, said = row.split(" => ")
    q, k = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    given = {"query": q, "key": k, "value": k, "cu_seqlens": torch.tensor([0, 6])}
    attention = UlyssesAttention(None, 4, 2, 8)
    attention(**given)
    given |= eval(f"dict({wrong})")
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        attention(**given)
    assert "\n" not in str(caught.value)


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
