"""Rows of trajectories: what they become, how they are grouped, and which are refused."""

import gzip
import json
import math

import numpy as np
import pytest

from tests import rows_of
from tests.tiny_tokenizer import write_rows
from ulysses.config.stage_sections import PpoSection
from ulysses.data import BadRowError, DataError
from ulysses.data.read.sources import RawRow
from ulysses.data.read.trajectories import read_trajectory
from ulysses.rl.rows import TrajectoryGroups, trajectories_of, unfit_rows

# two turns with a result of a tool between them, and a turn that nobody answers
ROW = {
    "group": "a",
    "token_ids": [5, 7, 9, 4, 8, 8, 3, 6],
    "mask": [0, 0, 1, 1, 0, 1, 1, 0],
    "logprobs": [0, 0, -0.5, -1.5, 0, -2, -0.25, 0],
    "reward": 1.5,
}


def read(row, columns=None, source=0):
    value = row if isinstance(row, bytes) else json.dumps(row).encode()
    return read_trajectory(RawRow(source, "here", value), columns or {}, 10, 8, [].append)


@pytest.mark.parametrize("stop, ended", [((3,), True), ((6,), False)])
def test_a_row_becomes_a_trajectory_up_to_its_last_trained_token(stop, ended):
    [found] = trajectories_of([[read(ROW)]], stop)
    assert found.prompt == [5, 7] and found.tokens == [9, 4, 8, 8, 3]
    assert found.sampled == [True, True, False, True, True]
    assert found.logps == [-0.5, -1.5, 0, -2, -0.25]
    assert found.ended == ended and found.score == 1.5 and found.advantages == []


@pytest.mark.parametrize("given", [2, [1, 2, 3, 4, 5, 6, 7, 8]])
def test_advantages_are_a_number_or_one_for_every_token(given):
    [found] = trajectories_of([[read({**ROW, "advantages": given})]], ())
    assert found.advantages == ([2.0] * 5 if given == 2 else [3.0, 4.0, 5.0, 6.0, 7.0])


def test_keys_may_have_other_names():
    theirs = {name.upper(): value for name, value in ROW.items()}
    found = read(theirs, {name: name.upper() for name in ROW})
    assert found.keys() == read(ROW).keys() and found["reward"] == 1.5
    assert read({**ROW, "info": {"score": 2.5}}, {"reward": "info.score"})["reward"] == 2.5
    with pytest.raises(BadRowError, match="has no column 'loss_mask', which columns names"):
        read(ROW, {"mask": "loss_mask"})


# what is changed in the row, and what is said of it
BROKEN = """
group=null => is no trajectory: group
mask=null => is no trajectory: mask: Input should be a valid list
mask=[0,0,2,1,0,1,1,0] => is no trajectory: mask.2: Input should be a valid boolean
token_ids=[5,7,-1,4,8,8,3,6] => is no trajectory: token_ids.2: Input should be greater than or equal to 0
token_ids=[5,7,1.5,4,8,8,3,6] => is no trajectory: token_ids.2: Input should be a valid integer
token_ids=[5,7,10,4,8,8,3,6] => has the token 10 but the model knows 10
token_ids=[] => has lists of .0, 8, 8. entries; give one entry for each token
logprobs=[0] => has lists of .8, 8, 1. entries
logprobs=[0, 0, 0, 0.3, 0.3, 0.3, 0.3, 0.3] => has drawn tokens whose logprobs are null or above 0
logprobs=[0, 0, 0, null, null, null, null, null] => has drawn tokens whose logprobs are null or above 0
logprobs=[0,0,NaN,-1,0,-2,-1,0] => is no trajectory
logprobs=[0,0,1e300,-1,0,-2,-1,0] => is no trajectory: logprobs.2: Input should be less than or equal to
logprobs=[0,0,"low",-1,0,-2,-1,0] => is no trajectory: logprobs.2: Input should be a valid number
reward="good" => is no trajectory: reward: Input should be a valid number
reward=null => has neither reward nor advantages
advantages=[1] => has lists of .8, 8, 8, 1. entries
mask=[0,0,0,0,0,0,0,0] => trains no token, or the first, which nothing predicts
mask=[1,0,0,0,0,0,0,0] => trains no token, or the first
mask=[1,1,0,0,0,0,0,0] => trains no token, or the first
"""


@pytest.mark.parametrize("change, sentence", rows_of(BROKEN))
def test_a_row_that_cannot_be_trained_on_is_refused(change, sentence):
    name, _, value = change.partition("=")
    text = json.dumps({**ROW, name: "VALUE"}).replace('"VALUE"', value)
    with pytest.raises(BadRowError, match=f"^{sentence}") as caught:
        read(text.encode())
    assert "\n" not in str(caught.value)


def test_a_number_of_a_program_that_is_none_is_called_so():
    with pytest.raises(BadRowError, match="reward: Input should be a finite number"):
        read_trajectory(RawRow(0, "", {**ROW, "reward": math.nan}), {}, 10, 8, [].append)


@pytest.mark.parametrize("text", ["[1]", "{", "7", '"a"', "null"])
def test_a_row_of_another_form_is_refused(text):
    with pytest.raises(BadRowError, match="is no trajectory"):
        read(text.encode())


def test_a_file_may_begin_with_a_byte_order_mark_and_is_read_to_its_end(tmp_path, open_sources):
    rows = "\ufeff" + json.dumps(ROW) + "\n"
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-4])
    how = {"vocabulary": 10, "bad_rows": "drop"}
    assert len(open_sources(str(tmp_path / "a.jsonl"), "trajectory", **how)) == 1
    with pytest.raises(DataError, match="b.jsonl.gz cannot be read"):
        open_sources(str(tmp_path / "b.jsonl.gz"), "trajectory", **how)


def test_a_row_that_is_too_long_is_refused():
    longer = {name: value * 2 for name, value in ROW.items() if isinstance(value, list)}
    with pytest.raises(BadRowError, match="has 16 tokens but data.max_length is 8; raise it"):
        read(ROW | longer)


def test_the_rows_of_a_group_may_stand_anywhere_and_sources_share_none(tmp_path, open_sources):
    groups = {"one": ["a", 7, "a", "7"], "two": ["a"]}
    for name, own in groups.items():
        write_rows(tmp_path / f"{name}.jsonl", [{**ROW, "group": group} for group in own])
    given = [{"path": str(tmp_path / f"{name}.jsonl")} for name in groups]
    found = TrajectoryGroups(
        open_sources(given, "trajectory", share_prompts=True, vocabulary=10)
    )
    assert [each.tolist() for each in found.members] == [[0, 2], [1], [3], [4]]
    assert found.sources.tolist() == [0, 0, 0, 1] and found.lengths.tolist() == [16, 8, 8, 8]
    own, shared = found.sizes([0, 1])  # without the token that nobody answers
    assert own.tolist() == [[7], [6], [7]] and shared.tolist() == [[0], [1], [0]]
    drawn = found.trajectories([3, 0], ())
    assert [(one.group, one.episode) for one in drawn] == [(0, 0), (1, 1), (1, 2)]


UNREAD = """
date source info task example_id prompt_id prompt completion =>
loss_mask completion_mask env_masks ref_logprobs rollout_log_probs old_logps => all
advantage token_advantages rewards score format_reward values returns => all
loss_weight weight train trainable labels temperature top_p top_k => all
is_truncated truncated finish_reason stop_reason done episode branch_id => all
prompt_ids completion_ids input_ids images multi_modal_inputs pixel_values => all
"""


@pytest.mark.parametrize("keys, told", rows_of(UNREAD))
def test_a_column_that_means_something_elsewhere_is_counted(tmp_path, open_sources, keys, told):
    """As of the rows of other formats: not if it is empty, is read under our name, or is given up."""
    keys, path = keys.split(), tmp_path / "rows.jsonl"
    row, empty = {**ROW, **{key: [1, 2] for key in keys}}, {**ROW, **dict.fromkeys(keys)}
    write_rows(path, [row, empty, row, ROW])

    def notes(**columns):
        source = {"path": str(path), "columns": columns}
        data = open_sources([source], "trajectory", vocabulary=10, cache=f"{len(columns)}")
        return data.report.notes

    assert notes() == {f"the column {name!r} was not read": 2 for name in keys if told}
    write_rows(path, [row])
    assert not notes(**{f"unused{n}": name for n, name in enumerate(keys)})


# how many of two rows have advantages, the settings, and whether they fit
FITTING = """
0 advantage=gae => yes
2 advantage=group kl_coefficient=0 => yes
2 advantage=group kl_in=loss => yes
1 advantage=group kl_in=loss => no
2 advantage=gae kl_coefficient=0 => no
2 advantage=group => no
2 advantage=group kl_coefficient=0 missing_eos_penalty=1 => no
"""


@pytest.mark.parametrize("case, fits", rows_of(FITTING))
def test_given_advantages_fit_settings_that_compute_none(case, fits):
    count, *settings = case.split()
    given = np.arange(2) < int(count)
    fault = unfit_rows(1, given, PpoSection(**dict(s.split("=") for s in settings)))
    assert fault.startswith(f"{count} of 2 rows have advantages") == (fits == "no")
