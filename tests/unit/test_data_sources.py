"""A list of sources: what share of an epoch each has, which examples are a set of their own, and what is refused."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import rows_of
from tests.tiny_tokenizer import write_rows
from ulysses.check.input_files import check_examples
from ulysses.check.preflight import remarks_on_data
from ulysses.config.command_line import check
from ulysses.config.section import ConfigError
from ulysses.data import DataError
from ulysses.data.serve.steps import StepLoader
from ulysses.options import stage_of
from ulysses.stages.base import Stage, StepBatches, Term

SIZES = {"a": 40, "b": 10, "c": 0}


@pytest.fixture
def opened(tmp_path, open_sources):
    """A function from tables of sources, with their file's name as the path, to the data."""
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name}{i}", "completion": "a", "text": "t"} for i in range(size)]
        none = [{"prompt": "", "completion": "a", "text": ""}]
        write_rows(tmp_path / f"{name}.jsonl", rows or none)

    def opened(*tables, **settings):
        found = [{**table, "path": f"{tmp_path / table['path']}.jsonl"} for table in tables]
        return open_sources(found, **settings)

    return opened


def loader(data, **more):
    return StepLoader(data, 4, tokens_per_microbatch=10_000, **more)


def mixed(a, b, **more):
    return {"path": "a", "probability": a}, {"path": "b", "probability": b, **more}


# the strategy, the shares of a and b, and how many rows of them an epoch has: first all of b and as many of a, then all
# of a and b four times
EPOCHS = """
first_exhausted => 0.5 0.5 => 10 10
all_exhausted => 0.5 0.5 => 40 40
first_exhausted => 0.9 0.1 => 40 4
all_exhausted => 0.9 0.1 => 90 10
first_exhausted => 0.8 0.2 => 40 10
all_exhausted => 0.8 0.2 => 40 10
"""


@pytest.mark.parametrize("strategy, shares, taken", rows_of(EPOCHS))
def test_an_epoch_has_the_shares_that_are_asked_for(opened, strategy, shares, taken):
    shares, taken = map(float, shares.split()), (*map(int, taken.split()),)
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


@pytest.mark.parametrize("weight", [0.5, 0.75, 1.3, 0.1])
def test_every_example_has_its_turn_over_the_epochs(opened, weight):
    data = opened({"path": "a", "weight": weight}, {"path": "b"})
    seen = np.zeros(40)
    for epoch in range(24):
        order = loader(data).order(
            epoch
        )  # whatever was asked before, and on any number of ranks
        assert (order == loader(data, data_parallel_size=4, dp_rank=3).order(epoch)).all()
        copies = np.bincount(order, minlength=50)
        assert (copies[40:] == 1).all() and copies[:40].sum() == round(40 * weight)
        seen += copies[:40]
        assert seen.max() - seen.min() <= 1
    once = [loader(data).order(epoch) for epoch in (1, 2)]
    assert weight != 0.5 or len({*np.concatenate(once)}) == 50


UNEVEN = (
    "an epoch of data.train has .* examples, but can have 268,435,456; give less uneven ones"
)
UNUSED = "leave no example of .*/b.jsonl in an epoch, which has 10; raise its own, or remove it"
# the sources, the strategy, and what is said
ENDLESS = f"""
[{{"path": "a", "probability": 0.999}}, {{"path": "b", "probability": 0.001}}] => first_exhausted => {UNUSED}
[{{"path": "a"}}, {{"path": "b", "weight": 0.04}}] => first_exhausted => {UNUSED}
[{{"path": "a", "probability": 1e-7}}, {{"path": "b", "probability": 0.9999999}}] => all_exhausted => {UNEVEN}
[{{"path": "a", "probability": 1e-300}}, {{"path": "b", "probability": 1}}] => all_exhausted => {UNEVEN}
[{{"path": "a", "weight": 1e18}}] => first_exhausted => {UNEVEN}
[{{"path": "a", "weight": 1e308}}] => first_exhausted => {UNEVEN}
"""


@pytest.mark.parametrize("tables, strategy, sentence", rows_of(ENDLESS))
def test_an_epoch_without_a_source_or_without_an_end_is_refused(
    opened, tables, strategy, sentence
):
    data = opened(*json.loads(tables), stopping_strategy=strategy)
    with pytest.raises(ConfigError, match=sentence):
        check_examples(stage_of(check({"stage": "sft"})), data, None)


def test_a_source_of_which_no_example_is_left_is_said(opened):
    report = opened({"path": "a"}, {"path": "c"}).report
    assert report.notes["sources of which no example is left"] == 1
    with pytest.raises(
        DataError, match=r"c.jsonl, .* \(read 41 rows, .*empty prompt: 1 \(.*c.jsonl"
    ):
        opened({"path": "a", "probability": 0.5}, {"path": "c", "probability": 0.5})


def test_a_small_source_of_a_mixture_may_have_no_held_out_row(opened):
    """Held-out data are read whole: no share of them is to be taken of any source."""
    train, held = (
        opened(*mixed(0.7, 0.3), eval_fraction=0.03, held_out=h) for h in (False, True)
    )
    rows = [np.bincount(data.sources, minlength=2).tolist() for data in (train, held)]
    assert rows == [[38, 10], [2, 0]]
    assert held.report.notes["sources of which no example is left"] == 1


def test_a_file_that_is_read_again_is_told_where_a_fraction_is_held_out(tmp_path):
    """Its rows have two places, of which one may be held out and the other is trained on."""
    first, other = (write_rows(tmp_path / f"{name}.jsonl", []) for name in "ab")
    loader = SimpleNamespace(data_parallel_size=1, examples_per_epoch=8, examples_per_step=8)

    def told(*train, fraction=0.1):
        data = {"train": [*train], "eval_fraction": fraction}
        return [*remarks_on_data(check({"stage": "sft", "data": data}), loader)]

    [line] = told(first, other, {"path": first, "system": "s"})
    assert line.startswith(f"data.train reads {first} again, and data.eval_fraction holds")
    assert told(first, other) == told(first, first, fraction=0.0) == []


MEANINGLESS = r"""
{"path": "a", "probability": 0.5} {"path": "b", "probability": 0.4} \
=> have the probabilities \[0.5, 0.4\]; give each of them one, with the sum 1 and no weight
{"path": "a", "probability": 0.5} {"path": "b", "probability": null} => have the probabilities \[0.5, 0\]; give
{"path": "a", "probability": 0.5} {"path": "b", "probability": 0.5, "weight": 2.0} \
=> give each of them one, with the sum 1 and no weight
{"path": "a", "probability": 1.5} => probability: Input should be less than or equal to 1
{"path": "a", "probability": 0.0} => probability: Input should be greater than 0
{"path": "a", "name": "x/y"} => name: String should match pattern
{"path": "a", "system": 3} => system: Input should be a valid string
{"path": "a", "chat_template_kwargs": "x"} => chat_template_kwargs: Input should be a valid dict
{"path": "a", "chat_template_kwargs": {"enable_thinking": false}} \
=> chat_template_kwargs of .*a.jsonl sets 'enable_thinking', which the chat template does not read; remove it
{"path": "a", "chat_template_kwargs": {"messages": []}} => sets 'messages', which
{"path": "a"} {"path": "c", "name": "x"} => no example is left of .*c.jsonl, which has a
"""


@pytest.mark.parametrize("tables, sentence", rows_of(MEANINGLESS))
def test_what_a_source_cannot_mean_is_refused(opened, tables, sentence):
    given = json.loads(f"[{tables.replace('} {', '}, {')}]")
    with pytest.raises(DataError, match=sentence):
        opened(*given)


@pytest.mark.parametrize("kind", ["text", "trajectory"])
@pytest.mark.parametrize("more", [{"system": "s"}, {"chat_template_kwargs": {"a": 1}}])
def test_documents_and_trajectories_have_no_conversations(opened, more, kind):
    with pytest.raises(DataError, match="which only conversations use; remove them"):
        opened({"path": "a", **more}, kind=kind)


def test_a_named_set_has_a_loader_of_its_own(opened):
    data = opened({"path": "a", "name": "math"}, {"path": "b"}, {"path": "b", "name": "math"})
    whole = loader(data, shuffle=False)
    sets = whole.sets()
    orders = {"": [*range(40, 50)], "math": [*range(40), *range(50, 60)]}
    assert {name: own.order(0).tolist() for name, own in sets.items()} == orders
    assert sets["math"].steps_per_epoch == 13

    read = []

    class Numbers(Stage):
        """The mean of the examples' numbers."""

        def read(self, source, step):
            read.extend(found := source.indices(0, step))
            return StepBatches([torch.tensor(found)])

        def normalisers(self, batch):
            return {"tokens": len(batch)}

        def losses(self, batch, metrics):
            metrics.add("largest", batch.max(), 1)
            return [Term(batch.sum(), "tokens")]

    engine = SimpleNamespace(device=torch.device("cpu"), inference=nullcontext)
    metrics = Numbers(check({"stage": "sft"}), engine).evaluate(whole)
    assert sorted(read) == [*range(60)], "each once"
    mean = sum(orders["math"]) / 50
    assert metrics["loss"] == 29.5 and metrics["math/loss"] == pytest.approx(mean)
    assert {*metrics} == {"loss", "largest", "math/loss", "math/largest"}


def test_names_and_probabilities_are_no_part_of_what_is_cached(opened):
    plain = opened({"path": "a"}, {"path": "b"})
    assert opened(*mixed(0.5, 0.5, name="math")).folder == plain.folder
