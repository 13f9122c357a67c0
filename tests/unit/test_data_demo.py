"""The demo data: equal lengths on both sides, held-out questions unseen, one token per word."""

import json

import numpy as np
import pytest

from examples.demo_data import write_demo
from tests.data_case import open_data
from ulysses.config.schema import DataSection
from ulysses.data.read.sources import Source
from ulysses.data.read.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder / "a")
    return folder


@pytest.mark.parametrize("split", ["train", "eval"])
def test_chosen_and_rejected_have_the_same_lengths(demo, split):
    tokenizer = load_tokenizer(demo / "a/tokenizer")
    source = Source(str(demo / f"a/dpo_{split}.jsonl"))
    data = DataSection(max_length=128, cache=str(demo / "c"))
    dataset = open_data([source], "pair", tokenizer, data)
    chosen, rejected = np.sort(dataset.sequence_lengths, axis=0).T
    assert (chosen == rejected).all() and len(set(chosen)) > 3 and len(dataset) >= 200
    assert dataset.report.dropped == {} and dataset.report.notes == {}


def test_held_out_questions_are_new(demo):
    train, held_out = (
        {
            json.loads(line)["messages"][0]["content"]
            for stage in ("sft", "kto", "ppo")
            for line in open(demo / f"a/{stage}_{split}.jsonl")
        }
        for split in ("train", "eval")
    )
    assert len(held_out) == 192 and not train & held_out
