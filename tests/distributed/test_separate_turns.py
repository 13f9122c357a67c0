"""Turns that a chat template rewrites: one example of shared prompts is trained like a row for each of its turns."""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.engine_case import SHAPE, Case, ListDataset, assert_same_gradients, run_case
from tests.harness import run_distributed
from tests.stage_case import formula
from tests.tiny_tokenizer import CHATML, write_tokenizer
from ulysses.data.chat import ChatTemplate, load_tokenizer
from ulysses.data.encode import DataSettings, encode_records
from ulysses.data.formats import Record
from ulysses.data.messages import Message
from ulysses.parallel.batch import Sequence, share_prefix

TURNS = [("hello", "He greets.", "Good day."), ("2 + 2?", "It is 4.", "4"), ("thanks", "Be kind.", "Any time!")]


def conversation(count: int, own: int | None = None) -> Record:
    """Some turns with thinking, the first of half the weight; `own` trains only one of them, at the end."""
    messages = []
    for place, (question, thinking, answer) in enumerate(TURNS[:count]):
        weight = 0.0 if own not in (None, place) else 1.0 if place else 0.5
        content = f"<think>\n{thinking}\n</think>\n\n{answer}"
        messages += [Message("user", question), Message("assistant", content, weight)]
    return Record([], [messages if own is None else messages[: 2 * own + 2]])


def on_tensors(sequence: Sequence) -> Sequence:
    return Sequence(torch.from_numpy(sequence.tokens), torch.from_numpy(sequence.loss_weights))


@dataclass
class TurnCase(Case):
    """Three conversations, each as one example of several sequences, or as a row for each of its turns."""

    together: bool = True
    shared: bool = True

    def data(self) -> ListDataset:
        counts = (3, 1, 2)
        records = [conversation(count) for count in counts]
        if not self.together:
            records = [conversation(count, own) for count in counts for own in range(count)]
        with TemporaryDirectory() as folder:
            tokenizer = load_tokenizer(write_tokenizer(Path(folder), CHATML), eos_token="<|im_end|>")
        template = ChatTemplate(tokenizer, "qwen3")
        found = encode_records(records, "sequence", template, DataSettings(400), [])
        examples = [[on_tensors(s) for s in example.sequences] for example in found]
        return ListDataset("sequence", [tuple(share_prefix(e) if self.shared else e) for e in examples])


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2)])
def test_loss_and_gradients_are_those_of_rows_of_their_own(world, sp) -> None:
    shape = replace(SHAPE, vocab_size=300)
    case = TurnCase("sft", sp=sp, shape=shape, examples=3, budget=2000)
    rows = replace(case, together=False, examples=6)
    loss, exact, _ = formula(rows)
    whole, shared = (
        run_distributed(run_case, world, replace(case, shared=shares), with_zero=True)[0] for shares in (False, True)
    )
    assert shared[0][0]["loss"] == pytest.approx(loss, rel=1e-6)
    assert shared[0][0]["loss"] == pytest.approx(whole[0][0]["loss"], rel=1e-6)
    assert_same_gradients(shared[1][0], exact)
    assert shared[0][0]["tokens_shared"] > 100
    sequences = list(chain.from_iterable(example for example in rows.data().examples))
    assert shared[0][0]["tokens"] + shared[0][0]["tokens_shared"] == sum(len(s.tokens) for s in sequences)
