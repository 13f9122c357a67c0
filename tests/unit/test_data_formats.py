"""Every format people bring becomes the same records, and every odd row is named."""

import gzip
import json
import shutil
from functools import partial
from string import Template
from types import SimpleNamespace

import datasets
import pytest

from tests.tiny_tokenizer import write_rows
from ulysses.data import DataError
from ulysses.data.read.formats import dropping, read_row
from ulysses.data.read.sources import (
    Report,
    Source,
    locate_rows,
    missing_sources,
    note_sources,
    parse_sources,
    repeated_data,
    source_digest,
)

# The messages of the rows below; $human and so on are ShareGPT's.
MESSAGES = {
    "user": '{"role": "user", "content": "q"}',
    "bot": '{"role": "assistant", "content": "a"}',
    "other": '{"role": "assistant", "content": "b"}',
    "human": '{"from": "human", "value": "q"}',
    "gpt": '{"from": "gpt", "value": "a"}',
    "call": '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments":',
    "parts": '{"role": "assistant", "content": [',
}


def table(text):
    """The lines of a text, of which each is a row as JSON and what is expected of it."""
    text = Template(text).substitute(MESSAGES).replace("\\\n", "")
    return [line.split(" => ") for line in text.strip().splitlines()]


def load(path, kind="text", bad_rows="error", **source):
    """The records of a source, and the report."""
    report, records = Report(), []
    (source,) = sources = [Source(str(path), **source)]
    for row in locate_rows(sources, report):
        note = partial(report.note, where=row.where)
        with dropping(report, bad_rows, row.where):
            records += read_row(row.value, source, kind, note)
    note_sources(sources, report)
    return records, report


def places(path, **source):
    """The file and number of every row."""
    return [row.where for row in locate_rows([Source(str(path), **source)], Report())]


def texts(path, **source):
    return [record.text for record in load(path, **source)[0]]


def refused(sentence, path, kind="text", **source):
    with pytest.raises(DataError, match=sentence):
        load(path, kind, **source)


@pytest.fixture
def read(tmp_path):
    """A function from rows to their records and the report."""
    file = tmp_path / "rows.jsonl"
    return lambda rows, kind, **source: load(write_rows(file, rows), kind, **source)


@pytest.fixture
def read_flat(read):
    """A function from rows to the prompts and answers of their records."""
    return lambda *rows, **source: [flat(record) for record in read(*rows, **source)[0]]


def flat(record):
    """The prompt and every answer in brackets of their own."""
    parts = (
        ", ".join(f"{m.role}: {m.content}" for m in part)
        for part in (record.prompt, *record.answers)
    )
    return " ".join(f"[{part}]" for part in parts).replace("\n", r"\n")


GOOD = '{"instruction": "q", "input": "", "output": "a"}'
PAIR_ROW = '{"prompt": "q", "chosen": "a", "rejected": "b"}'
PAIR = "[user: q] [assistant: a] [assistant: b]"


@pytest.mark.parametrize(
    "row, wanted",
    table(r"""
{"messages": [$user, $bot]} => [] [user: q, assistant: a]
{"messages": [{"role": "user", "content": [{"type": "text", "value": "q"}]}, $bot]} => [] [user: q, assistant: a]
{"messages": [$user, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]} => [] [user: q, assistant: a]
{"conversations": [$human, $gpt], "system": "s"} => [] [system: s, user: q, assistant: a]
{"messages": "[{\"role\": \"user\", \"content\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\"}]"} \
=> [] [user: q, assistant: a]
{"instruction": "q", "input": "more", "output": "a", "system": "s", "history": [["u", "v"]]} \
=> [] [system: s, user: u, assistant: v, user: q\nmore, assistant: a]
{"instruction": "\n\nHuman: q\n\nAssistant: a", "output": "a"} \
=> [] [user: \n\nHuman: q\n\nAssistant: a, assistant: a]
{"prompt": "q", "completion": "a"} => [user: q] [assistant: a]
{"prompt": [$user], "completion": [$bot]} => [user: q] [assistant: a]
{"question": "q", "answer": "a"} => [user: q] [assistant: a]
{"messages": [$user, $bot, $user, $bot], "label": true} => [user: q, assistant: a, user: q] [assistant: a]
{"prompt": "q", "completion": "a", "label": false} => [user: q] [assistant: a]
{"instruction": "q", "output": "a", "kto_tag": 1} => [user: q] [assistant: a]
"""),
)
def test_prompt_and_answer(read, row, wanted):
    """KTO's prompt is everything before the last answer."""
    given = json.loads(row)
    label = given.get("label", given.get("kto_tag"))
    (record,), report = read(row, "sequence" if label is None else "unpaired")
    assert flat(record) == wanted and record.numbers.get("label") == label
    assert (report.read, sum(report.dropped.values())) == (1, 0)


@pytest.mark.parametrize(
    "row",
    Template(r"""
{"prompt": "q", "chosen": "a", "rejected": "b"}
{"prompt": [$user], "chosen": [$bot], "rejected": [$other]}
{"chosen": [$user, $bot], "rejected": [$user, $other]}
{"prompt": "q", "chosen": [$user, $bot], "rejected": [$user, $other]}
{"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}
{"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"}
{"conversations": [$human], "chosen": $gpt, "rejected": {"from": "gpt", "value": "b"}}
{"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}
{"instruction": "q", "input": "", "output": ["a", "b"], "rewards": [1, 0]}
{"prompt": "q", "responses": ["b", "a"], "scores": [0.1, 0.9]}
{"prompt": "q", "responses": ["b", "a"], "ratings": [0.1, 0.9]}
{"prompt": "q", "responses": ["b", "a"], "ranks": [2, 1]}
""")
    .substitute(MESSAGES)
    .split("\n")[1:-1],
)
def test_preference_formats(read, read_flat, row):
    assert read_flat(row, "pair") == [PAIR]
    unpaired, _ = read(row, "unpaired")
    told = [(flat(record), record.numbers["label"]) for record in unpaired]
    assert told == [("[user: q] [assistant: a]", 1.0), ("[user: q] [assistant: b]", 0.0)]
    (prompt,), _ = read(row, "prompt")
    assert flat(prompt) == "[user: q] []" and prompt.row == json.loads(row)


@pytest.mark.parametrize(
    "row, prompt",
    table("""
{"prompt": "q", "chosen": "a", "rejected": "b"} => user: q
{"chosen": [$user, $bot, $user, $bot], "rejected": [$user, $bot, $user, $other]} => user: q, assistant: a, user: q
{"messages": [$user, $bot, $user], "chosen": $bot, "rejected": $other} => user: q, assistant: a, user: q
"""),
)
def test_one_side_of_a_pair_is_trained_on_as_the_refusal_advises(read_flat, row, prompt):
    """The chosen answer alone, and not the turns before it."""
    advice = r'to train on one set columns = \{completion = "chosen"\}'
    with pytest.raises(DataError, match=advice):
        read_flat(row, "sequence")
    found = read_flat(row, "sequence", columns={"completion": "chosen"})
    assert found == [f"[{prompt}] [assistant: a]"]


OWN = '"answer": 42 | "label": "cat" | "answers": ["4", "four"] | "response": {"x": 1} | "margin": "wide"'
FORMS = '"prompt": "q" | "messages": [$user] | "instruction": "q"'


@pytest.mark.parametrize("own", OWN.split(" | "))
@pytest.mark.parametrize("form", Template(FORMS).substitute(MESSAGES).split(" | "))
def test_what_stands_beside_a_prompt_is_the_rewards_own(read, form, own):
    row = f"{{{form}, {own}}}"
    (record,), _ = read(row, "prompt")
    assert flat(record) == "[user: q] []" and record.row == json.loads(row)


def test_ranked_lists(read):
    """They give all their pairs, or stay one list with its ranks; a pair is a list of two."""
    row = '{"prompt": "q", "completions": ["x", "y", "z"], "scores": [1, 3, 1]}'
    records, report = read(row, "pair")
    assert [[a[0].content for a in r.answers] for r in records] == [["y", "x"], ["y", "z"]]
    assert report.notes == {"rows that gave several examples": 1}
    margin = PAIR_ROW.replace("}", ', "margin": 0.5}')
    found = [
        (len(r.answers), r.ranks, r.numbers["margin"])
        for r in read(f"{row}\n{margin}", "ranked")[0]
    ]
    assert found == [(3, [1, 0, 1], 0), (2, [0, 1], 0.5)]


def test_tools_and_function_calls(read):
    (record,), _ = read(CALLING, "sequence")
    (messages,) = record.answers
    assert " ".join(m.role for m in messages) == "user assistant tool assistant"
    function = {"name": "f", "arguments": {"x": 1}}
    assert messages[1].tool_calls == ({"type": "function", "function": function},)
    assert record.tools[0]["function"]["name"] == "f"


CALLING = r"""{"tools": "[{\"name\": \"f\", \"description\": \"d\", \"parameters\": {}}]", "conversations": [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
    {"from": "observation", "value": "7"}, {"from": "gpt", "value": "a"}]}""".replace("\n", "")
THINKING = r"""{"image": null, "images": [], "messages": [{"role": "user", "content": "q"},
    {"role": "assistant", "content": null, "reasoning_content": "t", "audio": null,
     "function_call": {"name": "f", "arguments": "{\"x\": 1}"}},
    {"role": "tool", "content": "7", "tool_call_id": "c"},
    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]}
    ]}""".replace("\n", "")


def test_keys_of_messages_are_kept_for_the_template(read):
    (record,), _ = read(THINKING, "sequence")
    _, first, _, last = messages = record.answers[0]
    more = [{}, {"reasoning_content": "t"}, {"tool_call_id": "c"}, {}]
    assert [dict(m.more) for m in messages] == more
    assert first.tool_calls[0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert last.tool_calls[0]["id"] == "c"


@pytest.mark.parametrize(
    "prompt, begun",
    [
        (f'[{MESSAGES["user"]}, {{"role": "assistant", "content": "Sure, "}}]', "Sure, "),
        (r'"\n\nHuman: q\n\nAssistant: Sure,"', "Sure,"),
    ],
)
def test_a_prompt_that_ends_with_the_assistant_begins_its_answers(read, prompt, begun):
    def found(rest, kind="sequence"):
        (record,), _ = read(
            f'{{"prompt": {prompt}, {Template(rest).substitute(MESSAGES)}}}', kind
        )
        first = record.prompt[-1] if kind == "prompt" else record.answers[0][0]
        return flat(record), first.begun

    pair = '"chosen": "a", "rejected": [$other]'
    end = f"assistant: {begun}"
    assert found('"completion": "a"') == (f"[user: q] [{end}a]", len(begun))
    several = '"completion": [$bot, $user, $other]'
    assert found(several)[0] == f"[user: q] [{end}a, user: q, assistant: b]"
    assert found(pair, "pair")[0] == f"[user: q] [{end}a] [{end}b]"
    for asked in (pair, '"answer": "for the reward"'):
        assert found(asked, "prompt") == (f"[user: q, {end}] []", len(begun))
    empty = f'{{"prompt": {prompt}, "completion": " "}}'
    assert read(empty, "sequence")[1].dropped == {"empty answer": 1}
    # a new question, so the prompt's turn is a whole one
    later = found('"completion": [$user, $bot]')[0]
    assert later == f"[user: q, {end}] [user: q, assistant: a]"


def test_message_weights(read):
    said = '{"role": "user", "content": "q"%s}', '{"role": "assistant", "content": "a"%s}'
    more = ', "loss_weight": 0.0', ', "train": false', "", ', "weight": 0.5', "", ""
    turns = ", ".join(turn % extra for turn, extra in zip(said * 3, more))
    (record,), _ = read(f'{{"messages": [{turns}]}}', "sequence")
    assert [m.weight for m in record.answers[0]] == [0, 0, 1, 0.5, 1, 1]


@pytest.mark.parametrize(
    "row, kinds, sentence",
    table(r"""
{"instruction": "q"} => sequence => row 1 has no 'completion' or 'response' or 'answer' or
{"instruction": 3, "output": "a"} => sequence => row 1 'instruction' is int, not a string
[1] => sequence => row 1 is list, not an object
{"instruction": "q", "output": "a", "history": [["x"]]} => sequence => list of .user, assistant. pairs
{"instruction": "q", "output": "\ud800"} => sequence => unpaired surrogate
{"instruction": "q", "output": "a", "unused": "\ud800"} => prompt => unpaired surrogate
{"instruction": "q", "output": "a"} => pair => row 1 has no chosen and rejected
{"messages": [$user, $bot], "rejected_response": "b"} => pair ranked \
=> row 1 has no chosen and rejected answers or ranks .it has messages, rejected_response
{"instruction": "q", "output": "a"} => unpaired => row 1 has no 'label' or 'kto_tag'
{"foo": 1} => sequence => fit none of the formats
{"system": "s", "input": "q", "chosen": "a", "rejected": "b"} => pair ranked unpaired \
=> row 1 has no 'prompt' or 'question' or 'query' .it has chosen, input, rejected, system
{"system": "s", "completion": "a", "label": true} => sequence unpaired => row 1 has no 'prompt' or 'question'
{"text": "x"} => sequence => plain text, which only stage pt
{"messages": [$user, "text"]} => sequence => message 2 is str, not an object
{"messages": [$user, {"role": "wizard", "content": "x"}]} => sequence => message 2 has the role 'wizard'
{"conversation": [{"input": "q", "output": "a"}]} => sequence => role None .its keys are input, output.; known roles
{"messages": "[{'role': 'user', 'content': 'q'}]"} => sequence => messages are no list: Expecting property name
{"messages": "{}"} => sequence => messages are no list but dict
{"messages": [$user, {"role": "assistant"}]} => sequence => message 2 has no text content
{"messages": [$user, {"role": "assistant", "content": [{"type": "image", "value": "x"}]}]} \
=> sequence => type 'image'; only text
{"messages": [$user, {"role": "user", "content": "x", "weight": 1}]} \
=> sequence => gives the weight 1 to a user message
{"messages": [$user, {"role": "assistant", "content": "x", "weight": -1}]} => sequence => has the weight -1; give 0
{"messages": [$user, {"from": "function_call", "value": "not json"}]} => sequence => tool call as JSON
{"instruction": "q", "output": "a", "images": ["a.png"]} \
=> sequence => the column 'images', but only text .*columns = .unused = .images
{"text": "x", "audio": {"path": "a.wav"}} => text => the column 'audio'
{"prompt": "q", "chosen": "a", "rejected": "b", "video": "a.mp4"} => prompt => the column 'video'
{"messages": [$user, $bot], "loss_mask": [1]} => sequence => 2 messages but another number of marks in 'loss_mask'
{"messages": [$user, $bot], "loss_mask": [1, 1]} => sequence => message 1 gives the weight 1 to a user message
{"messages": [$user, $bot], "loss_mask": [0, "yes"]} => sequence => not a finite number
{"prompt": "q", "completion": "a", "loss_mask": [0, 1]} => sequence => not a finite number
{"prompt": "q", "completion": "a", "train": "maybe"} => sequence => 'train' is 'maybe', not a finite number
{"prompt": "q", "completion": "a", "weight": "0.5"} => sequence => has the weight 0.5, but only messages and sources
{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1e300} => ranked => 'margin' is 1e[+]300, not a finite number
{"messages": [$user, {"role": "assistant", "content": "x", "weight": 1e300}]} => sequence => 'weight' is 1e[+]300, not a
{"messages": [$user, {"role": "assistant", "content": "x", "weight": 1e7}]} \
=> sequence => message 2 has the weight 1e[+]07; give 0, or one from 1e-06 to 1e[+]06
{"messages": [$user, {"role": "assistant", "content": "x", "weight": 1e-300}]} \
=> sequence => message 2 has the weight 1e-300; give 0
{"messages": [$user, {"role": "assistant", "content": "x", "weight": 1e5, "loss": 1e5}]} \
=> sequence => message 2 has the weight 1e[+]10; give 0
{"messages": [$user, {"role": "assistant", "content": "x", "value": "y"}]} \
=> sequence => message 2 has 'content' and 'value', which mean the same, with different values; remove one
{"messages": [$user, {"role": "assistant", "from": "human", "content": "x"}]} => sequence => has 'role' and 'from'
{"messages": [$user, $parts {"type": "text", "text": "x"}, {"type": "reasoning", "text": "y"}]}]} \
=> sequence => message 2 has thinking in its content; only an assistant's can have it, before all text
{"messages": [$user, $parts {"type": "thinking", "thinking": "y"}], "thinking": "z"}]} \
=> sequence => message 2 has thinking in its content
{"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "y"}]}, $bot]} \
=> sequence => message 1 has thinking in its content
{"prompt": "q", "completion": "a", "weight": 0.5} => sequence => has the weight 0.5, but only messages and sources
{"messages": [$user, $bot], "loss": 0.5} => sequence => has the weight 0.5, but only messages and sources
{"messages": [$user, $bot], "chat_template_kwargs": [1]} => sequence => 'chat_template_kwargs' is not JSON
{"messages": [$user, $bot], "chat_template_kwargs": "{"} => sequence => 'chat_template_kwargs' is not JSON
{"messages": [$user, $bot], "tools": 5} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": "5"} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": [5]} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": true} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": "\"f\""} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": "[1"} => sequence => 'tools' must be a list of tool descriptions
{"messages": [$user, $bot], "tools": [{"name": "f"}], "functions": [{"name": "f"}]} \
=> sequence => has both 'tools' and 'functions', which mean the same
{"messages": [$user, {"role": null, "content": "a"}]} => sequence => message 2 has the role
{"messages": [$user, {"role": [], "content": "a"}]} => sequence => message 2 has the role
{"messages": [$user, {"role": {}, "content": "a"}]} => sequence => message 2 has the role
{"messages": [$user, {"role": 5, "content": "a"}]} => sequence => message 2 has the role
{"messages": [{"role": "user", "content": "q", "tool_calls": [{"name": "f"}]}, $bot]} => sequence => \
message 1 has calls in a user message; only an assistant's can have them
{"messages": [$user, $bot, {"role": "tool", "content": "r", "function_call": {"name": "f"}}]} => sequence => \
message 3 has calls in a tool message
{"messages": [$user, {"role": "assistant", "tool_calls": 5}]} => sequence => message 2 has a tool call without a name
{"messages": [$user, {"role": "assistant", "tool_calls": true}]} => sequence => a tool call without a name
{"messages": [$user, {"role": "assistant", "tool_calls": "{"}]} => sequence => tool_calls that are not JSON
{"messages": [$user, {"role": "assistant", "tool_calls": "x"}]} => sequence => tool_calls that are not JSON
{"messages": [$user, {"role": "assistant", "tool_calls": {"a": 1}}]} => sequence => a tool call without a name
{"messages": [$user, {"role": "assistant", "tool_calls": [5]}]} => sequence => a tool call without a name
{"messages": [$user, $call "{\"x\": "}}]}]} => sequence => message 2 has a tool call whose arguments are not JSON
{"messages": [$user, $call "print(1)"}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call "\"{\\\"x\\\": \""}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call "[1]"}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call [1]}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call 5}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call "\"text\""}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call "{\"x\": 1, \"x\": 2}"}}]}]} => sequence => a tool call whose arguments are not JSON
{"messages": [$user, $call "{\"x\": \"\\ud800\"}"}}]}]} => sequence => a tool call whose arguments are not JSON
{"prompt": "q", "responses": ["a", "b"], "label": true} => pair ranked unpaired => 2 answers but not one order of them
{"prompt": "q", "responses": ["a", "b"], "scores": [1], "label": true} => pair ranked unpaired => but not one order
{"prompt": "q", "responses": ["a", "b"], "scores": 3, "label": true} => pair ranked unpaired => but not one order
{"prompt": "q", "responses": ["a", "b"], "scores": [1, 2], "rewards": [2, 1], "label": 1} \
=> pair ranked unpaired => row 1 has 2 answers but not one order of them; give
{"prompt": "q", "responses": ["a", "b"], "scores": [1, 2], "ranks": [1, 2], "label": 1} \
=> pair ranked unpaired => row 1 has 2 answers but not one order of them; give
"""),
)
def test_bad_rows_are_errors_that_name_the_row(read, tmp_path, row, kinds, sentence):
    for kind in kinds.split():
        with pytest.raises(DataError, match=sentence) as caught:
            read(row, kind)
        assert str(tmp_path / "rows.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    "row, kind, reason",
    table("""
{"instruction": "q", "output": " "} => sequence => empty answer
{"instruction": "", "output": "a"} => sequence => empty prompt
{"instruction": "q", "output": "a", "label": false} => sequence => its label is false
{"instruction": "q", "output": "a", "label": "False"} => sequence => its label is false
{"instruction": "q", "output": "a", "kto_tag": 0} => sequence => its label is false
{"instruction": "q", "output": "a", "label": "spam", "kto_tag": false} => sequence => its label is false
{"instruction": "q", "output": "a", "train": false} => sequence => it is marked as not to be trained
{"instruction": "q", "output": "a", "loss_weight": 0, "train": true} => sequence => it is marked as not to be trained
{"instruction": "q", "chosen": "a", "rejected": "a"} => pair => chosen and rejected are the same
{"instruction": "q", "chosen": "a", "rejected": ""} => pair => empty answer
{"prompt": "q", "chosen": [$user, $bot], "rejected": "b"} \
=> pair => an answer does not begin and end with an assistant message
"""),
)
def test_rows_without_use_are_dropped_and_reported(read, tmp_path, row, kind, reason):
    records, report = read(row, kind)
    assert records == [] and report.dropped == {reason: 1}
    assert report.examples[reason] == [f"{tmp_path / 'rows.jsonl'} row 1"]
    assert reason in str(report) and "row 1" in str(report)


def test_transcripts_with_different_prompts_or_empty_answers_are_dropped(read):
    opened = "\n\nHuman: q\n\nAssistant: a\n\nHuman: more\n\nAssistant:"
    other = "\n\nHuman: q\n\nAssistant: a"
    rejected = (opened + " y", other, opened, opened + " y\n\nHuman: bye")
    records, report = read([{"chosen": opened + " x", "rejected": r} for r in rejected], "pair")
    kept = "[user: q, assistant: a, user: more] [assistant: x] [assistant: y]"
    assert [flat(r) for r in records] == [kept]
    assert report.dropped == {
        "the prompts of chosen and rejected differ": 1,
        "empty answer": 1,
        "rejected does not end with an assistant message": 1,
    }


def test_broken_json_line_is_named_or_dropped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f"{GOOD}\n\n{{broken\n{GOOD}\n")
    refused(r"x.jsonl row 3 is not valid JSON", path, "sequence")
    records, report = load(path, "sequence", bad_rows="drop")
    assert len(records) == 2 and report.dropped == {"is not valid JSON": 1} and report.read == 3
    path.write_bytes(b'{"text": "\xff"}\n')
    refused(r"row 1 is not valid UTF-8", path)


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
    table = datasets.Dataset.from_list(rows, split="dev")
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in "lines.json a.jsonl.gz folder a.csv a.parquet saved".split():
        records, _ = load(tmp_path / name, "sequence")
        assert [flat(r) for r in records] == expected, name
        assert [where[-5:] for where in places(tmp_path / name)] == ["row 1", "row 2", "row 3"]
    # one that was saved without splits is named as what it was taken from, too
    assert len(load(tmp_path / "saved", "sequence", split="dev")[0]) == 3
    refused("saved has no split 'test', only train, dev", tmp_path / "saved", split="test")


@pytest.mark.parametrize("name", ["b.jsonl.zst", "deep/b.csv.xz", "b.txt.bz2", "b.json.zip"])
def test_a_file_that_is_not_unpacked_is_named_and_never_passed_over(tmp_path, name):
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"packed")
    for place in (tmp_path, tmp_path / name):
        refused(rf"/{name} is compressed in a way that is not read", place)
    (tmp_path / name).rename(tmp_path / "notes.zip")  # no data
    assert texts(tmp_path) == ["a"]


def test_csv_fields_beyond_the_header_and_columns_of_one_name_are_told(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,id\na,1\nb,2,3\n")
    refused("row 2 has more fields than the first line names columns", file)
    records, report = load(file, bad_rows="drop")
    assert [record.text for record in records] == ["a"] and sum(report.dropped.values()) == 1
    file.write_text("text,id,text\na,1,b\n")
    refused("a.csv has two columns of the name 'text'; rename one", file)


@pytest.mark.parametrize("name, comma", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_line_break_without_quotation_marks_makes_no_rows_of_half_a_text(
    tmp_path, name, comma
):
    file = tmp_path / name
    file.write_text("text,id\na,1\nhalf a\ntext,2\n\nb,\n".replace(",", comma))
    refused(f"{name} row 2 has fewer fields than the first line names columns; write", file)
    records, report = load(file, bad_rows="drop")
    assert [record.text for record in records] == ["a", "text", "b"]
    assert list(report.examples.values()) == [[f"{file} row 2"]]


def test_the_index_that_pandas_writes_is_no_label_and_no_prompt(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(",prompt,completion\n0,p,c\n1,q,d\n")
    records, report = load(file, "sequence")
    expected = ["[user: p] [assistant: c]", "[user: q] [assistant: d]"]
    assert [flat(record) for record in records] == expected
    assert not report.dropped and not report.notes
    refused("row 1 has no 'label' or 'kto_tag'", file, "unpaired")
    file.write_text(",completion\n0,c\n")
    refused("row 1 has no 'prompt' or 'question' or 'query'", file, "sequence")


# a folder's files by split; those of "none" belong to none
LAYOUTS = {
    "shards": "train: data/train-00000-of-00002.jsonl data/train-00001-of-00002.jsonl"
    " | test: data/test-00000-of-00001.jsonl",
    "shards of any name": "test_sft: data/test_sft-00000-of-00001.jsonl"
    " | train_sft: data/train_sft-00000-of-00001.jsonl",
    "names": "train: train.jsonl training_2.jsonl | validation: dev.jsonl | test: my-eval.jsonl | none: more.jsonl",
    "names below": "train: data/train.jsonl | validation: data/val.jsonl",
    "folders": "train: train/a.jsonl train/b/test.jsonl | test: testing/a.jsonl",
    "whole words only": "train: latest.jsonl trainer.jsonl evaluated/a.jsonl",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_gives_the_split_that_the_hub_would_give(tmp_path, name):
    folder = tmp_path / "folder"
    parts = (part.split(": ") for part in LAYOUTS[name].split(" | "))
    layout = {split: named.split() for split, named in parts}
    files = {file for own in layout.values() for file in own}
    splits = [split for split in layout if split != "none"]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / file, [{"text": file}])
    (folder / "eval").mkdir()
    # names of splits, but no data that is read
    others = {"eval/train.py", "eval/a.JSONL", "eval/a.arrow", "README.md"}
    for file in others:
        (folder / file).touch()
    for split in splits:
        records, report = load(folder, split=split)
        assert [record.text for record in records] == sorted(layout[split])
        left = files - {*layout[split]} | others
        assert report.notes == {f"files left out, not data of split {split}": len(left)}
        assert sum(str(folder / file) in str(report) for file in left) == min(len(left), 5)
    only = rf"/folder has no split 'other', only {', '.join(splits)}; set split to one of them"
    refused(only, folder, split="other")
    with pytest.raises(DataError, match="has no split 'other'"):
        source_digest(Source(str(folder), split="other"), tmp_path)
    if "train" in layout:
        assert texts(folder) == sorted(layout["train"])
    shutil.rmtree(folder / "eval")  # the hub's loader would take it for a split without data
    for split in splits:
        hub = datasets.load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "cache"))
        assert sorted(hub["text"]) == sorted(layout[split])


def test_splits_of_a_saved_folder_and_of_a_folder_without_data_for_the_hub(tmp_path):
    rows = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    assert [texts(tmp_path / "saved", split=name) for name in rows] == [["train"], ["test"]]
    (tmp_path / "a.txt").write_text("a")
    refused(
        "a.txt has no split 'test', only train; set split to one",
        tmp_path / "a.txt",
        split="test",
    )
    only = r"^/.*/saved has no split 'other', only train, test; set split to one of them"
    refused(only, tmp_path / "saved", split="other")
    (tmp_path / "few").mkdir()
    # a name that the hub never takes for data
    write_rows(tmp_path / "few/config.json", '{"text": "a"}')
    assert texts(tmp_path / "few") == ["a"]


def test_hub_data_are_those_of_the_commit_that_was_asked_for(
    tokenizer, open_sources, tmp_path, monkeypatch, capsys
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
        return open_sources({"path": path, "split": "test", "revision": "v1"}, "text")

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


HUB = "org/data train"


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
    assert repeated_data([Source("org/data")], [Source("org/data", max_examples=3)]) == [HUB]


def test_sources_and_their_mistakes(tmp_path):
    given = ["a.jsonl", {"path": "b.jsonl", "weight": 2.0, "format": None}]
    assert parse_sources(given) == [Source("a.jsonl"), Source("b.jsonl", weight=2.0)]
    (tmp_path / "saved").mkdir()
    for name in ("state", "dataset_info"):
        (tmp_path / f"saved/{name}.json").write_text("{}")
    absent = Source(str(tmp_path / "absent.jsonl"))
    assert absent.path in missing_sources([absent])[0]
    (tmp_path / "x.docx").write_text("")
    for path, message in (
        (absent.path, "does not exist"),
        (tmp_path / "x.docx", "x.docx is none of"),
        (tmp_path / "saved", r"/saved cannot be read: there is no '_\w+' in it$"),
    ):
        refused(message, path)


def test_text_file_with_separator_is_several_documents(tmp_path):
    path = tmp_path / "documents.txt"
    path.write_text("one\n===\ntwo\n\nlines\n===\n \n===\nthree")
    records, _ = load(path, separator="\n===\n")
    assert [r.text for r in records] == ["one", "two\n\nlines", "three"]
    assert len({*places(path, separator="\n===\n")}) == 3
    assert texts(path, separator="\n===\n", max_examples=2) == ["one", "two\n\nlines"]
