"""What a list of sources may say: probabilities and what ends an epoch, prompts, template variables, named sets."""

import numpy as np
import pytest

from tests.tiny_tokenizer import write_rows
from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.read.sources import parse_sources
from ulysses.data.serve.steps import StepLoader
from ulysses.data.serve.tokenise import open_dataset

ASK = {"role": "user", "content": "q"}
SIZES = {"a": 40, "b": 10, "c": 0}


@pytest.fixture
def opened(tmp_path, tokenizer):
    """A function from tables of sources, with their file's name as the path, to the data."""
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name}{i}", "completion": "a", "text": "t"} for i in range(size)]
        none = [{"prompt": "", "completion": "a", "text": ""}]
        write_rows(tmp_path / f"{name}.jsonl", rows or none)

    def opened(*tables, kind="sequence", **settings):
        given = {"cache": str(tmp_path / "cache"), "chat_template": "chatml", "workers": 1}
        data = DataSection(**{**given, **settings})
        found = [{**table, "path": f"{tmp_path / table['path']}.jsonl"} for table in tables]
        return open_dataset(parse_sources(found), kind, tokenizer, data)

    return opened


def loader(data, **more):
    return StepLoader(data, 4, tokens_per_microbatch=10_000, **more)


def mixed(a, b, **more):
    return {"path": "a", "probability": a}, {"path": "b", "probability": b, **more}


@pytest.mark.parametrize(
    "strategy, shares, taken",
    [
        ("first_exhausted", (0.5, 0.5), (10, 10)),  # all of b, and as many of a
        ("all_exhausted", (0.5, 0.5), (40, 40)),  # all of a, and b four times
        ("first_exhausted", (0.9, 0.1), (40, 4)),
        ("all_exhausted", (0.9, 0.1), (90, 10)),
        ("first_exhausted", (0.8, 0.2), (40, 10)),
        ("all_exhausted", (0.8, 0.2), (40, 10)),
    ],
)
def test_an_epoch_has_the_shares_that_are_asked_for(opened, strategy, shares, taken):
    data = opened(*mixed(*shares), stopping_strategy=strategy)
    orders = [loader(data).order(epoch) for epoch in range(3)]
    assert {tuple(np.bincount(data.sources[order])) for order in orders} == {taken}
    for order in orders:
        copies = np.bincount(order, minlength=50)
        for own, count in ((copies[:40], taken[0]), (copies[40:], taken[1])):
            assert {*own} <= {count // len(own), -(-count // len(own))}
    if taken[0] % 40 or taken[1] % 10:  # another part in each epoch
        assert not np.array_equal(*map(np.sort, orders[:2]))
    alone = [loader(data).indices(1, k) for k in range(4)]
    for groups in (2, 4):
        each = [loader(data, data_parallel_size=groups, dp_rank=r) for r in range(groups)]
        for k, indices in enumerate(alone):
            found = [e for own in each for batch in own.step(1, k) for e in batch]
            assert sorted(e.index for e in found if len(e.sequences[0].tokens)) == sorted(
                indices
            )


@pytest.mark.parametrize(
    "tables, sentence",
    [
        (mixed(0.5, 0.4), r"have the probabilities \[0.5, 0.4\]; give each of them one, with the sum 1 and no weight"),
        (mixed(0.5, None), r"have the probabilities \[0.5, 0\]; give"),
        (mixed(0.5, 0.5, weight=2.0), "give each of them one, with the sum 1 and no weight"),
        (mixed(1.5, 0.5), "probability: Input should be less than or equal to 1"),
        (mixed(0.0, 1.0), "probability: Input should be greater than 0"),
        (({"path": "a", "name": "x/y"},), "name: String should match pattern"),
        (({"path": "a", "system": 3},), "system: Input should be a valid string"),
        (({"path": "a", "chat_template_kwargs": "x"},), "chat_template_kwargs: Input should be a valid dict"),
        (({"path": "a", "chat_template_kwargs": {"enable_thinking": False}},),
         "chat_template_kwargs of .*a.jsonl sets 'enable_thinking', which the chat template does not read; remove it"),
        (({"path": "a"}, {"path": "c", "name": "x"}), "no example is left of .*c.jsonl, which has a"),
    ],
)  # fmt: skip
def test_what_a_source_cannot_mean_is_refused(opened, tables, sentence):
    with pytest.raises(DataError, match=sentence):
        opened(*tables)


@pytest.mark.parametrize("more", [{"system": "s"}, {"chat_template_kwargs": {"a": 1}}])
def test_documents_have_no_conversations(opened, more):
    with pytest.raises(DataError, match="which documents do not use; remove them"):
        opened({"path": "a", **more}, kind="text")


def test_variables_of_the_run_the_source_and_the_row(tmp_path, tokenizer, opened):
    """The nearest one holds; a null is none. What is not set leaves the tokens where they were."""
    of_rows = {}, None, *({"enable_thinking": value} for value in (None, True, False))
    rows = [
        {"prompt": [ASK], "completion": "a", "chat_template_kwargs": own} for own in of_rows
    ]
    write_rows(tmp_path / "d.jsonl", rows)

    def thinks(of_run, of_source):
        source = {"path": "d", "chat_template_kwargs": of_source}
        data = opened(source, chat_template="qwen3", chat_template_kwargs=of_run)
        trained = [e.sequences[0].tokens[e.sequences[0].loss_weights != 0] for e in data]
        return data, ["<think>" in tokenizer.decode(tokens) for tokens in trained]

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    plain, found = thinks({}, {})
    assert found == [True, True, True, True, False]
    assert thinks(off, {})[1] == thinks({}, off)[1] == [False, False, False, True, False]
    assert thinks(off, on)[1] == [True, True, True, True, False]
    folders = {data.folder for data, _ in (thinks({}, {}), thinks(off, {}), thinks({}, off))}
    assert len(folders) == 3 and plain.folder in folders
    with pytest.raises(DataError, match="^data.chat_template_kwargs sets 'messages', which"):
        thinks({"messages": []}, {})


def test_a_sources_system_prompt_is_for_conversations_without_one(tmp_path, tokenizer, opened):
    own, answer = {"role": "system", "content": "own"}, {"role": "assistant", "content": "a"}
    rows = [{"messages": [ASK, answer]}, {"prompt": "q", "completion": "a", "system": "own"},
            {"messages": [own, ASK, answer]}]  # fmt: skip
    write_rows(tmp_path / "d.jsonl", rows)
    texts = [
        tokenizer.decode(e.sequences[0].tokens)
        for e in opened({"path": "d", "system": "be kind"})
    ]
    for text, system in zip(texts, ("be kind", "own", "own"), strict=True):
        assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
                        "<|im_start|>assistant\na<|im_end|>")  # fmt: skip


def test_a_named_set_has_a_loader_of_its_own(opened):
    data = opened({"path": "a", "name": "math"}, {"path": "b"}, {"path": "b", "name": "math"})
    sets = loader(data, shuffle=False).sets()
    assert {name: own.order(0).tolist() for name, own in sets.items()} == {
        "": [*range(60)],
        "math": [*range(40), *range(50, 60)],
    }
    assert sets["math"].steps_per_epoch == 13


def test_names_and_probabilities_are_no_part_of_what_is_cached(opened):
    plain = opened({"path": "a"}, {"path": "b"})
    assert opened(*mixed(0.5, 0.5, name="math")).folder == plain.folder
