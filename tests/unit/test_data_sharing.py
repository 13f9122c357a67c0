"""Data whose answers share their prompt: what is left out, what is counted, and what the reader is shown."""

import numpy as np
import pytest

from tests.data_case import content
from ulysses.parallel.batch import shared_prompts

PAIRS = [
    {"prompt": "a prompt of some length", "chosen": "good", "rejected": "not good"},
    {"prompt": "p", "chosen": "same start, one", "rejected": "same start, two"},
]
LIST = {"prompt": "rank these", "completions": ["x", "better", "x y"], "scores": [1, 3, 1]}


@pytest.fixture
def opened(open_rows):
    return lambda kind, share_prompts: open_rows(
        [*PAIRS, LIST], kind, share_prompts=share_prompts
    )


@pytest.mark.parametrize("kind", ["pair", "ranked"])
def test_branches_leave_out_the_prompt_and_nothing_else(opened, kind):
    whole, shared = opened(kind, False), opened(kind, True)
    assert len(whole) == len(shared) == (4 if kind == "pair" else 3)
    for given, trees in zip(whole, shared):
        first = given.sequences[0]
        for place, (s, tree) in enumerate(zip(given.sequences, trees.sequences, strict=True)):
            length = int(given.columns["prompt_length"])
            before, cut = shared_prompts(trees.sequences)[place]
            assert (before, cut) == ((place - 1, length - 1) if place else (0, 0))
            assert not s.loss_weights[: cut + 1].any()
            assert list(first.tokens[:cut]) == list(s.tokens[:cut])
            assert content(tree) == content(s) and s.prompt is None
    assert (whole.lengths - shared.lengths).tolist() == shared.prefix_lengths.sum(1).tolist()
    saved = shared.prefix_lengths.sum() / whole.lengths.sum()
    assert f"{saved:.1%} of the tokens are prompts that another answer has" in str(
        shared.report
    )
    assert (
        whole.fingerprint != shared.fingerprint
    )  # cached log-probabilities have the layout of their dataset


def test_a_ranked_list_is_one_example_with_its_ranks(opened):
    dataset = opened("ranked", True)
    found = [[s.columns["rank"] for s in example.sequences] for example in dataset]
    assert found == [[0, 1], [0, 1], [1, 0, 1]]
    assert (
        dataset.sequence_lengths.shape == (3, 3)
        and np.count_nonzero(dataset.sequence_lengths) == 7
    )
