"""Steps that are too short for the GPU to wait for their launches are given whole sequences, for CUDA graphs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.published import architecture
from tests.data_case import content
from tests.engine_case import ListDataset, dataset
from ulysses.config.command_line import check
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence, pack_shard, shared_prompts
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.case import GIB, Case, Machine, plain_model
from ulysses.plan.memory_choice import choose
from ulysses.rl.rollout import Completion, Rollout
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


def served(dataset, budget=10_000, **options):
    loader = StepLoader(dataset, 6, tokens_per_microbatch=budget, seed=1, **options)
    return loader.step(0, 0)


def shared_tokens(steps):
    """The tokens that packs of these micro-batches leave out."""
    packs = ([s for example in few for s in example.sequences] for few in steps)
    return sum(pack_shard(pack, ParallelMesh()).num_tokens_shared for pack in packs)


def test_a_short_step_shares_no_prompt(pairs):
    whole, shared = pairs
    short = served(shared, launched_tokens=1e9)
    found, expected = (
        [[(e.index, e.columns, *map(content, e.sequences)) for e in few] for few in steps]
        for steps in (short, served(whole))
    )
    assert found == expected
    for few in short:
        pack = pack_shard([s for example in few for s in example.sequences], ParallelMesh())
        assert pack.num_tokens_shared == 0 and not pack.attention_plan.prefix_calls


@pytest.mark.parametrize("options", [
    {},  # nothing says that the host is slow
    {"launched_tokens": 100.0},  # computing the prompts again takes longer than the launches
    {"launched_tokens": 1e9, "budget": "shared"},  # a whole pair does not fit
])  # fmt: skip
def test_other_steps_share_them(pairs, options):
    whole, shared = pairs
    options = options.copy()
    if options.pop("budget", ""):
        options["budget"] = int(shared.lengths.max())
        assert options["budget"] < whole.lengths.max()
    found = served(shared, **options)
    assert shared_tokens(found)


def test_answers_of_a_rollout_are_restored_too():
    prompts = [torch.arange(5), torch.arange(7)]
    answers = [Completion([n, n + 1], [0.0, 0.0], True) for n in range(4)]
    rollout = Rollout.of(0, prompts, answers, budget=100)
    whole = Rollout.of(0, prompts, answers)
    asked = ListDataset("prompt", [(Sequence(prompt, prompt),) for prompt in prompts])
    loader = StepLoader(asked, 2, tokens_per_microbatch=100, launched_tokens=1e9)
    steps = loader.micro_batches(rollout, [0, 2])
    found = [content(s) for few in steps for e in few for s in e.sequences]
    assert found == [content(whole[n].sequences[0]) for n in range(4)]


def test_only_graphs_are_worth_it():
    gpu = Machine(1, 139.8 * GIB)
    small = plain_model(architecture("qwen2.5-0.5b"))
    plan = choose(Case(small, gpu, 8192))
    assert plan.graphs and 1e4 < plan.launched_tokens < 1e6
    assert choose(Case(small, Machine(1, float("inf")), 8192)).launched_tokens == 0
    large = plain_model(architecture("llama3-8b"))
    assert choose(Case(large, gpu, 65536)).launched_tokens == 0


def test_answers_to_one_prompt_share_it_where_that_pays():
    """KTO's rows, which meet in a micro-batch by chance, and its mismatched sequences."""
    data = dataset("kto")
    for launched, shares in ((0.0, True), (1e9, False)):
        how = {"tokens_per_microbatch": 10_000, "launched_tokens": launched}
        loader = StepLoader(data, len(data), **how)
        assert bool(shared_tokens(loader.step(0, 0))) == shares
        stage = KtoStage(check({"stage": "kto"}), SimpleNamespace(device=CPU), ParallelMesh())
        (mismatched,) = stage.read(loader, 0).looked_at
        assert bool(mismatched.num_tokens_shared) == shares
