"""Every format people bring becomes the same records, and every odd row is named."""

import gzip
import hashlib
import json
import shutil
from types import SimpleNamespace

import datasets
import pytest

from tests.tiny_tokenizer import write_rows
from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.read.formats import Report, locate_rows, read_records
from ulysses.data.read.sources import (
    Source,
    missing_sources,
    parse_sources,
    repeated_data,
    source_digest,
)
from ulysses.data.serve.dataset import open_dataset

USER, BOT, OTHER = (
    {"role": r, "content": c}
    for r, c in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
HUMAN, GPT, GPT_OTHER = (
    {"from": f, "value": v} for f, v in (("human", "q"), ("gpt", "a"), ("gpt", "b"))
)
TRANSCRIPTS = {
    "chosen": "\n\nHuman: q\n\nAssistant: a",
    "rejected": "\n\nHuman: q\n\nAssistant: b",
}
PAIR_ROW = {"prompt": "q", "chosen": "a", "rejected": "b"}


def load(path, kind="text", bad_rows="error", **source):
    report = Report()
    sources = [Source(str(path), **source)]
    rows = locate_rows(sources, report)
    records = [*read_records(rows, sources, kind, events := [], bad_rows=bad_rows)]
    for event in events:
        report.count(*event)
    return records, report


@pytest.fixture
def read(tmp_path):
    """A function from rows to their records and the report."""
    return lambda rows, kind, **source: load(
        write_rows(tmp_path / "rows.jsonl", rows), kind, **source
    )


@pytest.fixture
def read_flat(read):
    """A function from rows to the prompts and answers of their records."""
    return lambda *rows, **source: [flat(record) for record in read(*rows, **source)[0]]


def turns(messages):
    return [(m.role, m.content) for m in messages]


def flat(record):
    return turns(record.prompt), [turns(a) for a in record.answers]


Q, A, B, SYSTEM = ("user", "q"), ("assistant", "a"), ("assistant", "b"), ("system", "s")
GOOD = {"instruction": "q", "input": "", "output": "a"}
HH = "\n\nHuman: q\n\nAssistant: a"  # no transcript where it is an instruction


PARTS = [[{"type": "text", "value": "q"}], [{"type": "text", "text": "a"}]]
MORE = {
    "instruction": "q",
    "input": "more",
    "output": "a",
    "system": "s",
    "history": [["u", "v"]],
}


@pytest.mark.parametrize(
    "row, prompt, answer",
    [
        ({"messages": [USER, BOT]}, [], [Q, A]),
        ({"messages": [turn | {"content": part} for turn, part in zip((USER, BOT), PARTS)]}, [], [Q, A]),
        ({"conversations": [HUMAN, GPT], "system": "s"}, [], [SYSTEM, Q, A]),
        (GOOD, [], [Q, A]),
        (MORE, [], [SYSTEM, ("user", "u"), ("assistant", "v"), ("user", "q\nmore"), A]),
        ({"instruction": HH, "output": "a"}, [], [("user", HH), A]),
        ({"prompt": "q", "completion": "a"}, [Q], [A]),
        ({"prompt": [USER], "completion": [BOT]}, [Q], [A]),
        ({"question": "q", "answer": "a"}, [Q], [A]),
        ({"messages": [USER, BOT, USER, BOT], "label": True}, [Q, A, Q], [A]),
        ({"prompt": "q", "completion": "a", "label": False}, [Q], [A]),
        ({"instruction": "q", "output": "a", "kto_tag": 1}, [Q], [A]),
    ],
)  # fmt: skip
def test_prompt_and_answer(read, row, prompt, answer):
    """KTO's prompt is everything before the last answer."""
    label = row.get("label", row.get("kto_tag"))
    records, report = read([row], "sequence" if label is None else "unpaired")
    assert flat(records[0]) == (prompt, [answer]) and records[0].columns.get("label") == label
    assert (report.read, sum(report.dropped.values())) == (1, 0)


def test_alpaca_rows_as_version_1_of_llamafactory_writes_them(read_flat):
    """Nothing stands between instruction and input, and the history is not read."""
    found = read_flat([MORE, GOOD], "sequence", format="alpaca_v1")
    assert found == [([SYSTEM, ("user", "qmore")], [[A]]), ([Q], [[A]])]


PAIR = ([Q], [[A], [B]])
CONVERSATIONS = {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT_OTHER}


@pytest.mark.parametrize(
    "row",
    [
        PAIR_ROW,
        {"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]},
        {"chosen": [USER, BOT], "rejected": [USER, OTHER]},
        {"prompt": "q", "chosen": [USER, BOT], "rejected": [USER, OTHER]},
        TRANSCRIPTS,
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"},
        CONVERSATIONS,
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "output": ["a", "b"]},
        {"prompt": "q", "responses": ["b", "a"], "scores": [0.1, 0.9]},
        {"prompt": "q", "responses": ["b", "a"], "ranks": [2, 1]},
    ],
)  # fmt: skip
def test_preference_formats(read, read_flat, row):
    assert read_flat([row], "pair") == [PAIR]
    unpaired, _ = read([row], "unpaired")
    assert [flat(record) for record in unpaired] == [([Q], [[A]]), ([Q], [[B]])]
    assert [record.columns["label"] for record in unpaired] == [1.0, 0.0]
    prompts, _ = read([row], "prompt")
    assert [flat(r) for r in prompts] == [([Q], [[]])] and prompts[0].row == row


@pytest.mark.parametrize(
    "row, history",
    [
        (PAIR_ROW, []),
        ({"chosen": [USER, BOT, USER, BOT], "rejected": [USER, BOT, USER, OTHER]}, [Q, A]),
        ({"messages": [USER, BOT, USER], "chosen": BOT, "rejected": OTHER}, [Q, A]),
    ],
)  # fmt: skip
def test_one_side_of_a_pair_is_trained_on_as_the_refusal_advises(read_flat, row, history):
    """The chosen answer alone, and not the turns before it."""
    advice = r'to train on one set columns = \{completion = "chosen"\}'
    with pytest.raises(DataError, match=advice):
        read_flat([row], "sequence")
    found = read_flat([row], "sequence", columns={"completion": "chosen"})
    assert found == [([*history, Q], [[A]])]


OWN = {
    "answer": 42,
    "label": "cat",
    "answers": ["4", "four"],
    "response": {"x": 1},
    "margin": "wide",
}


@pytest.mark.parametrize("key", OWN)
@pytest.mark.parametrize("form", [{"prompt": "q"}, {"messages": [USER]}, {"instruction": "q"}])
def test_what_stands_beside_a_prompt_is_the_rewards_own(read, form, key):
    row = form | {key: OWN[key]}
    records, _ = read([row], "prompt")
    assert [flat(r) for r in records] == [([Q], [[]])] and records[0].row == row


def test_ranked_lists(read):
    """They give all their pairs, or stay one list with its ranks; a pair is a list of two."""
    row = {"prompt": "q", "completions": ["x", "y", "z"], "scores": [1, 3, 1]}
    records, report = read([row], "pair")
    assert [[a[0].content for a in r.answers] for r in records] == [["y", "x"], ["y", "z"]]
    assert report.notes == {"rows that gave several examples": 1}
    records, _ = read([row, PAIR_ROW | {"margin": 0.5}], "ranked")
    assert [(len(r.answers), r.ranks, r.columns["margin"]) for r in records] == [
        (3, [1, 0, 1], 0),
        (2, [0, 1], 0.5),
    ]


def test_tools_and_function_calls(read):
    called = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    turns = [HUMAN, called, {"from": "observation", "value": "7"}, GPT]
    tools = '[{"name": "f", "description": "d", "parameters": {}}]'
    row = {"conversations": turns, "tools": tools}
    (record,), _ = read([row], "sequence")
    (messages,) = record.answers
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1].tool_calls == (
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    )
    assert record.tools[0]["function"]["name"] == "f"


def test_keys_of_messages_are_kept_for_the_template(read):
    call = {"name": "f", "arguments": '{"x": 1}'}
    thought = {"content": None, "reasoning_content": "t", "audio": None, "function_call": call}
    told = {"role": "tool", "content": "7", "tool_call_id": "c"}
    identified = {"tool_calls": [{"id": "c", "function": call}]}
    turns = [USER, BOT | thought, told, {"role": "assistant"} | identified]
    (record,), _ = read([{"messages": turns, "image": None, "images": []}], "sequence")
    _, first, _, last = messages = record.answers[0]
    more = [{}, {"reasoning_content": "t"}, {"tool_call_id": "c"}, {}]
    assert [dict(m.more) for m in messages] == more
    assert first.tool_calls[0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert last.tool_calls[0]["id"] == "c"


@pytest.mark.parametrize(
    "prompt, begun",
    [
        ([USER, {"role": "assistant", "content": "Sure, "}], "Sure, "),
        ("\n\nHuman: q\n\nAssistant: Sure,", "Sure,"),
    ],
)
def test_a_prompt_that_ends_with_the_assistant_begins_its_answers(
    read, read_flat, prompt, begun
):
    first, second = (("assistant", begun + answer) for answer in "ab")
    row = {"prompt": prompt}
    (record,), _ = read([row | {"completion": "a"}], "sequence")
    assert flat(record) == ([Q], [[first]]) and record.answers[0][0].begun == len(begun)
    several = row | {"completion": [BOT, USER, OTHER]}
    assert read_flat([several], "sequence") == [([Q], [[first, Q, B]])]
    pair = row | {"chosen": "a", "rejected": [OTHER]}
    assert read_flat([pair], "pair") == [([Q], [[first], [second]])]
    for asked in (pair, row | {"answer": "for the reward"}):
        (record,), _ = read([asked], "prompt")
        assert flat(record) == ([Q, ("assistant", begun)], [[]])
        assert record.prompt[-1].begun == len(begun)
    assert read([row | {"completion": " "}], "sequence")[1].dropped == {"empty answer": 1}
    # a new question, so the prompt's turn is a whole one
    later = row | {"completion": [USER, BOT]}
    assert read_flat([later], "sequence") == [([Q, ("assistant", begun)], [[Q, A]])]


def test_message_weights(read):
    turns = [USER | {"loss_weight": 0.0}, BOT | {"train": False}]
    turns += [USER, BOT | {"weight": 0.5}, USER, BOT]
    (record,), _ = read([{"messages": turns}], "sequence")
    assert [m.weight for m in record.answers[0]] == [0.0, 0.0, None, 0.5, None, None]


def message(**keys):
    return {"messages": [USER, keys]}


@pytest.mark.parametrize(
    "row, kind, sentence",
    [
        ({"instruction": "q"}, "sequence", "row 1 has no answer"),
        (
            {"instruction": 3, "output": "a"},
            "sequence",
            "row 1 'instruction' is int, not a string",
        ),
        ([1], "sequence", "row 1 is list, not an object"),
        (GOOD | {"history": [["x"]]}, "sequence", "list of .user, assistant. pairs"),
        (GOOD | {"output": "\ud800"}, "sequence", "unpaired surrogate"),
        (GOOD | {"unused": "\ud800"}, "prompt", "unpaired surrogate"),
        (GOOD, "pair", "row 1 has no chosen and rejected"),
        (GOOD, "unpaired", "row 1 has no 'label' or 'kto_tag'"),
        ({"foo": 1}, "sequence", "fit none of the formats"),
        ({"text": "x"}, "sequence", "plain text, which only stage pt"),
        ({"messages": [USER, "text"]}, "sequence", "message 2 is str, not an object"),
        (message(role="wizard", content="x"), "sequence", "message 2 has the role 'wizard'"),
        (message(role="assistant"), "sequence", "message 2 has no text content"),
        (
            message(role="assistant", content=[{"type": "image", "value": "x"}]),
            "sequence",
            "type 'image'; only text",
        ),
        (
            message(role="user", content="x", weight=1),
            "sequence",
            "gives the weight 1 to a user message",
        ),
        (message(role="assistant", content="x", weight=-1), "sequence", "negative weight"),
        (
            message(**{"from": "function_call"}, value="not json"),
            "sequence",
            "tool call as JSON",
        ),
        (
            GOOD | {"images": ["a.png"]},
            "sequence",
            "the column 'images', but only text .*columns = .unused = .images",
        ),
        ({"text": "x", "audio": {"path": "a.wav"}}, "text", "the column 'audio'"),
        (PAIR_ROW | {"video": "a.mp4"}, "prompt", "the column 'video'"),
    ],
)
def test_bad_rows_are_errors_that_name_the_row(read, tmp_path, row, kind, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        read([row], kind)
    assert str(tmp_path / "rows.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    "row, kind, reason",
    [
        ({"instruction": "q", "output": " "}, "sequence", "empty answer"),
        ({"instruction": "", "output": "a"}, "sequence", "empty prompt"),
        (GOOD | {"label": False}, "sequence", "its label is false"),
        (
            {"instruction": "q", "chosen": "a", "rejected": "a"},
            "pair",
            "chosen and rejected are the same",
        ),
        ({"instruction": "q", "chosen": "a", "rejected": ""}, "pair", "empty answer"),
        (
            PAIR_ROW | {"chosen": [USER, BOT]},
            "pair",
            "an answer does not begin and end with an assistant message",
        ),
    ],
)
def test_rows_without_use_are_dropped_and_reported(read, tmp_path, row, kind, reason):
    records, report = read([row], kind)
    assert records == [] and report.dropped == {reason: 1}
    assert report.examples[reason] == [f"{tmp_path / 'rows.jsonl'} row 1"]
    assert reason in str(report) and "row 1" in str(report)


def test_transcripts_with_different_prompts_or_empty_answers_are_dropped(read):
    opened = "\n\nHuman: q\n\nAssistant: a\n\nHuman: more\n\nAssistant:"
    rejected = (opened + " y", HH, opened, opened + " y\n\nHuman: bye")
    records, report = read([{"chosen": opened + " x", "rejected": r} for r in rejected], "pair")
    answers = [[("assistant", "x")], [("assistant", "y")]]
    assert [flat(r) for r in records] == [([Q, A, ("user", "more")], answers)]
    assert report.dropped == {
        "the prompts of chosen and rejected differ": 1,
        "empty answer": 1,
        "rejected does not end with an assistant message": 1,
    }


def test_broken_json_line_is_named_or_dropped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n{broken\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(DataError, match=r"x.jsonl row 3 is not valid JSON"):
        load(path, "sequence")
    records, report = load(path, "sequence", bad_rows="drop")
    assert len(records) == 2 and report.dropped == {"is not valid JSON": 1} and report.read == 3
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"row 1 is not valid UTF-8"):
        load(path)


def test_file_kinds_give_the_same_records(tmp_path, read_flat):
    rows = [{"prompt": f"q{i}", "completion": f"a,\n{i}"} for i in range(3)]
    expected = read_flat(rows, "sequence")
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text(
        "\ufeff" + json.dumps(rows, indent=1), encoding="utf-8"
    )
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in ("lines.json", "a.jsonl.gz", "folder", "a.csv", "a.parquet", "saved"):
        records, _ = load(tmp_path / name, "sequence")
        assert [flat(r) for r in records] == expected, name
        assert [r.where[-5:] for r in records] == ["row 1", "row 2", "row 3"]


@pytest.mark.parametrize("name", ["b.jsonl.zst", "deep/b.csv.xz", "b.txt.bz2", "b.json.zip"])
def test_a_file_that_is_not_unpacked_is_named_and_never_passed_over(tmp_path, name):
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"packed")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(
            DataError, match=rf"/{name} is compressed in a way that is not read"
        ):
            load(place)
    (tmp_path / name).rename(tmp_path / "notes.zip")  # no data
    assert [record.text for record in load(tmp_path)[0]] == ["a"]


def test_csv_fields_beyond_the_header_and_columns_of_one_name_are_told(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,id\na,1\nb,2,3\n")
    with pytest.raises(
        DataError, match="row 2 has more fields than the first line names columns"
    ):
        load(file)
    records, report = load(file, bad_rows="drop")
    assert [record.text for record in records] == ["a"] and sum(report.dropped.values()) == 1
    file.write_text("text,id,text\na,1,b\n")
    with pytest.raises(DataError, match="a.csv has two columns of the name 'text'; rename one"):
        load(file)


SHARDED = "data/{}-0000{}-of-0000{}.jsonl"
# a folder's files by split; those of "" belong to none
LAYOUTS = {
    "shards": {"train": [SHARDED.format("train", 0, 2), SHARDED.format("train", 1, 2)],
               "test": [SHARDED.format("test", 0, 1)]},
    "shards of any name": {"test_sft": [SHARDED.format("test_sft", 0, 1)],
                           "train_sft": [SHARDED.format("train_sft", 0, 1)]},
    "names": {"train": ["train.jsonl", "training_2.jsonl"], "validation": ["dev.jsonl"], "test": ["my-eval.jsonl"],
              "": ["more.jsonl"]},
    "names below": {"train": ["data/train.jsonl"], "validation": ["data/val.jsonl"]},
    "folders": {"train": ["train/a.jsonl", "train/b/test.jsonl"], "test": ["testing/a.jsonl"]},
    "whole words only": {"train": ["latest.jsonl", "trainer.jsonl", "evaluated/a.jsonl"]},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_gives_the_split_that_the_hub_would_give(tmp_path, name):
    layout, folder = LAYOUTS[name], tmp_path / "folder"
    files = {file for own in layout.values() for file in own}
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / file, [{"text": file}])
    (folder / "eval").mkdir()
    # names of splits, but no data that is read
    others = {"eval/train.py", "eval/a.JSONL", "eval/a.arrow", "README.md"}
    for file in others:
        (folder / file).touch()
    for split in layout.keys() - {""}:
        records, report = load(folder, split=split)
        assert [record.text for record in records] == sorted(layout[split])
        left = files - {*layout[split]} | others
        assert report.notes == {f"files left out, not data of split {split}": len(left)}
        assert sum(str(folder / file) in str(report) for file in left) == min(len(left), 5)
    there = ", ".join(split for split in layout if split)
    with pytest.raises(
        DataError,
        match=rf"/folder has no split 'other', only {there}; set split to one of them",
    ):
        load(folder, split="other")
    with pytest.raises(DataError, match="has no split 'other'"):
        source_digest(Source(str(folder), split="other"), tmp_path)
    records = load(folder)[0] if "train" in layout else []
    assert [record.text for record in records] == sorted(layout.get("train", []))
    shutil.rmtree(folder / "eval")  # the hub's loader would take it for a split without data
    for split in layout.keys() - {""}:
        hub = datasets.load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "cache"))
        assert sorted(hub["text"]) == sorted(layout[split])


def test_splits_of_a_saved_folder_and_of_a_folder_without_data_for_the_hub(tmp_path):
    rows = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    assert [load(tmp_path / "saved", split=name)[0][0].text for name in rows] == [*rows]
    with pytest.raises(
        DataError,
        match=r"^/.*/saved has no split 'other', only train, test; set split to one of them",
    ):
        load(tmp_path / "saved", split="other")
    (tmp_path / "few").mkdir()
    write_rows(
        tmp_path / "few/config.json", [{"text": "a"}]
    )  # a name that the hub never takes for data
    assert load(tmp_path / "few")[0][0].text == "a"


def test_hub_data_are_those_of_the_commit_that_was_asked_for(
    tokenizer, tmp_path, monkeypatch, capsys
):
    """A commit later the rows are other data, with a cache of their own; the report names it."""
    asked, commit = [], "1" * 40

    def load_dataset(path, name, split, revision):
        if path == "absent/data":
            raise FileNotFoundError("no such dataset")
        return [{"text": f"{path} {name} {split} {revision}"}]

    def dataset_info(self, path, *, revision, timeout):
        if path != "org/data":
            raise ConnectionError("no answer")
        asked.append((path, revision, timeout))
        return SimpleNamespace(sha=commit)

    def snapshot_download(path, *, repo_type, revision, local_files_only):
        assert (repo_type, revision, local_files_only) == ("dataset", "v1", True)
        if path == "absent/data":
            raise FileNotFoundError("not in the cache")
        return f"/hub/snapshots/{commit}"

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)

    def opened(path="org/data"):
        source = Source(path, split="test", revision="v1")
        data = DataSection(max_length=100, cache=str(tmp_path / "cache"))
        return open_dataset([source], "text", tokenizer, data)

    found = [opened(), opened()]
    commit = "2" * 40
    found.append(opened())
    assert asked == [("org/data", "v1", 5)] * 3
    assert f"data of the hub's commit {commit}" in str(opened("kept/data").report)
    assert "asking the Hugging Face hub for the dataset org/data" in capsys.readouterr().out
    assert found[0].folder == found[1].folder != found[2].folder
    for dataset, name in zip(found, "112"):
        assert tokenizer.decode(dataset[0].sequences[0].tokens).startswith(
            f"org/data None test {name * 40}"
        )
        assert f"data of the hub's commit {name * 40}: 1 (org/data)" in str(dataset.report)
    for opener, problem in ((opened, "no answer"), (load, "no such dataset")):
        with pytest.raises(
            DataError, match=f"absent/data does not exist .* no hub dataset .* {problem}"
        ):
            opener("absent/data")


def test_what_is_read_twice_is_told(tmp_path):
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": name}])
    datasets.DatasetDict({"a": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(
        tmp_path / "saved"
    )
    folder, train, saved = (
        Source(str(tmp_path / name)) for name in ("", "train.jsonl", "saved")
    )
    held_out = Source(folder.path, split="test")
    assert repeated_data([folder], [train]) == repeated_data([train], [train]) == [train.path]
    assert repeated_data([folder, saved], [held_out, Source(saved.path, split="a")]) == []
    assert repeated_data([Source("org/data")], [Source("org/data", max_examples=3)]) == [
        "org/data train"
    ]


def test_a_missing_key_of_a_file_is_a_sentence(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text("{}")
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="/saved cannot be read: there is no '_\\w+' in it$"):
        load(tmp_path / "saved")


def test_sources_and_their_mistakes(tmp_path):
    assert parse_sources(["a.jsonl", {"path": "b.jsonl", "weight": 2.0, "format": None}]) == [
        Source("a.jsonl"),
        Source("b.jsonl", weight=2.0),
    ]
    absent = Source(str(tmp_path / "absent.jsonl"))
    assert absent.path in missing_sources([absent])[0]
    (tmp_path / "x.docx").write_text("")
    for path, message in (
        (absent.path, "does not exist"),
        (tmp_path / "x.docx", "x.docx is none of"),
    ):
        with pytest.raises(DataError, match=message):
            load(path, "sequence")


def test_digest_follows_content_and_bytes_are_hashed_once(tmp_path, monkeypatch):
    """A second process, and a later run, find the digest under the file's size and times."""
    monkeypatch.setattr("ulysses.data.read.sources.SETTLED_SECONDS", 0.0)
    source = Source(write_rows(tmp_path / "a.jsonl", [GOOD]))
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(1) or digest(file, name)
    )
    first = source_digest(source, tmp_path / "cache")
    assert source_digest(source, tmp_path / "cache") == first and len(hashed) == 1
    write_rows(tmp_path / "a.jsonl", [{**GOOD, "output": "b"}])
    assert source_digest(source, tmp_path / "cache") != first and len(hashed) == 2
    copy = write_rows(tmp_path / "b.jsonl", [GOOD])
    assert (
        source_digest(Source(copy), tmp_path)
        == first
        != source_digest(Source(copy, format="alpaca"), tmp_path)
    )


def test_text_file_with_separator_is_several_documents(tmp_path):
    path = tmp_path / "documents.txt"
    path.write_text("one\n===\ntwo\n\nlines\n===\n \n===\nthree")
    records, _ = load(path, separator="\n===\n")
    assert [r.text for r in records] == ["one", "two\n\nlines", "three"]
    assert len({r.where for r in records}) == 3
    assert load(path, separator="\n===\n", max_examples=2)[0] == records[:2]
