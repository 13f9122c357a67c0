"""Exact assistant masks, one BOS, one end-of-turn token, and user text that cannot forge special tokens."""

import itertools
import json
import random
import re
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from jinja2 import Template
from transformers import PreTrainedTokenizerFast

from models.folders import read_json
from tests.tiny_tokenizer import CHATML, LLAMA3, made_tokenizer, write_tokenizer
from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.disk import write_json

TOOLS = json.loads(
    '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]'
)
CALL = json.loads('{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}')
PLAIN_CHATML = (  # as many model folders ship it: no generation marks
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


LLAMA = LLAMA3, "<|eot_id|>", {"bos": "<|begin_of_text|>"}
MADE_OF = {  # special tokens, the one that ends a turn, further ones
    "llama3": LLAMA,
    "llama3.1": LLAMA,
    "chatml": (CHATML, "<|im_end|>", {}),
    "qwen2.5": (CHATML, "<|im_end|>", {"pad_token": "<|im_end|>"}),
    "plain": (("<|endoftext|>",), "<|endoftext|>", {}),
}
END = {name: end for name, (_, end, _) in MADE_OF.items()}
named = pytest.mark.parametrize("name", END)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: made_tokenizer(tmp_path_factory.mktemp("tokenizer"), *parts, **more)
        for name, (*parts, more) in MADE_OF.items()
    }


@pytest.fixture(scope="module")
def templates(tokenizers):
    """The built-in templates by name."""
    made = {name: ChatTemplate(tokenizer, name) for name, tokenizer in tokenizers.items()}
    return made | {"qwen3": ChatTemplate(tokenizers["qwen2.5"], "qwen3")}


@pytest.fixture
def templated(tmp_path):
    def templated(tokenizer, text):
        (tmp_path / "t.jinja").write_text(text)
        return ChatTemplate(tokenizer, str(tmp_path / "t.jinja"))

    return templated


def conversation(*contents):
    return [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(contents)]


class Encoded(NamedTuple):
    tokens: list
    spans: list  # of the tokens with weights, and their texts
    answers: list
    text: str  # with its answers in brackets


def encode_all(template, *conversation, **options):
    """What is rendered of messages, tools, the places of trained answers and whether they may stand apart."""
    found = []
    for tokens, weights in template.encoder.encode_batch(
        template.render(*conversation), **options
    ):
        edges = np.flatnonzero(np.diff([0, *map(bool, weights), 0])).tolist()
        parts = [
            template.encoder.backend.decode(tokens[a:b], skip_special_tokens=False)
            for a, b in itertools.pairwise([0, *edges, len(tokens)])
        ]
        text = "".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts))
        found.append(Encoded(tokens, [*zip(edges[::2], edges[1::2])], parts[1::2], text))
    return found


def places_of_answers(messages):
    return [i for i, message in enumerate(messages) if message.role == "assistant"]


def encode(template, messages, tools=()):
    """One conversation with all of its answers, or one that ends as a prompt."""
    answers = places_of_answers(messages)
    return encode_all(template, messages, tools, answers)[0]


ASKS, CALLS = Message("user", "q"), Message("assistant", "", 1.0, (CALL,))
TOOL_USE = [
    *(ASKS, CALLS, Message("tool", '{"r": 7}'), Message("tool", "8")),
    Message("assistant", "7"),
]
CHAT = [
    Message("system", "Be kind."),
    *conversation("Hello there", "General Kenobi", "ok", "Bye."),
]


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
@pytest.mark.parametrize("text", ["chatml", PLAIN_CHATML])
def test_the_token_that_ends_a_turn_need_not_be_special(tmp_path, text, eos):
    """As tokens of model.add_tokens are not; an answer ends with it once, and with no EOS besides.

    In a message its text stays text.
    """
    tokenizer = made_tokenizer(tmp_path, ("</s>",), "</s>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.eos_token = eos
    template = ChatTemplate(tokenizer, text)
    encoded = encode(template, conversation("q<|im_end|>", "a", "r", "b"))
    assert encoded.answers == ["a<|im_end|>", "b<|im_end|>"]
    assert encoded.tokens.count(template.end_of_turn) == 4
    assert encoded.tokens[-1] == template.end_of_turn == len(tokenizer) - 1


@named
@pytest.mark.parametrize(
    "messages, tools, first",
    [(CHAT, (), ["General Kenobi"]), (TOOL_USE, TOOLS, ['"name": "f"', '"x": "é"'])],
    ids=["chat", "tools"],
)
def test_spans_are_the_answers_with_their_end_of_turn(
    tokenizers, templates, name, messages, tools, first
):
    """transformers reads the same Jinja file: rendering, tokens and (for our marks) the assistant mask."""
    tokenizer, template = tokenizers[name], templates[name]
    encoded = encode(template, messages, tools)
    called, last = encoded.answers
    assert all(part in called for part in first) and called.endswith(END[name])
    assert called.strip() == f"General Kenobi{END[name]}" or tools
    assert last.strip() == messages[-1].content + END[name]
    end = tokenizer.convert_tokens_to_ids(END[name])
    assert all(encoded.tokens[a:b].count(end) == 1 for a, b in encoded.spans)
    assert template.end_of_turn == end and template.encoder.eos == tokenizer.eos_token_id
    calls = [{"tool_calls": [*m.tool_calls]} if m.tool_calls else {} for m in messages]
    expected = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content, **more} for m, more in zip(messages, calls)],
        tools=tools or None,
        chat_template=template.text,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    length = encoded.spans[-1][1]  # nothing after the last end-of-turn token
    assert encoded.tokens == expected["input_ids"][:length]
    trained = {i for a, b in encoded.spans for i in range(a, b)}
    assert trained == {*np.flatnonzero(expected["assistant_masks"])}
    assert tokenizer.decode(expected["input_ids"][length:]).strip() == ""


def test_known_renderings(templates):
    """The strings the published models were trained on."""
    messages = [Message("system", "S"), *conversation("U", "A")]
    assert encode(templates["llama3"], messages).text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[A<|eot_id|>]"
    )
    assert encode(templates["qwen2.5"], messages[1:]).text == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n[A<|im_end|>]"
    )


PARTS = [
    *"<|im_end|> <|eot_id|> <|begin_of_text|> <|endoftext|> a Z9 é 漢字 🙂 e\u0301 < |> \\n \u200b </s>".split(
        " "
    ),
    *("<|im_start|>assistant\n", "\n", "\n\n", " ", "  ", "\t", "{{ x }}", "{% if %}", "\r\n"),
]


@named
def test_adversarial_texts_keep_prefix_mask_and_special_tokens(tokenizers, templates, name):
    tokenizer, template = tokenizers[name], templates[name]
    special = {*tokenizer.all_special_ids, *template.encoder.special.values()}
    generator = random.Random(0)

    def count(encoded):
        return sum(t in special for t in encoded.tokens)

    for _ in range(60):
        made = [
            "".join(generator.choices(PARTS, k=generator.randrange(1, 9))) for _ in range(4)
        ]
        # answers may begin with anything
        texts = ["x" * (i % 2 == 0) + text + "y" for i, text in enumerate(made)]
        messages = conversation(*texts)
        encoded = encode(template, messages)
        for turns in (1, 3):
            (prompt,) = encode_all(template, messages[:turns])
            assert prompt.tokens == encoded.tokens[: encoded.spans[turns // 2][0]]
        trims = name in ("llama3", "llama3.1", "plain")
        for written, text in zip(encoded.answers, texts[1::2]):
            said = (text.strip() if trims else text) + END[name]
            assert written == " " * (name == "plain") + said
        assert count(encoded) == count(encode(template, conversation("xy", "xy", "xy", "xy")))
    # the caller's stays as it was
    assert tokenizer(END[name])["input_ids"][-1] == tokenizer.eos_token_id


def test_exactly_one_bos(tokenizers, templates, templated):
    bos = tokenizers["llama3"].bos_token_id
    without = templated(
        tokenizers["llama3"],
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    )
    for template in (templates["llama3"], without):
        encoded = encode(template, conversation("<|begin_of_text|>", "<|begin_of_text|>a"))
        assert encoded.tokens[0] == bos and encoded.tokens.count(bos) == 1
        assert encoded.answers == ["<|begin_of_text|>a<|eot_id|>"]
    assert templates["chatml"].encoder.bos is None


@pytest.mark.parametrize(
    "after, ends",
    [("<|im_end|>\n", ["a<|im_end|>", "b<|im_end|>"]), ("\n", ["a", "b<|im_end|>"])],
)  # EOS once, at the end
def test_marks_without_the_end_of_turn_and_templates_without_any(
    tokenizers, templated, after, ends
):
    template = templated(
        tokenizers["chatml"],
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        + after
        + "{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    )
    assert encode(template, conversation(*"qarb")).answers == ends


def unmarked(name):
    text = files("ulysses.data.read").joinpath(f"{name}.jinja").read_text()
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)


@pytest.mark.parametrize("name", ["llama3", "chatml", "qwen2.5"])
def test_many_turns_without_marks_are_told_apart_as_one_by_one(
    tokenizers, templates, templated, name
):
    """And as with marks, in a time that grows with the turns: a few renderings, unless an answer is in doubt."""
    template, draw, rendered = templated(tokenizers[name], unmarked(name)), random.Random(0), []
    marked = templates[name]
    assert marked.marks_generation and not template.marks_generation
    generate = Template.generate

    def counted(*arguments, messages, **more):
        rendered.append(len(messages))
        return generate(*arguments, messages=messages, **more)

    for case in range(40):
        said = ["a", "b c", "a", "x\n\ny", "<think>z</think>w", "user", END[name]]
        if case % 4 == 0:
            said += [" a", "b \n"]
        messages = [Message("system", "s")] * (case % 2) + conversation(
            *draw.choices(said, k=20 + case % 3)
        )
        answers = places_of_answers(messages)[case % 5 :]
        with mock.patch.object(Template, "generate", counted):
            for apart in (False, True):
                (together,) = encode_all(template, messages, (), answers, apart)
                if case % 4:
                    assert 0 < sum(rendered) <= 5 * len(messages), apart
                rendered.clear()
        assert [together] == encode_all(marked, messages, (), answers)
        for i, span in zip(answers, together.spans, strict=True):
            (alone,) = encode_all(template, messages[: i + 1], (), [i])
            assert alone.spans == [span] and alone.tokens == together.tokens[: span[1]]
    last = PLAIN_CHATML.replace(
        "message['content']", "message['content'] + ('!' if loop.revindex == 2 else '')"
    )
    refused = "rewrites earlier turns|where it opens the assistant's turn"
    with pytest.raises(DropRowError, match=refused):
        templated(tokenizers["chatml"], last).render(
            conversation(*"uaubucud"), (), [1, 3, 5, 7]
        )


def test_a_template_that_rewrites_history_is_refused_per_row(tokenizers, templated):
    template = templated(
        tokenizers["chatml"],
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    )
    encode(template, conversation(*"qa"))
    with pytest.raises(DropRowError, match=r"rewrites earlier turns.*generation"):
        encode(template, conversation(*"qaqb"))


THINK = "<think>\n{}\n</think>\n\n{}"
R1 = (  # opens every answer with <think>, and shows none of the thinking, as DeepSeek-R1's distilled models do
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>A:' + m.content.split('</think>')[-1]"
    " + '<|im_end|>' }}{% else %}{{ '<|im_start|>U:' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>A:<think>\n' }}{% endif %}"
)


def texts(template, messages):
    """The rendered texts, each with its trained answers."""
    found = encode_all(template, messages, (), places_of_answers(messages), True)
    return [encoded.text for encoded in found]


def test_qwen3_writes_what_is_published(templates):
    """Thinking is kept after the user's last question only, and the last answer always has a place for it."""
    template, thinks = templates["qwen3"], replace(CALLS, more={"reasoning_content": "\nu\n"})
    messages = [Message("system", ""), *conversation("q", THINK.format("t", "a"), "r"), thinks,
                Message("tool", "7"), Message("assistant", "b")]  # fmt: skip
    question = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    head = "<|im_start|>system\n<|im_end|>\n" + question
    call = '<think>\nu\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>'
    history = head + "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    tool = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    last = "<think>\n\n</think>\n\nb<|im_end|>"
    first = head + "[<think>\nt\n</think>\n\na<|im_end|>]"
    assert texts(template, messages) == [f"{history}[{call}]{tool}[{last}]", first]
    (prompt,) = encode_all(template, messages[:4])
    assert prompt.text == history
    with pytest.raises(DropRowError, match="leaves out a part of an answer"):
        encode(template, messages)
    assert texts(template, [ASKS]) == [question]
    assert encode(template, [ASKS], TOOLS).text == (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
        "provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", '
        '"function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}'
        "\n</tools>\n\nFor each "
        "function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:"
        '\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        + question
    )


def test_llama31_writes_what_is_published(templates):
    template = templates["llama3.1"]
    messages = [Message("user", " q "), CALLS, Message("tool", "7"), Message("assistant", "a")]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert encode(template, messages, TOOLS).text == (
        "<|begin_of_text|>" + header.format("system") + "Environment: ipython\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\n<|eot_id|>" + header.format("user") + "Given the following functions, please "
        "respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not '
        'use variables.\n\n{\n    "type": "function",\n    "function": {\n        "name": "f",\n        "description": '
        '"d",\n        "parameters": {\n            "type": "object"\n        }\n    }\n}\n\nq<|eot_id|>'
        + header.format("assistant") + '[{"name": "f", "parameters": {"x": "é"}}<|eot_id|>]' + header.format("ipython")
        + '"7"<|eot_id|>' + header.format("assistant") + "[a<|eot_id|>]")  # fmt: skip
    # the published template drops the text
    with pytest.raises(DropRowError, match="leaves out a part of an answer"):
        encode(template, [ASKS, replace(CALLS, content="I will call")], TOOLS)


def test_built_in_templates_keep_system_messages_where_they_are(templates):
    roles = ["system", "user", "system", "assistant"]
    late = [*map(Message, roles, ("", "q", "s", "a"))]
    for name in ("llama3", "chatml", "qwen2.5", "qwen3"):
        text = encode(templates[name], late).text
        assert re.findall(r"<\|(?:im_start|start_header_id)\|>(\w+)", text) == roles, text


def test_thinking_that_a_template_always_cuts_off_is_trained_where_the_model_writes_it(
    tokenizers, templated
):
    template = templated(tokenizers["chatml"], R1)
    assert template.end_of_turn == template.encoder.eos
    messages = conversation("q", THINK.format("t", "a"), "r", THINK.format("u", "b"))
    opened = "<|im_start|>U:q<|im_start|>A:"
    history = "\n\na<|im_end|><|im_start|>U:r<|im_start|>A:<think>\n"
    assert texts(template, messages) == [
        opened + history + "[u\n</think>\n\nb<|im_end|>]",
        opened + "<think>\n[t\n</think>\n\na<|im_end|>]",
    ]
    with pytest.raises(DropRowError, match="rewrites earlier turns"):
        encode(template, messages)
    with pytest.raises(DropRowError, match="where it opens the assistant's turn"):
        encode(template, conversation("q", "no thinking"))
    # an answer that cannot be written is left out alone
    said = "no thinking", "r", THINK.format("u", "b"), "s", THINK.format("v", "c")
    assert len(texts(template, conversation("q", *said))) == 2


@named
def test_a_prompt_may_begin_the_answer(templates, name):
    """Its tokens are those of the prompt that is continued at inference, and they are not trained."""
    template, begun = templates[name], Message("assistant", "Sure, <|im_", begun=11)
    (prompt,) = encode_all(template, [ASKS, begun])
    whole = encode(template, [ASKS, replace(begun, content="Sure, <|im_end|> it is")])
    assert prompt.tokens == whole.tokens[: whole.spans[0][0]]
    assert prompt.text.endswith("Sure, <|im_") and whole.answers == ["end|> it is" + END[name]]


def test_keys_and_marks_that_nobody_would_see_are_refused(templates):
    template = templates["chatml"]
    named_user = replace(ASKS, more={"name": "n", "id": 3, "thinking": ""})
    encode(template, [named_user, Message("assistant", "a")])
    for message, sentence in ((Message("assistant", "a", more={"thinking": "t"}), "key 'thinking', which the chat"),
                              (Message("user", "see <image>"), "mark <image>")):  # fmt: skip
        with pytest.raises(BadRowError, match=sentence):
            encode(template, [message, Message("assistant", "a")])


def test_an_image_beside_a_text_is_refused_where_the_template_knows_images(
    tokenizers, templated
):
    """Multimodal templates read the word as the type of a part, or as a key of one."""
    knows = "{% for p in messages[0].content if p.type == 'image' or p.video or 'audio' in p %}{% endfor %}"
    template = templated(tokenizers["chatml"], knows + PLAIN_CHATML)
    for key in ("image", "images", "audio", "video"):
        encode(template, [replace(ASKS, more={key: []}), Message("assistant", "a")])
        with pytest.raises(BadRowError, match=f"key '{key}', which the chat template does not"):
            encode(template, [replace(ASKS, more={key: "a.png"}), Message("assistant", "a")])


def test_an_answer_that_begins_with_a_newline_has_the_tokens_of_the_whole_text(tmp_path):
    """Its newline and the one before it are one token, which is trained; a prompt alone keeps its own tokens."""
    folder = write_tokenizer(tmp_path / "merges", CHATML)
    text = read_json(folder / "tokenizer.json")
    text["model"]["vocab"]["ĊĊ"], text["model"]["merges"] = 300, [["Ċ", "Ċ"]]
    text["pre_tokenizer"]["use_regex"] = (
        False  # so that two newlines are one word, as in Llama-3 and Qwen
    )
    write_json(folder / "tokenizer.json", text)
    tokenizer = load_tokenizer(folder, eos_token="<|im_end|>")
    template = ChatTemplate(tokenizer, "chatml")
    given = conversation("q", "\na"), (), [1]
    (whole,) = encode_all(template, *given, as_whole=True)
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n\na<|im_end|>"
    assert whole.tokens == tokenizer(text)["input_ids"] and whole.answers == ["\n\na<|im_end|>"]
    (alone,) = encode_all(template, *given)
    prompt = encode(template, [ASKS])
    assert alone.tokens[: alone.spans[0][0]] == prompt.tokens and alone.tokens != whole.tokens


def test_a_byte_order_mark_before_a_template_is_not_trained_on(tokenizers, templated):
    template = templated(tokenizers["chatml"], "\ufeff" + PLAIN_CHATML)
    assert encode(template, conversation("q", "a")).text.startswith("<|im_start|>user")


def test_template_mistakes_are_one_sentence(tokenizers, templated):
    tokenizer = tokenizers["plain"]
    for make, text, message in (
        (ChatTemplate, "tokenizer", "has no chat template; set data.chat_template to llama3"),
        (
            ChatTemplate,
            "chatml",
            "writes <.im_end.>, <.im_start.>, which the tokenizer does not have",
        ),
        (ChatTemplate, "absent.jinja", "neither tokenizer, llama3"),
        (templated, "{% for %}", "not valid Jinja"),
        (templated, "{{ messages[0].content }}", "knows neither"),
    ):
        with pytest.raises(DataError, match=message):
            make(tokenizer, text)
    template = templated(
        tokenizer,
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    )
    for messages, tools, message in (([Message("system", "s")], (), r"refuses it: no system turns"),
                                     ([], TOOLS, r"no place for tools"),
                                     (conversation("q\ufdd0"), (), r"noncharacters")):  # fmt: skip
        with pytest.raises(DropRowError, match=message):
            encode(template, messages, tools)


def test_dates_do_not_change_by_the_day(tokenizers):
    """Llama's template asks for strftime_now and has a date of its own; those of gpt-oss and Granite call it."""
    call = "{{ strftime_now('%d %B %Y') }}"
    asks = f"{{% if strftime_now is defined %}}{call}{{% else %}}26 Jul 2024{{% endif %}}"
    make = partial(ChatTemplate, tokenizers["chatml"])
    for text, fixed in ((asks, "26 Jul 2024"), (call, "01 January 2025")):
        for given, day in (({}, fixed), ({"strftime_now": "2025-06-28"}, "28 June 2025")):
            assert encode(make(text + PLAIN_CHATML, given), CHAT).text.startswith(day)
    with pytest.raises(DataError, match="refuses it: Invalid isoformat string: '28 June'"):
        make(call + PLAIN_CHATML, {"strftime_now": "28 June"})


def test_load_tokenizer(tmp_path):
    folder = write_tokenizer(tmp_path / "bare", CHATML)
    for path, special, message in (
        (folder, {}, r"names no EOS token.*<.endoftext.>, <.im_start.>, <.im_end.>"),
        (folder, {"eos_token": "<|eot_id|>"}, r"'<.eot_id.>', which is not in the vocabulary"),
        (folder, {"beginning": "<|im_end|>"}, r"'beginning' is unknown"),
        (tmp_path / "absent", {}, str(tmp_path / "absent")),
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(path, **special)
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(path, eos_token="<|im_end|>")
        assert tokenizer.eos_token_id == 258 and len(tokenizer) == 259
    full = write_tokenizer(
        tmp_path / "full", CHATML, eos_token="<|im_end|>", chat_template=PLAIN_CHATML
    )
    (full / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    (full / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    tokenizer = load_tokenizer(full)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert ChatTemplate(tokenizer).text == PLAIN_CHATML
