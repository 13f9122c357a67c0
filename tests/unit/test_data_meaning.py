"""What is trained is what the row said: marks, ranks, calls, template variables, and columns that parquet widened."""

import json

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests import rows_of
from tests.data_case import content
from tests.unit.test_data_chat import PLAIN_CHATML, TOOLS
from ulysses.data import DataError
from ulysses.data.read.chat import ChatTemplate

ASK = {"role": "user", "content": "q"}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def shown(tokenizer, open_rows):
    """A function from rows to the texts of their sequences, trained tokens in brackets."""

    def shown(rows, kind="sequence", **more):
        found = []
        for example in open_rows(rows, kind, 4096, **more):
            for sequence in example.sequences:
                ends = np.flatnonzero(np.diff(sequence.loss_weights != 0)) + 1
                parts = np.split(sequence.tokens, ends)
                marks = np.split(sequence.loss_weights != 0, ends)
                found.append("".join(
                    f"[{tokenizer.decode(part)}]" if is_trained[0] else tokenizer.decode(part)
                    for part, is_trained in zip(parts, marks)))  # fmt: skip
        return found

    return shown


# ------------------------------------------------------------------------------------------------------------- marks

MARKS = "loss_weight weight train loss loss_mask training trainable train_turn train_on_turn".split()


@pytest.mark.parametrize("off", [0, False, 0.0])
@pytest.mark.parametrize("name", MARKS)
def test_an_answer_that_is_marked_is_not_trained(shown, name, off):
    """By a mark of its own, or by a list of its row."""
    on = type(off)(1)
    rows = [{"messages": [ASK, said("one", **{name: off}), ASK, said("two", **{name: on})]},
            {"messages": [ASK, said("one"), ASK, said("two")], name: [off, off, off, on]},
            {"messages": [ASK, said("one"), ASK, said("two")], name: [None, off, None, None]},
            {"conversations": [ASK, said("one"), ASK, said("two", **{name: on})],
             name: [off, off, off, on]}]  # fmt: skip
    for text in shown(rows):
        assert "[" in text and "one<|im_end|>" in text.split("[")[0]
        assert text.split("[")[1] == "two<|im_end|>]"


def test_weights_of_a_list_are_those_of_the_messages(open_rows):
    first, *more = open_rows([
        {"messages": [ASK, said("one"), ASK, said("two")], "loss_weight": [0, 0.25, 0, 1]},
        {"messages": [ASK, said("one", weight=0.25, train=True), ASK, said("two")]},
        {"messages": [ASK, said("one", weight=0.5), ASK, said("two")], "loss_mask": [0, 0.5, 0, 1]}])  # fmt: skip
    assert all(content(*first.sequences) == content(*each.sequences) for each in more)
    assert set(first.sequences[0].loss_weights) == {0, 0.25, 1}


# ----------------------------------------------------------------------------------------------------- ranks, pairs


WHOLE = {"prompt": "q", "prompt_id": "1", "chosen": [ASK, said("good")], "rejected": [ASK, said("bad")],
         "messages": [ASK, said("good")], "score_chosen": 9.0, "score_rejected": 2.0}  # fmt: skip
ANSWERS = {**WHOLE, "chosen": [said("good")], "rejected": [said("bad")]}
TEXTS = {"messages": [ASK, said("good")], "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize("row", [WHOLE, ANSWERS, TEXTS], ids=["whole", "answers", "texts"])
def test_messages_beside_a_pair_are_its_prompt_and_the_chosen_answer(shown, row):
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    both = [f"{prompt}[good<|im_end|>]", f"{prompt}[bad<|im_end|>]"]
    for kind in ("pair", "ranked", "unpaired"):
        assert shown([row], kind) == both
    assert shown([row]) == both[:1]
    assert shown([row], "prompt") == [prompt]


def test_messages_beside_answers_may_end_with_any_of_them(shown):
    """Also with the rejected one, which the answers then do not continue."""
    talk = [ASK, said("bad")]
    pair = {"messages": talk, "chosen": "good", "rejected": "bad"}
    ranked = {"conversations": talk, "completions": ["good", "bad"], "scores": [2, 1]}
    for kind in ("pair", "ranked", "unpaired"):
        assert shown([pair], kind) == shown([ranked], kind) == shown([TEXTS], kind)
    for row in (pair, WHOLE | {"messages": talk}):
        with pytest.raises(DataError, match="holds chosen and rejected answers"):
            shown([row])
    other = {"messages": [ASK, said("another")]}
    for row in (pair, ranked | {"conversations": None}):
        with pytest.raises(
            DataError, match="row 1 has messages that end with an answer besides"
        ):
            shown([row | other], "ranked")
    # a prefill
    prompt = {"prompt": other["messages"], "messages": None}
    assert shown([pair | prompt], "pair")[0].endswith("assistant\nanother[good<|im_end|>]")


SYSTEMS = """
own =>  =>  => own
own =>  => own => own
own => other =>  => own
 => other =>  => other
 => other => own => own
own => other => own => own
own =>  => other => dropped
own => own => other => other
"""


@pytest.mark.parametrize("of_prompt, column, inside, seen", rows_of(SYSTEMS))
def test_no_system_prompt_is_lost_beside_whole_conversations(
    shown, of_prompt, column, inside, seen
):
    """A column is for conversations that have none, and is told where it is not read."""
    outer, inner = (
        [{"role": "system", "content": text}, ASK] if text else [ASK]
        for text in (of_prompt, inside)
    )
    pair = {side: [*inner, said(text)] for side, text in (("chosen", "a"), ("rejected", "b"))}
    row = {"prompt": outer, "system": column, **pair}
    if seen == "dropped":
        with pytest.raises(DataError, match="the prompt differs from the one inside chosen"):
            shown([row], "pair")
        return
    prompt = f"<|im_start|>system\n{seen}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    assert shown([row], "pair") == [
        f"{prompt}<|im_start|>assistant\n[{text}<|im_end|>]" for text in "ab"
    ]


@pytest.mark.parametrize("kind", ["pair", "ranked", "unpaired"])
def test_marks_of_answers_that_are_compared_or_labelled(shown, open_rows, kind):
    """An answer that is not to be trained is no answer, and a reward model weighs none."""
    row = {"prompt": "q", "label": True}
    sides = {"completion": [said("a", weight=0)]}
    if kind != "unpaired":
        sides = {"chosen": [said("a")], "rejected": [said("b", train=False)]}
    with pytest.raises(DataError, match="it is marked as not to be trained: 1"):
        shown([row | sides], kind)
    turns = [said("a", weight=0.5), ASK, said("b")], [said("a"), ASK, said("b", weight=0)]
    for answer in turns:
        sides = {"completion": answer}
        if kind != "unpaired":
            sides = {"chosen": answer, "rejected": [said("c")]}
        if kind != "ranked":
            weights = {*open_rows([row | sides], kind)[0].sequences[0].loss_weights}
            assert weights == {0, *(each.get("weight", 1) for each in answer[::2])}
            continue
        with pytest.raises(DataError, match="row 1 gives an answer a weight, but a reward"):
            shown([row | sides], kind)


WRITTEN = """
[{"role": "user", "content": "q"}] => told
[ {'content': 'q', 'from': 'human'} ] => told
[{"role": "wizard"}, "user"] =>
[{"content": "role: user"}] =>
Write [{"role": "user"}]. =>
"""


@pytest.mark.parametrize("text, told", rows_of(WRITTEN))
@pytest.mark.parametrize("kind", ["sequence", "pair", "unpaired"])
def test_messages_that_a_file_holds_as_text_are_told(open_rows, kind, text, told):
    for key in ("prompt", "chosen"):
        row = {"prompt": "q", "chosen": "a", "rejected": "b", key: text}
        if kind == "sequence":
            row["completion"] = row.pop("chosen")
            del row["rejected"]
        notes = open_rows([row], kind, cache=key).report.notes
        name = "a text that looks like a list of messages was read as text"
        assert (name in notes) == bool(told)


@pytest.mark.parametrize("more", [{}, {"messages": WHOLE["messages"]}])
def test_a_completion_that_holds_its_prompt_does_not_repeat_it(shown, more):
    row = {"prompt": "q", "completion": WHOLE["chosen"], **more}
    (text,) = shown([row])
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[good<|im_end|>]"


# -------------------------------------------------------------------------------------------- columns with a meaning


@pytest.mark.parametrize("kind", ["sequence", "pair", "unpaired", "prompt"])
def test_variables_of_the_template_are_read(shown, kind):
    """The empty block of thinking is a part of the prompt, as at inference."""
    row = {"prompt": [ASK], "label": True}
    row |= {"chosen": "a", "rejected": "b"} if kind == "pair" else {"completion": "a"}
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    for variables in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        text = shown([{**row, "chat_template_kwargs": variables}], kind, template="qwen3")[0]
        assert text == prompt + "<think>\n\n</think>\n\n" + "[a<|im_end|>]" * (kind != "prompt")
    for variables in ({}, None, {"enable_thinking": True}):
        text = shown([{**row, "chat_template_kwargs": variables}], kind, template="qwen3")[0]
        assert text == prompt + "[<think>\n\n</think>\n\na<|im_end|>]" * (kind != "prompt")


# What Qwen3.5's own template does with thinking: it opens a turn with it, and forgets that of earlier questions. Those
# of 3.6 and 3.8 may or do keep it (KEPT). The last writes how much to think (EFFORT), and unlike the others (SPLIT) it
# takes a message's content as it is.
OPENED = """{% set last = namespace(at=0) %}{% set effort = "" %}
{%- for m in messages %}{% if m.role == "user" %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}EFFORT
{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- set parts = namespace(think=m.reasoning_content if m.reasoning_content is string else "", text=m.content) %}
SPLIT
{%- set block = "<think>\n" + parts.think.strip() + "\n</think>\n\n" %}
{%- set calls = (m.tool_calls or []) | map(attribute="function.name") | join %}
{%- set text = parts.text.strip() + calls + "<|im_end|>\n" %}
{{- "<|im_start|>assistant\n" + (block if KEPTloop.index0 > last.at else "") + text }}
{%- else %}{{ "<|im_start|>" + m.role + "\n" + (effort if loop.first else "") + m.content + "<|im_end|>\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n<think>\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ "\n</think>\n\n" }}{% endif %}{% endif %}"""
SPLIT = """{%- if "</think>" in m.content %}
{%- set parts.think = m.content.split("</think>")[0].split("<think>")[-1] %}
{%- set parts.text = m.content.split("</think>")[-1] %}
{%- endif %}"""
EFFORT = """{% set level = reasoning_effort | default("high") %}
{%- if level not in ("high", "low") %}{{ raise_exception("no such effort: " + level) }}{% endif %}
{%- if enable_thinking is undefined or enable_thinking %}{% set effort = "Think: " + level + ". " %}{% endif %}"""
TEMPLATES = {
    "3.5": ("", "", SPLIT),
    "3.6": ("(preserve_thinking is defined and preserve_thinking is true) or ", "", SPLIT),
    "3.8": ("preserve_thinking is undefined or preserve_thinking is true or ", EFFORT, ""),
}


def written(kept, effort, split):
    """Return the template with its parts."""
    return OPENED.replace("KEPT", kept).replace("EFFORT", effort).replace("SPLIT", split)


@pytest.fixture(params=TEMPLATES)
def generation(request, tmp_path):
    """Such a template's name and file."""
    (tmp_path / "t.jinja").write_text(written(*TEMPLATES[request.param]))
    return request.param, str(tmp_path / "t.jinja")


def test_thinking_is_kept_or_forgotten_as_the_template_says(shown, generation):
    name, template = generation
    thinks = [said("<think>\nt\n</think>\n\none"), said("two", reasoning_content="u")]
    row = {"messages": [ASK, thinks[0], ASK, thinks[1]]}
    effort = "Think: high. " * (name == "3.8")
    opened = "<|im_start|>assistant\n<think>\n"
    asked = f"<|im_start|>user\n{effort}q<|im_end|>\n{opened}"
    again = f"\n<|im_start|>user\nq<|im_end|>\n{opened}[u\n</think>\n\ntwo<|im_end|>]"
    whole = [f"{asked}[t\n</think>\n\none<|im_end|>]{again}"]
    forgotten = asked.removesuffix("<think>\n") + "one<|im_end|>" + again
    apart = [forgotten, f"{asked}[t\n</think>\n\none<|im_end|>]"]
    assert shown([row], template=template) == (whole if name == "3.8" else apart)
    if name != "3.5":
        for keep, wanted in ((True, whole), (False, apart)):
            given = {"chat_template_kwargs": {"preserve_thinking": keep}}
            assert shown([row], template=template, **given) == wanted
            assert shown([row | given], template=template) == wanted


def test_thinking_beside_a_call(shown, generation):
    _, template = generation
    call = said(
        "<think>\nt\n</think>\n\n", tool_calls=[{"function": {"name": "f", "arguments": {}}}]
    )
    (text,) = shown([{"messages": [ASK, call]}], template=template)
    assert text.endswith("assistant\n<think>\n[t\n</think>\n\nf<|im_end|>]")


def test_an_answer_with_thinking_is_dropped_where_the_prompt_has_closed_it(
    open_rows, shown, generation
):
    _, template = generation
    rows = [{"prompt": "q", "completion": text} for text in ("<think>\nt\n</think>\n\na", "b")]
    off = {"enable_thinking": False}
    [text] = shown(rows, template=template, chat_template_kwargs=off)
    assert text.endswith("<think>\n\n</think>\n\n[b<|im_end|>]")
    found = open_rows(rows, length=4096, template=template, chat_template_kwargs=off)
    assert found.report.kept == 1 and [*found.report.dropped.values()] == [1]
    assert "where it opens the assistant's turn" in next(iter(found.report.dropped))


def test_variables_that_the_template_does_not_read_or_refuses_stop_the_run(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(written("", EFFORT, SPLIT))
    for variables, complaint in (
        (
            {"thinking": True},
            "data.chat_template_kwargs sets 'thinking', which the chat template",
        ),
        ({"messages": []}, "sets 'messages', which the chat template"),
        ({"reasoning_effort": "vast"}, "cannot render one question: .* no such effort: vast"),
    ):
        with pytest.raises(DataError, match=complaint):
            ChatTemplate(tokenizer, str(tmp_path / "t.jinja"), variables)


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.parametrize(
    "of_run, of_source, thinks",
    [({}, {}, "11110"), (OFF, {}, "00010"), ({}, OFF, "00010"), (OFF, ON, "11110"), (ON, OFF, "00010")],
)  # fmt: skip
def test_of_the_variables_the_nearest_one_holds(
    shown, open_rows, tmp_path, of_run, of_source, thinks
):
    """A null is none; and what is not set leaves cached tokens where they were."""
    given = {}, None, {"enable_thinking": None}, ON, OFF
    rows = [{"prompt": "q", "completion": "a", "chat_template_kwargs": own} for own in given]
    more = {"template": "qwen3", "source": {"chat_template_kwargs": of_source}}
    texts = shown(rows, chat_template_kwargs=of_run, **more)
    assert "".join(str(int("[<think>" in text)) for text in texts) == thinks
    open_rows(rows, length=4096, template="qwen3")
    assert len([*tmp_path.glob("cache/tokenized/*")]) == 1 + bool(of_run or of_source)


def test_a_sources_system_prompt_is_for_conversations_without_one(shown):
    own, talk = {"role": "system", "content": "own"}, [ASK, said("a")]
    rows = [{"messages": talk}, {"messages": talk, "system": "own"}, {"messages": [own, *talk]}]
    said_to = [
        text.split("<|im_end|>")[0] for text in shown(rows, source={"system": "be kind"})
    ]
    assert said_to == [f"<|im_start|>system\n{system}" for system in ("be kind", "own", "own")]


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_prompt_beside_messages_with_another_is_told(open_rows, key):
    talk = [{"role": "system", "content": "own"}, ASK, said("a")]
    rows = [
        {"messages": talk, key: "other"},
        {"messages": talk, key: "own"},
        {"messages": talk},
    ]
    notes = open_rows(rows, source={"system": "be kind"}).report.notes
    assert notes == {"the column 'system' was not read": 1}


def test_a_variable_cannot_forge_a_turn(tmp_path, open_rows, tokenizer):
    (tmp_path / "t.jinja").write_text("{{ note }}" + PLAIN_CHATML)
    row = {"messages": [ASK, said("a")], "chat_template_kwargs": {"note": "<|im_end|>"}}
    (sequence,) = open_rows([row], template=str(tmp_path / "t.jinja"))[0].sequences
    assert [*sequence.tokens].count(tokenizer.eos_token_id) == 2


OTHER = {"'label' is neither true nor false, and was not read": 1}


@pytest.mark.parametrize("label", [0, 1, "spam", 0.5, "0", 7])
def test_a_label_of_another_kind_is_not_ours_in_sft(open_rows, label):
    report = open_rows([{"prompt": "q", "completion": "a", "label": label}]).report
    assert report.kept == 1 and not report.dropped and report.notes == OTHER


UNREAD = """
instruction output context => sequence => context
question answer context enable_thinking => prompt => context enable_thinking
prompt completion reasoning thinking => sequence => reasoning thinking
prompt chosen rejected input => pair => input
prompt chosen rejected margin => pair => margin
prompt chosen rejected margin => ranked =>
prompt completion tool_calls function_call date => sequence => function_call tool_calls
messages system_message documents history enable_thinking => sequence => \
documents enable_thinking history system_message
question answer solution => sequence => solution
question answer solution => prompt =>
prompt completion label reasoning_content => unpaired => reasoning_content
text documents enable_thinking => text => documents
prompt completion tool_defs tool_schema cot => sequence => cot tool_defs tool_schema
prompt completion response question => sequence => question response
question answer output completions => sequence => completions output
messages conversations prompt text => sequence => conversations prompt text
instruction output prompt response => sequence => output prompt
messages response text => sequence => response text
messages chosen => sequence => chosen
messages completion label => unpaired => completion
messages Tools apis function-list => sequence => Tools apis function-list
prompt chosen rejected completion instruction => pair => completion prompt
prompt question answer => prompt => question
text content => text => content
prompt completion label kto_tag tool_functions => unpaired => kto_tag tool_functions
prompt chosen rejected label => pair => label
prompt chosen rejected kto_tag label => unpaired => kto_tag label
instruction input output history users is_tool system_prompt => sequence =>
prompt completion id tools => sequence =>
"""


@pytest.mark.parametrize("keys, kind, unread", rows_of(UNREAD))
def test_a_column_that_means_something_elsewhere_is_counted(open_rows, keys, kind, unread):
    unread = unread.split()
    values = {"messages": [ASK, said("a")], "history": [["q", "a"]], "label": True, "tools": []}
    values |= {"enable_thinking": False, "rejected": "b", "margin": 0.5}
    row = {key: values.get(key, "c" if key in unread else "a") for key in keys.split()}
    rows = [row, row, row | dict.fromkeys(unread), row | dict.fromkeys(unread, "")]
    notes = open_rows(rows, kind, template="qwen3").report.notes
    said_of = {f"the column {name!r} was not read": 2 for name in unread}
    assert {name: count for name, count in notes.items() if "column" in name} == said_of
    read = {"columns": {f"other{i}": name for i, name in enumerate(unread)}}
    notes = open_rows([row], kind, template="qwen3", source=read, cache="other").report.notes
    assert not any("column" in name for name in notes)


TWICE = """
{"prompt": "q", "completion": "a", "response": "a", "question": "q"}
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "prompt": "q"}
{"messages": [{"role": "user", "content": "q", "from": "human", "value": "q"}, \
{"role": "assistant", "content": "a", "value": "a"}]}
{"prompt": "", "question": "q", "completion": "", "response": "a"}
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "value": "a"}]}
"""


@pytest.mark.parametrize("row", [json.loads(text) for [text] in rows_of(TWICE)])
def test_what_stands_in_a_row_twice_is_read_once_and_not_told(open_rows, shown, row):
    assert shown([row]) == shown([{"prompt": "q", "completion": "a"}])
    assert not open_rows([row]).report.notes


PARTS = """
{"type": "reasoning", "text": "t"}
{"type": "reasoning", "reasoning": "t"}
{"type": "thinking", "thinking": "t", "signature": "s"}
{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}
"""


@pytest.mark.parametrize("part", [json.loads(text) for [text] in rows_of(PARTS)])
def test_parts_of_thinking_are_thinking(shown, part):
    content = [part, {"type": "text", "text": "a"}]
    (found,) = shown([{"messages": [ASK, said(content)]}], template="qwen3")
    (wanted,) = shown([{"messages": [ASK, said("a", reasoning_content="t")]}], template="qwen3")
    assert found == wanted and "<think>\nt\n</think>\n\na<" in found


def test_marks_of_csv_are_numbers_and_switches(tmp_path, open_rows):
    marks = {"1": 1, "True": 1, "1.0": 1, "": 1, "0": 0, "false": 0, "0.0": 0}
    text = "".join(f"q,a,{mark}\n" for mark in marks)
    data = open_rows(f"prompt,completion,weight\n{text}", name="rows.csv")
    assert len(data) == sum(marks.values())
    assert data.report.dropped == {"it is marked as not to be trained": 3}


# ------------------------------------------------------------------------------------------------------------- calls


def calling(arguments, **more):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [ASK, said(None, tool_calls=[call], **more)], "tools": TOOLS}


# DeepSeek's kind: text is concatenated, and content that is not null hides the calls
CONCATENATES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and NULL %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + c.function.arguments }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("null", ["m.content is none", "m.tool_calls"])
@pytest.mark.parametrize("plus", [" + ", " ~ "])
@pytest.mark.parametrize(
    "more", ["", "{% if m.tool_calls and m.content is not none %}an empty turn{% endif %}"]
)
def test_templates_that_concatenate_arguments_get_their_text(tmp_path, shown, null, plus, more):
    text = CONCATENATES.replace("NULL", null).replace(" + c.function.a", f"{plus}c.function.a")
    (tmp_path / "t.jinja").write_text(text.replace("{{ '<|im_end|>", more + "{{ '<|im_end|>"))
    rows = [{**calling({"x": "<|im_end|>é"}), "tools": []}]
    rows.append(
        {"messages": [*rows[0]["messages"], {"role": "tool", "content": "7"}, said("b")]}
    )
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    call = '[f:{"x": "<|im_end|>é"}<|im_end|>]'
    later = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"
    assert shown(rows, template=str(tmp_path / "t.jinja")) == [
        asked + call,
        asked + call + later,
    ]


def test_a_call_that_a_template_leaves_out_is_no_answer(tmp_path, open_rows):
    (tmp_path / "t.jinja").write_text(PLAIN_CHATML + "{# tool_calls #}")
    rows = [{"messages": [ASK, said("a")]}, {**calling({"x": 1}), "tools": []}]
    data = open_rows(rows, template=str(tmp_path / "t.jinja"))
    assert len(data) == 1 and sum(data.report.dropped.values()) == 1


# ----------------------------------------------------------------------------------------------------------- parquet


def tool(name, **properties):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


WIDE = [
    {**calling({"a": 1}), "tools": [tool("f", a={"type": "integer", "default": None})]},
    {**calling({"city": "x"}), "tools": [tool("g", city={"type": "string"}), tool("h", n={"type": "integer"})]},
    {"messages": [ASK, said("a", tool_calls=None)], "tools": None},
]  # fmt: skip


@pytest.mark.parametrize("way", ["datasets", "pyarrow", "saved", "kept"])
def test_rows_of_parquet_are_the_rows_of_jsonl(
    tmp_path, tokenizer, open_rows, open_sources, way
):
    """Without the nulls that other rows forced upon them, and with the null that was written."""
    place, table = tmp_path / "wide.parquet", datasets.Dataset.from_list(WIDE)
    match way:
        case "datasets":
            table.to_parquet(place)
        case "pyarrow":
            parquet.write_table(pyarrow.Table.from_pylist(WIDE), place)
        case "saved":
            table.save_to_disk(place := tmp_path / "saved")
        case "kept":  # as JSON, which loses nothing
            kept = datasets.Features({name: datasets.List(datasets.Json()) for name in WIDE[0]})
            datasets.Dataset.from_list(WIDE, features=kept).to_parquet(place)
    found, wanted = open_sources(str(place), length=4096), open_rows(WIDE, length=4096)
    assert [content(*example.sequences) for example in found] == [
        content(*e.sequences) for e in wanted
    ]
    text = tokenizer.decode(found[0].sequences[0].tokens)
    assert '"default": null' in text and "city" not in text and found.report == wanted.report


# ----------------------------------------------------------------------------------------- the same, and the refused

FUNCTION, OBJECT = TOOLS[0]["function"], calling({"x": "é"})
CALLS, TEXT = OBJECT["messages"][1]["tool_calls"], json.dumps({"x": "é"})


@pytest.mark.parametrize(
    "rows, shows",
    [
        ([{**OBJECT, "tools": None, key: tools} for key, tools in (
            ("functions", [FUNCTION]), ("tools", TOOLS), ("functions", json.dumps([FUNCTION])),
            ("tools", json.dumps(json.dumps(TOOLS))), ("tools", [json.dumps(TOOLS[0])]),
            ("tools", [{**TOOLS[0], "function": json.dumps(FUNCTION)}]))], '"description": "d"'),
        ([{key: "s", "question": "q", "response": "a"} for key in ("system_prompt", "system")], "system\ns<|im_end|>"),
        ([OBJECT, *map(calling, (TEXT, json.dumps(TEXT), json.dumps(json.dumps(TEXT)))),
          {**OBJECT, "messages": [ASK, said("", tool_calls=json.dumps(CALLS))]},
          *({**OBJECT, "messages": [ASK, said("", tool_calls=[
              {"type": "function", "function": {"name": "f", "arguments": inner}, "arguments": {"x": "é"}}])]}
            for inner in (None, {}, TEXT)),
          {**OBJECT, "messages": [ASK, said(None, function_call=CALLS[0]["function"])]}], '"arguments": {"x": "é"}}'),
        ([{**OBJECT, "messages": [ASK, said("", tool_calls=[{"name": "f", "arguments": {"x": 1}, **more}])]}
          for more in ({}, {"target": "a"}, {"largest": 2, "charge": 3})], '"arguments": {"x": 1}}'),
        ([{"messages": [ASK, said("a")], **more} for more in ({}, {"response": []}, {"completion": ""})], "[a"),
        ([*map(calling, ({}, "{}", "", None, "null"))], '"arguments": {}}'),
    ],
)  # fmt: skip
def test_rows_that_say_the_same_are_the_same(shown, rows, shows):
    texts = shown(rows)
    assert len({*texts}) == 1 and shows in texts[0]


# what the answer has beside its text and what stands in its row beside the messages, or nothing, and what is said
REFUSED = r"""
{"is_masked": false} => => has a message with the key
{"learn": 0} => => has a message with the key
{"weight": 0} => => has an answer that is not to be trained, but data.train_on is all
=> {"chat_template_kwargs": {"a": 1}} => sets 'a' in chat_template_kwargs, which
=> {"chat_template_kwargs": {"tools": []}} => sets 'tools' in chat_template_kwargs, which
=> {"train_mask": [0, 1]} => has a mark for each message in '.*', which is not known here
=> {"labels": [null, false]} => has a mark for each message in '.*', which is not known here
=> {"assistant_masks": [0.0, 1.0]} => has a mark for each message in '.*', which is not known here
{"tool_calls": [{"name": "f", "parameters": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "input": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "args": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "arguments": {}, "parameters": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "arguments": {}, "params": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "arguments": "", "tool_input": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"name": "f", "arguments": {"x": 1}, "args": "{}"}]} => => UNREAD
{"tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "input": {"x": 1}}]} => => UNREAD
{"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}, "arguments": "{\"x\": 2}"}]} => => \
message 2 has a tool call with 'arguments' in its function and others beside it; remove one
{"tool_calls": [{"name": "f"}], "function_call": {"name": "g"}} => => \
message 2 has calls in two places, tool_calls and function_call; remove one
=> {"tools": [{}]} => has a tool without a name
=> {"tools": {"f": {"parameters": {}}}} => has a tool without a name
=> {"tools": [{"name": 1}]} => has a tool without a name
""".replace("UNREAD", "message 2 has a tool call with the key '.*', which is not read")


@pytest.mark.parametrize("more, row, sentence", rows_of(REFUSED))
def test_what_is_not_shown_or_would_be_trained_otherwise_is_refused(
    open_rows, more, row, sentence
):
    more, row = (json.loads(text or "{}") for text in (more, row))
    good = {"messages": [ASK, said("a")], "chat_template_kwargs": {"other": None}}
    with pytest.raises(DataError, match=f"rows.jsonl row 2 {sentence}"):
        open_rows(
            [good, {"messages": [ASK, said("a", **more)], **row}],
            train_on="all" if "train_on" in sentence else "assistant",
        )


FREE = """
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "labels": [0, 7], "tags": [], \
"turns": [0, 1]}
{"conversations": [{"role": "user", "content": "q"}, {"from": "gpt", "role": null, "value": "a", "content": null}]}
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": \
[{"name": "f", "arguments": {}, "status": "done"}]}]}
"""


@pytest.mark.parametrize("row", [json.loads(text) for [text] in rows_of(FREE)])
def test_what_means_nothing_else_is_read(open_rows, row):
    assert len(open_rows([row])) == 1
