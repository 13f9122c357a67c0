"""The demo data: equal lengths on both sides, held-out questions unseen, one token per word."""

import json

import numpy as np
import pytest

from tests.data_case import open_sources
from tests.e2e.launch import ROOT
from ulysses.data.read.tokenizer import load_tokenizer

DEMO = ROOT / "configs/demo/data"


@pytest.mark.parametrize("split", ["train", "eval"])
def test_chosen_and_rejected_have_the_same_lengths(tmp_path, split):
    tokenizer = load_tokenizer(DEMO / "tokenizer")
    rows, how = str(DEMO / f"dpo_{split}.jsonl"), {"template": "tokenizer"}
    dataset = open_sources(rows, "pair", 128, folder=tmp_path, tokenizer=tokenizer, **how)
    chosen, rejected = np.sort(dataset.sequence_lengths, axis=0).T
    assert (chosen == rejected).all() and len(set(chosen)) > 3 and len(dataset) >= 200
    assert dataset.report.dropped == {} and dataset.report.notes == {}


def test_held_out_questions_are_new():
    train, held_out = (
        {
            json.loads(line)["messages"][0]["content"]
            for stage in ("sft", "kto", "ppo")
            for line in open(DEMO / f"{stage}_{split}.jsonl")
        }
        for split in ("train", "eval")
    )
    assert len(held_out) == 192 and not train & held_out
