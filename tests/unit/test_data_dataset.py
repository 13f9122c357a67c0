"""Tokenised datasets: weights, truncation, documents, cache keys, memory maps, inspection."""

import os
from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.tiny_tokenizer import CHATML, write_tokenizer
from ulysses.data import DataError
from ulysses.data.read.chat import load_tokenizer
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.preview import preview_examples

USER, BOT = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}


def talk(*messages):
    """The row of a conversation; messages are taken as they are, and texts are answers."""
    return {"messages": [{**BOT, "content": m} if isinstance(m, str) else m for m in messages]}


QUESTION = talk(USER, BOT)


@pytest.fixture
def trained(tokenizer):
    """A function from a sequence to the text of its trained tokens."""
    return lambda sequence: tokenizer.decode(
        [int(t) for t, w in zip(sequence.tokens, sequence.loss_weights) if w]
    )


def test_sft_trains_every_answer_or_the_last_or_all(trained, open_rows):
    row = talk(USER, BOT, USER, BOT | {"content": "last", "weight": 0.25})
    sequence = open_rows([row], "sequence")[0].sequences[0]
    assert trained(sequence) == "answer<|im_end|>last<|im_end|>"
    assert set(np.unique(sequence.loss_weights)) == {0.0, 1.0, 0.25}
    assert open_rows([row], "sequence", train_on="all")[0].sequences[0].loss_weights.all()
    history = {"instruction": "i", "output": "o", "history": [["u", "a"]]}
    completion = {"prompt": [USER, BOT, USER], "completion": [BOT]}
    for given, train_on, text in (
        (row, "last", "last<|im_end|>"),
        (history, "assistant", "a<|im_end|>o<|im_end|>"),
        (completion, "assistant", "answer<|im_end|>"),
    ):
        (example,) = open_rows([given], "sequence", train_on=train_on)
        assert trained(example.sequences[0]) == text


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", ["sequence", "text"])
def test_a_fraction_of_the_rows_is_held_out(tokenizer, open_rows, kind, share):
    """Each row is on one side, by its place alone, and every stretch and every second row have the share."""
    texts = [f"row {i:03}" for i in range(200)]
    rows = [{"prompt": "p", "completion": text, "text": text} for text in texts]
    sides = [open_rows(rows, kind, eval_fraction=share, held_out=out) for out in (False, True)]
    found = [
        "".join(tokenizer.decode(d[i].sequences[0].tokens) for i in range(len(d)))
        for d in sides
    ]
    train, held = ([i for i, text in enumerate(texts) if text in side] for side in found)
    assert sorted(train + held) == [*range(200)]
    for part in (range(200), range(50), range(150, 200), range(0, 200, 2), range(0, 200, 5)):
        assert abs(len({*held} & {*part}) - share * len(part)) <= 2.5
    assert f"in the other part of data.eval_fraction: {len(held)}" in str(sides[0].report)


def thought(thinking, answer, **more):
    return BOT | {"content": f"<think>\n{thinking}\n</think>\n\n{answer}", **more}


def test_turns_that_the_template_rewrites_are_sequences_of_one_example(trained, open_rows):
    """The same tokens and weights as rows of their own, with the history that inference will see."""
    said = thought("x", "one"), thought("y", "two", weight=0.5), thought("z", "three")
    messages = [message for answer in said for message in (USER, answer)]
    rows = [talk(*messages), talk(*messages[:2])]
    dataset = open_rows(rows, "sequence", template="qwen3")
    assert len(dataset) == 2 and [len(example.sequences) for example in dataset] == [3, 1]
    ended = "conversations whose turns are trained separately"
    assert dataset.report.notes == {ended: 1} and f"{ended}: 1 (" in str(dataset.report)
    untrained = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]
    own = [talk(*untrained[:i], messages[i]) for i in (5, 3, 1)]
    alone = open_rows(own, "sequence", template="qwen3", name="own.jsonl")
    for sequence, row in zip(dataset[0].sequences, alone, strict=True):
        (one,) = row.sequences
        assert_array_equal(sequence.tokens, one.tokens)
        assert_array_equal(sequence.loss_weights, one.loss_weights)
    assert trained(dataset[0].sequences[1]) == "<think>\ny\n</think>\n\ntwo<|im_end|>"

    # the history of a later turn holds the prompts of earlier ones, which are computed once
    shared = TokenizedDataset(dataset.folder, share_prompts=True)
    for whole, branch in zip(dataset[0].sequences[1:], shared[0].sequences[1:]):
        cut = branch.prefix_length
        assert cut == int(np.flatnonzero(whole.loss_weights)[0]) - 1
        assert_array_equal(dataset[0].sequences[0].tokens[:cut], whole.tokens[:cut])

    together = open_rows(rows, "sequence", template="qwen3", turns="together")
    assert len(together) == 1 and list(together.report.dropped.values()) == [1]
    last = open_rows(rows[:1], "sequence", template="qwen3", train_on="last")[0].sequences[0]
    assert_array_equal(last.tokens, dataset[0].sequences[0].tokens)
    assert len(open_rows([talk(*[USER, BOT] * 3)], "sequence")[0].sequences) == 1


@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_turns_after_the_last_answer_are_counted_where_all_is_trained(open_rows, train_on):
    rows = [talk(USER, BOT, USER), QUESTION]
    dataset = open_rows(rows, "sequence", train_on=train_on)
    left = {"turns after the last answer left out": 1} if train_on == "all" else {}
    assert dataset.report.notes == left


def test_a_turn_that_is_too_long_is_left_out_alone(trained, open_rows):
    row = talk(USER, thought("x" * 200, "one"), USER, thought("y", "two"))
    dataset = open_rows([row], "sequence", 150, template="qwen3", truncation="drop")
    assert [trained(s) for s in dataset[0].sequences] == [
        "<think>\ny\n</think>\n\ntwo<|im_end|>"
    ]
    assert dataset.report.notes == {"turns left out, longer than max_length": 1,
                                    "conversations whose turns are trained separately": 1}  # fmt: skip
    assert not dataset.report.dropped


@pytest.mark.parametrize("kind", ["pair", "unpaired", "prompt"])
def test_prompts_of_preferences_are_those_of_inference(trained, tokenizer, open_rows, kind):
    """Earlier thinking is gone, the answer's own is trained."""
    said = [thought("y", "two")]
    row = {"prompt": [USER, thought("x", "one"), USER]}
    row |= (
        {"chosen": said, "rejected": "bad"}
        if kind == "pair"
        else {"completion": said, "label": True}
    )
    (example,) = open_rows([row], kind, template="qwen3")
    head = int(example.columns["prompt_length"])
    assert tokenizer.decode(example.sequences[0].tokens[:head]) == (
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nquestion"
        "<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip
    wanted = {"pair": ["<think>\ny\n</think>\n\ntwo<|im_end|>", "<think>\n\n</think>\n\nbad<|im_end|>"],
              "unpaired": ["<think>\ny\n</think>\n\ntwo<|im_end|>"], "prompt": [""]}  # fmt: skip
    assert [trained(sequence) for sequence in example.sequences] == wanted[kind]


def test_what_the_template_does_not_show_is_refused_or_counted(open_rows):
    bad = talk(USER, {**BOT, "reasoning_content": "t"})
    sentence = "row 2 has a message with the key 'reasoning_content', which the chat template does not read; remove it"
    with pytest.raises(DataError, match=sentence):
        open_rows([QUESTION, bad], "sequence")
    dataset = open_rows([QUESTION, bad, bad], "sequence", bad_rows="drop")
    assert len(dataset) == 1 and list(dataset.report.dropped.values()) == [2]
    assert len(open_rows([bad], "sequence", template="qwen3")) == 1


def test_pairs_share_their_prompt_tokens(trained, open_rows):
    row = {"prompt": [USER, BOT, USER], "chosen": "good", "rejected": "not so good"}
    dataset = open_rows([row] * 2, "pair")
    example = dataset[1]
    head = int(example.columns["prompt_length"])
    chosen, rejected = example.sequences
    assert_array_equal(chosen.tokens[:head], rejected.tokens[:head])
    assert trained(chosen) == "good<|im_end|>" and trained(rejected) == "not so good<|im_end|>"
    assert not chosen.loss_weights[:head].any() and chosen.loss_weights[head:].all()
    assert dataset.lengths[1] == len(chosen.tokens) + len(rejected.tokens)
    flat = np.fromfile(dataset.folder / "tokens.int32", np.int32)
    assert len(flat) == dataset.lengths.sum()
    # sequences lie end to end, which the reference's values rely on
    assert_array_equal(flat[-len(rejected.tokens) :], rejected.tokens)
    assert isinstance(chosen.tokens, np.memmap)


@pytest.mark.parametrize(
    "truncation, max_length", [("keep_start", 90), ("keep_end", 24), ("keep_end", 90)]
)
def test_truncated_pairs_stay_trainable_and_keep_one_prompt(open_rows, truncation, max_length):
    sizes = product((1, 30, 200), (1, 40, 300), (2, 77))
    rows = [{"prompt": "p" * p, "chosen": "c" * c, "rejected": "r" * r} for p, c, r in sizes]
    dataset = open_rows(rows, "pair", max_length, truncation=truncation)
    for example in dataset:
        head = int(example.columns["prompt_length"])
        chosen, rejected = example.sequences
        assert_array_equal(chosen.tokens[:head], rejected.tokens[:head])
        for sequence in example.sequences:
            assert len(sequence.tokens) <= max_length and sequence.loss_weights[1:].any()
    lost = {"no trained token is left after truncation": 6}
    assert dataset.report.dropped == (lost if truncation == "keep_start" else {})
    assert len(dataset) + sum(dataset.report.dropped.values()) == len(rows)


def test_sft_truncation_policies(trained, open_rows):
    rows = [QUESTION, talk(USER, "a" * 100), talk({**USER, "content": "q" * 100}, BOT)]
    start = open_rows(rows, "sequence", 60)
    assert len(start) == 2 and start.lengths[1] == 60
    assert start.report.dropped == {"no trained token is left after truncation": 1}
    assert start.report.notes == {"truncated": 1}
    assert "rows.jsonl row 3" in str(start.report)
    end = open_rows(rows, "sequence", 60, truncation="keep_end")
    assert len(end) == 3 and trained(end[2].sequences[0]) == "answer<|im_end|>"
    assert end.report.notes == {"truncated": 2}
    drop = open_rows(rows, "sequence", 60, truncation="drop")
    assert len(drop) == 1 and drop.report.dropped == {"longer than max_length": 2}
    sentence = r"rows.jsonl row 2 has \d+ tokens but data.max_length is 60; raise it"
    with pytest.raises(DataError, match=sentence):
        open_rows(rows, "sequence", 60, truncation="error")
    with pytest.raises(DataError, match=r"no example is left of .*rows.jsonl"):
        open_rows(rows[2:], "sequence", 40)


def test_keep_end_keeps_bos(tmp_path, open_rows):
    bos = "<|begin_of_text|>"
    folder = write_tokenizer(tmp_path / "t", bos=bos)
    tokenizer = load_tokenizer(folder, eos_token="<|eot_id|>", bos_token=bos)
    rows = [{"prompt": "p" * 100, "chosen": "good", "rejected": "bad"}]
    more = {"template": "llama3", "tokenizer": tokenizer, "truncation": "keep_end"}
    for kind in ("pair", "prompt"):
        for sequence in open_rows(rows, kind, 40, **more)[0].sequences:
            text = tokenizer.decode(sequence.tokens)
            assert text.startswith(bos) and text.count(bos) == 1
            assert "assistant<|end_header_id|>\n\n" in text


@pytest.mark.parametrize("max_length", [7, 64, 4096])
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_documents_are_split_without_losing_a_token(tmp_path, open_rows, max_length, bos):
    folder = write_tokenizer(tmp_path / "t", CHATML, bos=bos)
    special = {"bos_token": bos} if bos else {}
    tokenizer = load_tokenizer(folder, eos_token="<|im_end|>", **special)
    texts = ["a", "hello <|im_end|> there", "x" * 500, "line\n" * 200]
    dataset = open_rows([{"text": t} for t in texts], "text", max_length, tokenizer=tokenizer)
    documents, current = [], []
    for example in dataset:
        tokens = example.sequences[0].tokens.tolist()
        assert 2 <= len(tokens) <= max_length
        assert np.asarray(example.sequences[0].loss_weights).all()
        # overlap: the last token is the next piece's first context
        assert not current or current[-1] == tokens[0]
        current += tokens[1:] if current else tokens
        if tokens[-1] == tokenizer.eos_token_id:
            documents.append(current)
            current = []
    head = [tokenizer.bos_token_id] if bos else []
    assert [d[: len(head)] for d in documents] == [head] * 4
    assert [tokenizer.decode(d[len(head) : -1]) for d in documents] == texts
    # the text's own <|im_end|> stays text
    assert all(d.count(tokenizer.eos_token_id) == 1 for d in documents)


def test_unpaired_and_mismatched_completions(trained, tokenizer, open_rows):
    rows = [
        {"prompt": f"p{i // 2}", "completion": f"c{i}" * 5, "label": i % 2 == 0}
        for i in range(6)
    ]
    dataset = open_rows(rows, "unpaired", 50)
    assert dataset.columns["label"].tolist() == [1, 0, 1, 0, 1, 0]
    assert dataset.columns["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2]
    mixed = dataset.mismatch(0, 3)
    text = tokenizer.decode(mixed.tokens.tolist())
    assert "p0" in text and "c3c3" in text and "c0" not in text
    assert trained(mixed) == "c3" * 5 + "<|im_end|>"
    dataset.max_length = 25
    assert len(mixed.tokens) == 32 and len(dataset.mismatch(0, 3).tokens) == 25


def test_prompts_end_with_the_opened_turn_and_keep_their_row(tokenizer, open_rows):
    asked = {"What?": "#### 18", "Who is 漢?": "#### 3"}
    rows = [{"question": question, "answer": answer} for question, answer in asked.items()]
    dataset = open_rows(rows, "prompt")
    text = tokenizer.decode(dataset[1].sequences[0].tokens.tolist())
    assert text.endswith("Who is 漢?<|im_end|>\n<|im_start|>assistant\n")
    assert [dataset.row(i) for i in range(2)] == rows


def test_cache_is_keyed_by_content(tmp_path, open_rows):
    first = open_rows([QUESTION], "sequence")
    stamp = (first.folder / "tokens.int32").stat().st_mtime_ns
    again = open_rows([QUESTION], "sequence", name="other_name.jsonl")
    assert again.folder == first.folder and str(again.report) == str(first.report)
    assert (first.folder / "tokens.int32").stat().st_mtime_ns == stamp
    others = [
        open_rows([QUESTION, QUESTION], "sequence"),
        open_rows([QUESTION], "sequence", 400),
        *(
            open_rows([QUESTION], "sequence", **more)
            for more in ({"train_on": "all"}, {"template": "qwen2.5"})
        ),
    ]
    assert len({d.fingerprint for d in [first, *others]}) == 5
    # and no file of a writer is left
    assert len(os.listdir(tmp_path / "cache" / "tokenized")) == 5


def test_unwritable_cache_is_one_sentence(tmp_path, open_rows):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        DataError, match=r"the data cache .* cannot be written: .*set data.cache"
    ):
        open_rows([QUESTION], "sequence")


def test_inspection_shows_the_trained_tokens(tokenizer, open_rows, capsys):
    preview_examples(open_rows([QUESTION], "sequence"), tokenizer, 5)
    text = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[answer<|im_end|>]]\n" in text
    assert "7 trained" in text and "read 1 rows, kept 1 examples" in text
    pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
    preview_examples(open_rows([pair], "pair"), tokenizer, 1)
    text = capsys.readouterr().out
    assert "(chosen)" in text and "[[bad<|im_end|>]]" in text


@pytest.mark.parametrize("harm", ["digests.json", "tokens.int32", "cut"])
def test_a_damaged_cache_is_made_again_and_said(harm, tmp_path, open_rows, capsys):
    """Whether the list of digests, a file or a part of one is gone; and the second time it is as good as new."""
    rows = [QUESTION, talk(USER, BOT, USER, BOT)]
    before = open_rows(rows, "sequence")
    expected = [example.sequences[0].tokens.tolist() for example in before]
    file = before.folder / ("tokens.int32" if harm == "cut" else harm)
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    else:
        file.unlink()
    for said in ("were damaged", ""):
        found = open_rows(rows, "sequence")
        assert [example.sequences[0].tokens.tolist() for example in found] == expected
        assert (said in capsys.readouterr().out) if said else not capsys.readouterr().out
