"""Sequences that share their prompt in the pack: the attention of the separate sequences, on every topology.

Every tree is compared in float64 with its sequences one by one, whole: the outputs at trained rows, and the gradients
of tables that give every token its query, key and value, so that shared rows collect those of all their suffixes.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data_case import sharing
from tests.distributed.test_attention import compare
from tests.forest_case import as_trees, forest
from tests.harness import device, full, need_gpus, run_distributed
from tests.unit.test_kernels import gpu_kernels
from tests.unit.test_layout import simulated_mesh
from ulysses import ParallelMesh, Sequence, UlyssesAttention, pack_shard

WORDS, E = 50, 8


def sequence(prompt, answer, draw):
    tokens = torch.cat([prompt, torch.randint(0, WORDS, (answer,), generator=draw)])
    return Sequence(tokens, (torch.arange(len(tokens)) >= len(prompt)).float())


def drawn(longest=20, **size):
    """Whole sequences of trees: prefixes of any length, none and all but one token among them."""
    return forest(0, WORDS, longest=longest, **size)


def tables(heads, head_dim, dtype):
    draw = torch.Generator().manual_seed(1)
    found = [torch.randn(WORDS, h, head_dim, generator=draw) for h in heads]
    return [x.to(device(), dtype).requires_grad_() for x in found]


def embed(table, tokens, positions):
    # bfloat16 has no odd whole numbers above 256
    return table[tokens] * (1 + torch.cos(positions.double())).to(table.dtype)[:, None, None]


def formula(heads, head_dim=E, window=None, **size):
    """Summed sines of all rows, weighted by targets and weights, and the tables' gradients; sequence by sequence."""
    whole = tables((heads[0], *heads[1:] * 2), head_dim, torch.float64)
    found = [x.detach().cpu().requires_grad_() for x in whole]
    loss = torch.zeros((), dtype=torch.float64)
    for given, _ in drawn(**size):
        positions = torch.arange(len(given.tokens))
        q, k, v = (embed(x, given.tokens, positions).transpose(0, 1)[None] for x in found)
        age = positions[:, None] - positions
        seen = (age >= 0) & (age < (window or len(age)))
        out = sdpa(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
        factors = given.tokens[1:] * given.loss_weights[1:]
        loss = loss + (out[:-1].sin() * factors[:, None, None]).sum()
    return [loss.detach(), *torch.autograd.grad(loss, found)]


def on_ranks(
    sp, heads, kernel="auto", dtype=torch.float64, head_dim=E, window=None, **size
):  # fmt: skip
    """The same from packs on all ranks; the loss and the gradients are summed over the group."""
    mesh = ParallelMesh(sp, num_heads=heads[0], windows=[window])
    batch = pack_shard(as_trees(drawn(**size)), mesh, device())
    assert batch.num_tokens_shared
    found = tables((heads[0], *heads[1:] * 2), head_dim, dtype)
    attention = UlyssesAttention(mesh, *heads, head_dim, kernel=kernel, window=window)
    q, k, v = (embed(x, batch.tokens, batch.positions) for x in found)
    out = attention(q, k, v, plan=batch.attention_plan)
    loss = (out.sin() * (batch.targets * batch.loss_weights)[:, None, None]).sum()
    totals = [x.detach().double() for x in (loss, *torch.autograd.grad(loss, found))]
    if mesh.sp_group is not None:
        for total in totals:
            torch.distributed.all_reduce(total, group=mesh.sp_group)
    return totals


def many(sp, cases, **how):
    return [on_ranks(sp, heads, **how) for heads in cases]


@pytest.mark.parametrize("sp", [1, 2, 3, 4])
def test_shared_prompts_are_the_separate_sequences(sp):
    """Degrees that divide the heads, that split query rows (3/1, 14/2) and that copy kv heads."""
    cases = [(4, 2), (3, 1), (14, 2)]
    for heads, got in zip(cases, run_distributed(many, sp, sp, cases)[0]):
        compare(got, formula(heads), 1e-12)


def windows_of(sp, cases, windows):
    return {w: many(sp, cases, window=w) for w in windows}


@pytest.mark.parametrize("world, sp", [(1, 1), (3, 3), *full((2, 2), (4, 4), (4, 2))])
def test_windows_cut_shared_prompts_as_they_cut_separate_sequences(world, sp):
    """Windows that end inside an answer, inside a prompt, at its first token and before it."""
    cases, windows = [(4, 2), (3, 1)], [1, 2, 6, 12, 20, 21, 24, 27, 29, 40]
    for window, results in run_distributed(windows_of, world, sp, cases, windows)[0].items():
        for heads, got in zip(cases, results):
            wanted = formula(heads, window=window)
            floor = [max(float(x.norm()), 1) for x in wanted]  # dq is 0 under a window of 1
            for a, b, size in zip(got, wanted, floor):
                assert float((a - b).norm()) < 1e-12 * size, window


@pytest.mark.parametrize("size", [{}, {"trees": 2, "branches": 1}], ids=["many", "a pair"])
def test_results_are_joined_in_parts(monkeypatch, size):
    """More rows than one part has: of many trees, whose rows have gaps, and of one pair, whose rows are a slice."""
    monkeypatch.setattr("ulysses.parallel.kernels.document.MERGED_ROWS", 3)
    compare(on_ranks(1, (4, 2), **size), formula((4, 2), **size), 1e-12)


class LargestTensor(TorchDispatchMode):
    """Remember the most elements that an operation returned in one tensor."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_memory_does_not_grow_with_branches_times_prefix():
    """60 suffixes of one prompt: one kernel call reads it, and nothing is larger than a few times the rows."""
    length, draw = 4096, torch.Generator().manual_seed(0)
    prompt = torch.arange(length) % WORDS
    shared = sharing([sequence(prompt, 3, draw) for _ in range(60)])
    batch = pack_shard(shared, ParallelMesh())
    rows, plan = batch.num_tokens, batch.attention_plan
    assert rows == length + 3 + 59 * 4 and len(plan.prefix_calls) == 1
    q, k, v = (torch.randn(rows, 1, E, requires_grad=True) for _ in range(3))
    with LargestTensor() as seen:
        UlyssesAttention(None, 1, 1, E)(q, k, v, plan=plan).sum().backward()
    assert seen.numel <= 2 * rows * E


@pytest.mark.parametrize("before, left_out", [
    ([], 0),
    ([Sequence([1], [0])], 0),
    ([Sequence([1], [0], prompt=8, prompt_length=1)], 0),
    ([Sequence([1, 2], [0, 0], prompt=7, prompt_length=2)], 1),
])  # fmt: skip
def test_a_sequence_leaves_out_what_an_earlier_one_holds_and_no_more(before, left_out):
    """Nothing stands before it, or other prompts, or a shorter beginning of its own."""
    later = Sequence([1, 2, 3, 4], [0, 0, 0, 1], prompt=7, prompt_length=3)
    batch = pack_shard([*before, later], ParallelMesh())
    assert batch.num_tokens_shared == left_out
    assert batch.positions[-4 + left_out :].tolist() == list(range(left_out, 4))
    assert batch.targets.tolist()[-2:] == [4, -100] and batch.num_valid == 1


def test_a_prompt_is_no_longer_than_its_sequence():
    with pytest.raises(ValueError, match="prompt_length is 3 but the sequence has 2 tokens"):
        Sequence([1, 2], [0, 1], prompt=0, prompt_length=3)


@pytest.mark.parametrize("rank", [0, 1])
def test_shared_prompts_need_a_causal_mask(rank):
    """Both ranks refuse, though rank 0 has no row of the suffix: a rank that went on would wait for the other."""
    prompt, draw = torch.zeros(100, dtype=torch.int64), torch.Generator().manual_seed(0)
    mesh = simulated_mesh(2, rank, num_heads=1)
    batch = pack_shard(sharing([sequence(prompt, n, draw) for n in (20, 4)]), mesh)
    plan = batch.attention_plan
    assert len(plan.prefix_calls) == rank
    x = torch.randn(plan.local_tokens, 1, E)
    with pytest.raises(ValueError, match="causal mask"):
        UlyssesAttention(None, 1, 1, E)(x, x, x, plan=plan, causal=False)


def every_kernel(sp, heads, head_dim):
    how = {"dtype": torch.bfloat16, "head_dim": head_dim, "longest": 400}
    return {kernel: on_ranks(sp, heads, kernel, **how) for kernel in gpu_kernels()}


@pytest.mark.gpu
@pytest.mark.parametrize("sp, heads", [(1, (4, 2)), (2, (4, 2)), (2, (3, 1))])
def test_every_kernel_of_this_machine_in_bfloat16(sp, heads):
    need_gpus(sp)
    wanted = formula(heads, head_dim=64, longest=400)
    for kernel, got in run_distributed(every_kernel, sp, sp, heads, 64)[0].items():
        print(kernel, end=" ")  # shown with a failure
        compare(got, wanted, 2e-2)
