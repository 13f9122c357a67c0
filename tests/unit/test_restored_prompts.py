"""Layers that run as CUDA graphs are given whole sequences; all others share their prompts."""

from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.arch import architecture
from tests.data_case import content
from ulysses.config.command_line import check
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.options import stage_of
from ulysses.parallel.batch import pack_shard, shared_prompts
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.hardware import GIB, Machine
from ulysses.plan.planner import choose, run_question
from ulysses.stages.kto import KtoStage

CPU = torch.device("cpu")
WORDS = "lamp", "shelf", "the red box in the hall", "garden"
ROWS = [
    {"prompt": f"Where is the key of room {n}?", "chosen": WORDS[n % 4], "rejected": "Not here"}
    for n in range(6)
]


@pytest.fixture
def pairs(open_rows):
    """The same pairs with whole and with shared prompts, and a column of their tokens each."""
    whole = open_rows(ROWS, "pair")
    shared = TokenizedDataset(whole.folder, share_prompts=True)
    # what a model would say of a token depends on the tokens before it alone
    values = [np.cumsum(s.tokens) for i in range(len(whole)) for s in whole[i].sequences]
    kept = [
        x[left_out:]
        for i in range(len(whole))
        for (_, left_out), x in zip(shared_prompts(shared[i].sequences), values[2 * i :])
    ]
    return (
        whole.with_column("sums", np.concatenate(values)),
        shared.with_column("sums", np.concatenate(kept)),
    )


def served(dataset, budget=10_000):
    return StepLoader(dataset, 6, tokens_per_microbatch=budget, seed=1).step(0, 0)


def shared_tokens(steps):
    """The tokens that packs of these micro-batches leave out."""
    packs = ([s for example in few for s in example.sequences] for few in steps)
    return sum(pack_shard(pack, ParallelMesh()).num_tokens_shared for pack in packs)


def test_data_apart_are_those_that_never_shared_a_prompt(pairs):
    whole, shared = pairs
    found, expected = (
        [
            [(e.index, e.columns, *map(content, e.sequences)) for e in few]
            for few in served(data)
        ]
        for data in (shared.apart, whole)
    )
    assert found == expected and (shared.apart.lengths == whole.lengths).all()
    for few in served(shared.apart):
        pack = pack_shard([s for example in few for s in example.sequences], ParallelMesh())
        assert pack.num_tokens_shared == 0 and not pack.attention_plan.prefix_calls
    assert shared_tokens(served(shared))


def test_prompts_are_shared_unless_the_layers_run_as_cuda_graphs(pairs):
    """A micro-batch set by hand that holds no whole pair leaves no choice, and CPUs have no graphs."""
    whole, shared = pairs
    longest, gpu = int(shared.lengths.max()), Machine(1, 139.8 * GIB)
    assert longest < whole.lengths.max()

    def planned(machine=gpu, arch="qwen2.5-0.5b", budget="auto", data=shared):
        config = check({
            "stage": "dpo", "batch": {"tokens_per_microbatch": budget, "examples": 6},
            "model": {"arch": arch, "init": "random", "dtype": "bfloat16"},
            "data": {"train": ["none.jsonl"]},
        })  # fmt: skip
        question = run_question(stage_of(config), architecture(arch), machine, data)
        tokens = (data.lengths if question.shares else data.apart.lengths).max()
        assert question.tokens_per_microbatch >= tokens
        plan = choose(question)
        return plan.graphs, question.shares

    assert planned() == planned(data=whole) == (True, False)
    assert planned(budget=longest) == planned(Machine(1, inf)) == (False, True)
    assert planned(arch="qwen3.5-0.8b") == (False, True)  # linear attention has no graphs
    assert planned(arch="qwen3.5-0.8b", data=whole) == (False, False)


def test_answers_to_one_prompt_share_it_unless_the_data_are_apart(open_rows):
    """KTO's rows, which meet in a micro-batch by chance, and its mismatched sequences."""
    rows = [
        {"prompt": f"Say {n % 3}", "completion": word, "label": n > 2}
        for n, word in enumerate(WORDS * 2)
    ]
    folder = open_rows(rows, "unpaired").folder
    shared = TokenizedDataset(folder, max_length=64, share_prompts=True)
    for data, shares in ((shared, True), (shared.apart, False)):
        loader = StepLoader(data, len(data), tokens_per_microbatch=10_000)
        assert bool(shared_tokens(loader.step(0, 0))) == shares
        stage = KtoStage(check({"stage": "kto"}), SimpleNamespace(device=CPU), ParallelMesh())
        (mismatched,) = stage.read(loader, 0).looked_at
        assert bool(mismatched.num_tokens_shared) == shares
