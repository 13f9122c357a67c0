"""Tokenised datasets: weights, truncation, documents, cache keys, memory maps, inspection."""

import gzip
import json
import os
import shutil
from functools import partial
from itertools import product

import numpy as np
import pytest

from tests.data_case import content
from tests.tiny_tokenizer import LLAMA3, made_tokenizer
from ulysses.data import DataError
from ulysses.data.serve.dataset import TokenizedDataset, preview_examples
from ulysses.parallel.batch import shared_prompts

USER, BOT = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
CHAT = {"messages": [USER, BOT]}


def thought(thinking, answer, **more):
    content = f"<think>\n{thinking}\n</think>\n\n{answer}"
    return {"role": "assistant", "content": content, **more}


def only(dataset):
    """The one sequence of a dataset's first example."""
    (sequence,) = dataset[0].sequences
    return sequence


def pair_of(example):
    """The length of a pair's prompt and both sequences, which begin with it."""
    head, (chosen, rejected) = int(example.columns["prompt_length"]), example.sequences
    assert list(chosen.tokens[:head]) == list(rejected.tokens[:head])
    return head, chosen, rejected


SAID = "<think>\ny\n</think>\n\ntwo<|im_end|>"


@pytest.fixture
def trained(tokenizer):
    """A function from a sequence to the text of its trained tokens."""
    return lambda sequence: tokenizer.decode(
        [int(t) for t, w in zip(sequence.tokens, sequence.loss_weights) if w]
    )


def test_sft_trains_every_answer_or_the_last_or_all(trained, open_rows):
    last = {"role": "assistant", "content": "last", "weight": 0.25}
    row = {"messages": [USER, BOT, USER, last]}
    history = {"instruction": "i", "output": "o", "history": [["u", "a"]]}
    completion = {"prompt": [USER, BOT, USER], "completion": [BOT]}
    for given, train_on, text in (
        (row, "assistant", "answer<|im_end|>last<|im_end|>"),
        (row, "last", "last<|im_end|>"),
        (history, "assistant", "a<|im_end|>o<|im_end|>"),
        (completion, "assistant", "answer<|im_end|>"),
    ):
        assert trained(only(open_rows([given], train_on=train_on))) == text
    weights = only(open_rows([row])).loss_weights
    assert set(np.unique(weights)) == {0.0, 1.0, 0.25}
    whole = open_rows([row], train_on="all")
    assert only(whole).loss_weights.all()
    assert whole.report.notes == {"weights of answers not read, data.train_on is all": 1}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", ["sequence", "text"])
def test_a_fraction_of_the_rows_is_held_out(tokenizer, open_rows, kind, share):
    """Each row is on one side, by its place alone, and every stretch and every second row have the share."""
    names = [f"row {i:03}" for i in range(200)]
    rows = [{"prompt": "p", "completion": name, "text": name} for name in names]

    def side(held_out):
        data = open_rows(rows, kind, eval_fraction=share, held_out=held_out)
        text = "".join(tokenizer.decode(example.sequences[0].tokens) for example in data)
        return {i for i, name in enumerate(names) if name in text}, str(data.report)

    (train, report), (held, _) = side(False), side(True)
    assert sorted([*train, *held]) == [*range(200)]
    for part in (range(200), range(50), range(150, 200), range(0, 200, 2), range(0, 200, 5)):
        assert abs(len(held & {*part}) - share * len(part)) <= 2.5
    assert f"in the other part of data.eval_fraction: {len(held)}" in report


def test_turns_that_the_template_rewrites_are_sequences_of_one_example(trained, open_rows):
    """The same tokens and weights as rows of their own, with the history that inference will see."""
    said = thought("x", "one"), thought("y", "two", weight=0.5), thought("z", "three")
    messages = [message for answer in said for message in (USER, answer)]
    rows = [{"messages": messages}, {"messages": messages[:2]}]
    dataset = open_rows(rows, template="qwen3")
    whole = dataset[0].sequences
    assert [len(example.sequences) for example in dataset] == [3, 1]
    ended = "conversations whose turns are trained separately"
    assert dataset.report.notes == {ended: 1} and f"{ended}: 1 (" in str(dataset.report)
    untrained = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]
    own = [{"messages": [*untrained[:i], messages[i]]} for i in (5, 3, 1)]
    alone = open_rows(own, template="qwen3", name="own.jsonl")
    assert [*map(content, whole)] == [content(*example.sequences) for example in alone]
    assert trained(whole[1]) == SAID

    # the history of a later turn holds the prompts of earlier ones, which are computed once
    shared = TokenizedDataset(dataset.folder, share_prompts=True)[0].sequences
    for place, (before, cut) in enumerate(shared_prompts(shared)[1:], start=1):
        sequence = whole[place]
        assert before == place - 1 and cut == int(np.flatnonzero(sequence.loss_weights)[0]) - 1
        assert list(whole[before].tokens[:cut]) == list(sequence.tokens[:cut])

    last = only(open_rows(rows[:1], template="qwen3", train_on="last"))
    assert content(last) == content(whole[0])
    only(open_rows([{"messages": [USER, BOT] * 3}]))


@pytest.mark.parametrize("train_on, left", [("all", 1), ("assistant", 0)])
def test_turns_after_the_last_answer_are_counted_where_all_is_trained(
    open_rows, train_on, left
):
    dataset = open_rows([{"messages": [USER, BOT, USER]}, CHAT], train_on=train_on)
    assert list(dataset.report.notes) == ["turns after the last answer left out"] * left


def test_a_turn_that_is_too_long_is_left_out_alone(trained, open_rows):
    row = {"messages": [USER, thought("x" * 200, "one"), USER, thought("y", "two")]}
    dataset = open_rows([row], "sequence", 150, template="qwen3", truncation="drop")
    assert trained(only(dataset)) == SAID
    assert dataset.report.notes == {"turns left out, longer than max_length": 1,
                                    "conversations whose turns are trained separately": 1}  # fmt: skip
    assert not dataset.report.dropped


@pytest.mark.parametrize(
    "kind, more, wanted",
    [
        ("pair", {"chosen": [thought("y", "two")], "rejected": "bad"}, [SAID, "<think>\n\n</think>\n\nbad<|im_end|>"]),
        ("unpaired", {"completion": [thought("y", "two")], "label": True}, [SAID]),
        ("prompt", {}, [""]),
    ],
)  # fmt: skip
def test_prompts_of_preferences_are_those_of_inference(
    trained, tokenizer, open_rows, kind, more, wanted
):
    """Earlier thinking is gone, the answer's own is trained."""
    row = {"prompt": [USER, thought("x", "one"), USER], **more}
    (example,) = open_rows([row], kind, template="qwen3")
    head = int(example.columns["prompt_length"])
    assert tokenizer.decode(example.sequences[0].tokens[:head]) == (
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nquestion"
        "<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip
    assert [trained(sequence) for sequence in example.sequences] == wanted


def test_pairs_share_their_prompt_tokens(trained, open_rows):
    row = {"prompt": [USER, BOT, USER], "chosen": "good", "rejected": "not so good"}
    dataset = open_rows([row] * 2, "pair")
    head, chosen, rejected = pair_of(dataset[1])
    assert trained(chosen) == "good<|im_end|>" and trained(rejected) == "not so good<|im_end|>"
    assert not chosen.loss_weights[:head].any() and chosen.loss_weights[head:].all()
    # sequences lie end to end, which the reference's values rely on
    flat = np.fromfile(dataset.folder / "tokens.int32", np.int32).tolist()
    assert flat == [*chosen.tokens, *rejected.tokens] * 2
    assert dataset.lengths.tolist() == [len(flat) // 2] * 2
    assert isinstance(chosen.tokens, np.memmap)


@pytest.mark.parametrize(
    "truncation, max_length, lost", [("keep_start", 90, 6), ("keep_end", 24, 0), ("keep_end", 90, 0)]
)  # fmt: skip
def test_truncated_pairs_stay_trainable_and_keep_one_prompt(
    open_rows, truncation, max_length, lost
):
    rows = [
        {"prompt": "p" * p, "chosen": "c" * c, "rejected": "r" * r}
        for p, c, r in product((1, 30, 200), (1, 40, 300), (2, 77))
    ]
    dataset = open_rows(rows, "pair", max_length, truncation=truncation)
    for example in dataset:
        for sequence in pair_of(example)[1:]:
            assert len(sequence.tokens) <= max_length and sequence.loss_weights[1:].any()
    assert sum(dataset.report.dropped.values()) == lost and len(dataset) + lost == len(rows)


def test_sft_truncation_policies(trained, open_rows):
    long_answer = {"messages": [USER, {**BOT, "content": "a" * 100}]}
    long_question = {"messages": [{**USER, "content": "q" * 100}, BOT]}
    rows = [CHAT, long_answer, long_question]
    cut = partial(open_rows, rows, length=60)
    start = cut()
    assert len(start) == 2 and start.lengths[1] == 60
    assert start.report.dropped == {"no trained token is left after truncation": 1}
    assert start.report.notes == {"truncated": 1}
    assert "rows.jsonl row 3" in str(start.report)
    end = cut(truncation="keep_end")
    assert len(end) == 3 and trained(end[2].sequences[0]) == "answer<|im_end|>"
    assert end.report.notes == {"truncated": 2}
    drop = cut(truncation="drop")
    assert len(drop) == 1 and drop.report.dropped == {"longer than max_length": 2}
    sentence = r"rows.jsonl row 2 has \d+ tokens but data.max_length is 60; raise it"
    with pytest.raises(DataError, match=sentence):
        cut(truncation="error")
    with pytest.raises(DataError, match=r"no example is left of .*rows.jsonl"):
        open_rows(rows[2:], "sequence", 40)


@pytest.mark.parametrize("kind", ["pair", "prompt"])
def test_keep_end_keeps_bos(tmp_path, open_rows, kind):
    tokenizer = made_tokenizer(tmp_path, LLAMA3, "<|eot_id|>", "<|begin_of_text|>")
    rows = [{"prompt": "p" * 100, "chosen": "good", "rejected": "bad"}]
    given = {"template": "llama3", "tokenizer": tokenizer, "truncation": "keep_end"}
    for sequence in open_rows(rows, kind, 40, **given)[0].sequences:
        tokens, bos = list(sequence.tokens), tokenizer.bos_token_id
        assert tokens[0] == bos and tokens.count(bos) == 1
        assert "assistant<|end_header_id|>\n\n" in tokenizer.decode(tokens)


@pytest.mark.parametrize("max_length", [7, 64, 4096])
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_documents_are_split_without_losing_a_token(tmp_path, open_rows, max_length, bos):
    tokenizer = made_tokenizer(tmp_path, bos=bos)
    texts = ["a", "hello <|im_end|> there", "x" * 500, "line\n" * 200]
    dataset = open_rows([{"text": t} for t in texts], "text", max_length, tokenizer=tokenizer)
    documents, current = [], []
    for example in dataset:
        (sequence,) = example.sequences
        tokens = sequence.tokens.tolist()
        assert 2 <= len(tokens) <= max_length and np.all(sequence.loss_weights)
        # the last token is the next piece's first context
        assert current[-1:] in ([], tokens[:1])
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


def test_prompts_keep_their_rows(open_rows):
    rows = [{"question": "What?", "answer": "18"}, {"question": "Who is 漢?", "answer": "3"}]
    dataset = open_rows(rows, "prompt")
    assert [dataset.row(i) for i in range(2)] == rows


def test_cache_is_keyed_by_content(tmp_path, open_rows):
    first = open_rows([CHAT])
    stamp = (file := first.folder / "tokens.int32").stat().st_mtime_ns
    again = open_rows([CHAT], name="other_name.jsonl")
    assert again.folder == first.folder and str(again.report) == str(first.report)
    assert file.stat().st_mtime_ns == stamp
    found = {first.fingerprint, open_rows([CHAT, CHAT]).fingerprint}
    for changes in {"length": 400}, {"train_on": "all"}, {"template": "qwen2.5"}:
        found.add(open_rows([CHAT], **changes).fingerprint)
    assert len(found) == 5
    # and no file of a writer is left
    assert len(os.listdir(tmp_path / "cache/tokenized")) == 5


def test_a_file_under_another_suffix_is_another_source(tmp_path, open_sources):
    packed = gzip.compress(json.dumps({"text": "a"}).encode())
    lengths = []
    for name in ("rows.txt.gz", "rows.jsonl.gz"):
        (tmp_path / name).write_bytes(packed)
        lengths += open_sources(str(tmp_path / name), "text").lengths.tolist()
    assert lengths == [len('{"text": "a"}') + 1, len("a") + 1]


def test_unwritable_cache_is_one_sentence(tmp_path, open_rows):
    (tmp_path / "cache").write_text("a file")
    sentence = r"the data cache .* cannot be written: .*set data.cache"
    with pytest.raises(DataError, match=sentence):
        open_rows([CHAT])


def test_inspection_shows_the_trained_tokens(tokenizer, open_rows, capsys):
    preview_examples(open_rows([CHAT]), tokenizer, 5)
    text = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[answer<|im_end|>]]\n" in text
    assert "7 trained" in text and "read 1 rows, kept 1 examples" in text
    pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
    preview_examples(open_rows([pair], "pair"), tokenizer, 1)
    text = capsys.readouterr().out
    assert "(chosen)" in text and "[[bad<|im_end|>]]" in text


@pytest.mark.parametrize("harm", ["digests.json", "tokens.int32", "cut"])
def test_a_damaged_cache_is_refused_with_the_folder_to_delete(harm, open_rows):
    """Whether the list of digests, a file or a part of one is gone; without the folder it is as good as new."""
    rows = [CHAT, {"messages": [USER, BOT] * 2}]
    before = open_rows(rows)
    expected = [content(*example.sequences) for example in before]
    if harm == "cut":
        os.truncate(before.folder / "tokens.int32", 18)
    else:
        (before.folder / harm).unlink()
    with pytest.raises(
        ValueError, match=f"delete {before.folder} so that all of them are made"
    ):
        open_rows(rows)
    shutil.rmtree(before.folder)
    assert [content(*example.sequences) for example in open_rows(rows)] == expected
