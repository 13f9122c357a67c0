"""Exact assistant masks, one BOS, one end-of-turn token, and user text that cannot forge special tokens."""

import itertools
import json
import random
import re
from importlib.resources import files
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from jinja2 import Template
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizer import CHATML, LLAMA3, write_tokenizer
from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.chat import ChatTemplate, TextEncoder, load_tokenizer
from ulysses.data.read.messages import Message
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


LLAMA = LLAMA3, "<|eot_id|>", {"bos_token": "<|begin_of_text|>"}
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
    def made(specials, end, more):
        folder = write_tokenizer(
            tmp_path_factory.mktemp("tokenizer"), specials, bos=more.get("bos_token")
        )
        return load_tokenizer(folder, eos_token=end, **more)

    return {name: made(*parts) for name, parts in MADE_OF.items()}


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
    spans: list  # of the tokens with weights


def encode_all(template, rendered, **options):
    found = []
    for tokens, weights in template.encode_batch(rendered, **options):
        edges = np.flatnonzero(np.diff([0, *map(bool, weights), 0])).tolist()
        found.append(Encoded(tokens, [*zip(edges[::2], edges[1::2])]))
    return found


def places_of_answers(messages):
    return [i for i, message in enumerate(messages) if message.role == "assistant"]


def encode(template, messages, tools=(), generation_prompt=False):
    """One conversation with all of its answers, or one that ends as a prompt."""
    answers = [] if generation_prompt else places_of_answers(messages)
    return encode_all(template, template.render(messages, tools, answers))[0]


def written(tokenizer, name, messages, tools=(), **options):
    """The text that a built-in template makes of a conversation."""
    encoded = encode(ChatTemplate(tokenizer, name), messages, tools, **options)
    return tokenizer.decode(encoded.tokens)


def answers(tokenizer, encoded):
    return [tokenizer.decode(encoded.tokens[a:b]) for a, b in encoded.spans]


TOOL_USE = [Message("user", "q"), Message("assistant", "", None, (CALL,)), Message("tool", '{"r": 7}'),
            Message("tool", "8"), Message("assistant", "7")]  # fmt: skip
CHAT = [
    Message("system", "Be kind."),
    *conversation("Hello there", "General Kenobi", "ok", "Bye."),
]


@named
@pytest.mark.parametrize(
    "messages, tools, first",
    [(CHAT, (), ["General Kenobi"]), (TOOL_USE, TOOLS, ['"name": "f"', '"x": "é"'])],
    ids=["chat", "tools"],
)
def test_spans_are_the_answers_with_their_end_of_turn(tokenizers, name, messages, tools, first):
    """transformers reads the same Jinja file: rendering, tokens and (for our marks) the assistant mask."""
    tokenizer = tokenizers[name]
    template = ChatTemplate(tokenizer, name)
    encoded = encode(template, messages, tools)
    called, last = answers(tokenizer, encoded)
    assert all(part in called for part in first) and called.endswith(END[name])
    assert called.strip() == f"General Kenobi{END[name]}" or tools
    assert last.strip() == messages[-1].content + END[name]
    end = tokenizer.convert_tokens_to_ids(END[name])
    assert all(encoded.tokens[a:b].count(end) == 1 for a, b in encoded.spans)
    assert template.stop_tokens == sorted({end, tokenizer.eos_token_id})
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
    mask = [int(any(a <= i < b for a, b in encoded.spans)) for i in range(length)]
    after = len(expected["input_ids"]) - length
    assert expected["assistant_masks"] == [*mask, *[0] * after]
    assert tokenizer.decode(expected["input_ids"][length:]).strip() == ""


def test_known_renderings(tokenizers):
    """The strings the published models were trained on."""
    messages = [Message("system", "S"), Message("user", "U"), Message("assistant", "A")]
    assert written(tokenizers["llama3"], "llama3", messages) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    )
    assert written(tokenizers["qwen2.5"], "qwen2.5", messages[1:]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>"
    )


PARTS = [
    *"<|im_end|> <|eot_id|> <|begin_of_text|> <|endoftext|> a Z9 é 漢字 🙂 e\u0301 < |> \\n \u200b </s>".split(
        " "
    ),
    *("<|im_start|>assistant\n", "\n", "\n\n", " ", "  ", "\t", "{{ x }}", "{% if %}", "\r\n"),
]


@named
def test_adversarial_texts_keep_prefix_mask_and_special_tokens(tokenizers, name):
    tokenizer = tokenizers[name]
    template = ChatTemplate(tokenizer, name)
    special = set(tokenizer.all_special_ids) | set(TextEncoder(tokenizer).special.values())
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
            prompt = encode(template, messages[:turns], generation_prompt=True)
            assert prompt.tokens == encoded.tokens[: encoded.spans[turns // 2][0]]
        trims = name in ("llama3", "llama3.1", "plain")
        for written, text in zip(answers(tokenizer, encoded), texts[1::2]):
            said = (text.strip() if trims else text) + END[name]
            assert written == " " * (name == "plain") + said
        assert count(encoded) == count(encode(template, conversation("xy", "xy", "xy", "xy")))
    # the caller's stays as it was
    assert tokenizer(END[name])["input_ids"][-1] == tokenizer.eos_token_id


def test_exactly_one_bos(tokenizers, templated):
    tokenizer = tokenizers["llama3"]
    without = templated(
        tokenizer,
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    )
    for template in (ChatTemplate(tokenizer, "llama3"), without):
        encoded = encode(template, conversation("<|begin_of_text|>", "<|begin_of_text|>a"))
        assert encoded.tokens.index(tokenizer.bos_token_id) == 0
        assert encoded.tokens.count(tokenizer.bos_token_id) == 1
        assert answers(tokenizer, encoded) == ["<|begin_of_text|>a<|eot_id|>"]
    assert TextEncoder(tokenizers["chatml"]).bos is None


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
    encoded = encode(template, conversation("q", "a", "r", "b"))
    assert answers(tokenizers["chatml"], encoded) == ends


def unmarked(name):
    text = files("ulysses.data.read").joinpath(f"{name}.jinja").read_text()
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)


@pytest.mark.parametrize("name", ["llama3", "chatml", "qwen2.5"])
def test_many_turns_without_marks_are_told_apart_as_one_by_one(tokenizers, templated, name):
    """And as with marks, in a time that grows with the turns: a few renderings, unless an answer is in doubt."""
    template, draw, rendered = templated(tokenizers[name], unmarked(name)), random.Random(0), []
    marked = ChatTemplate(tokenizers[name], name)
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
            for turns in ("together", "auto"):
                (together,) = encode_all(
                    template, template.render(messages, (), answers, turns)
                )
                if case % 4:
                    assert 0 < sum(rendered) <= 5 * len(messages), turns
                rendered.clear()
        assert [together] == encode_all(marked, marked.render(messages, (), answers))
        alone = encode_all(template, template.render(messages, (), answers, "separate"))
        assert len(alone) == len(answers)
        for one, span in zip(reversed(alone), together.spans):
            assert one.spans == [span] and one.tokens == together.tokens[: span[1]]
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
    encode(template, conversation("q", "a"))
    with pytest.raises(DropRowError, match=r"rewrites earlier turns.*generation"):
        encode(template, conversation("q", "a", "q", "b"))


THINK = "<think>\n{}\n</think>\n\n{}"
R1 = (  # opens every answer with <think>, and shows none of the thinking, as DeepSeek-R1's distilled models do
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>A:' + m.content.split('</think>')[-1]"
    " + '<|im_end|>' }}{% else %}{{ '<|im_start|>U:' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>A:<think>\n' }}{% endif %}"
)


def texts(tokenizer, template, messages, turns, answers=None):
    """The rendered texts, with their trained answers in brackets."""
    answers = places_of_answers(messages) if answers is None else answers
    found = []
    for encoded in encode_all(template, template.render(messages, (), answers, turns)):
        cuts = [0, *(place for span in encoded.spans for place in span), len(encoded.tokens)]
        parts = [tokenizer.decode(encoded.tokens[a:b]) for a, b in itertools.pairwise(cuts)]
        found.append("".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts)))
    return found


def test_qwen3_writes_what_is_published(tokenizers):
    """Thinking is kept after the user's last question only, and the last answer always has a place for it."""
    tokenizer = tokenizers["qwen2.5"]
    template = ChatTemplate(tokenizer, "qwen3")
    messages = [Message("system", ""), Message("user", "q"), Message("assistant", THINK.format("t", "a")),
                Message("user", "r"), Message("assistant", "", None, (CALL,), {"reasoning_content": "\nu\n"}),
                Message("tool", "7"), Message("assistant", "b")]  # fmt: skip
    question = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    head = "<|im_start|>system\n<|im_end|>\n" + question
    call = '<think>\nu\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>'
    history = head + "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    tool = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    last = "<think>\n\n</think>\n\nb<|im_end|>"
    first = head + "[<think>\nt\n</think>\n\na<|im_end|>]"
    assert texts(tokenizer, template, messages, "auto") == [
        f"{history}[{call}]{tool}[{last}]",
        first,
    ]
    assert texts(tokenizer, template, messages, "separate") == [f"{history}{call}{tool}[{last}]",
                                                                f"{history}[{call}]", first]  # fmt: skip
    assert texts(tokenizer, template, messages[:4], "auto", []) == [history]
    with pytest.raises(DropRowError, match="leaves out a part of an answer"):
        encode(template, messages)
    asked = messages[1:2]
    assert texts(tokenizer, template, asked, "auto", []) == [question]
    assert written(tokenizer, "qwen3", asked, TOOLS, generation_prompt=True) == (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
        "provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", '
        '"function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}'
        "\n</tools>\n\nFor each "
        "function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:"
        '\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        + question
    )


def test_llama31_writes_what_is_published(tokenizers):
    tokenizer = tokenizers["llama3"]
    template = ChatTemplate(tokenizer, "llama3.1")
    messages = [Message("user", " q "), Message("assistant", "", None, (CALL,)), Message("tool", "7"),
                Message("assistant", "a")]  # fmt: skip
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert written(tokenizer, "llama3.1", messages, TOOLS) == (
        "<|begin_of_text|>" + header.format("system") + "Environment: ipython\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\n<|eot_id|>" + header.format("user") + "Given the following functions, please "
        "respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not '
        'use variables.\n\n{\n    "type": "function",\n    "function": {\n        "name": "f",\n        "description": '
        '"d",\n        "parameters": {\n            "type": "object"\n        }\n    }\n}\n\nq<|eot_id|>'
        + header.format("assistant") + '{"name": "f", "parameters": {"x": "é"}}<|eot_id|>' + header.format("ipython")
        + '"7"<|eot_id|>' + header.format("assistant") + "a<|eot_id|>")  # fmt: skip
    said = [messages[0], Message("assistant", "I will call", None, (CALL,))]
    with pytest.raises(
        DropRowError, match="leaves out a part of an answer"
    ):  # the published template drops the text
        encode(template, said, TOOLS)


def test_built_in_templates_keep_system_messages_where_they_are(tokenizers):
    roles = ["system", "user", "system", "assistant"]
    late = [Message(role, text) for role, text in zip(roles, ("", "q", "s", "a"))]
    for name in ("llama3", "chatml", "qwen2.5", "qwen3"):
        tokenizer = tokenizers["qwen2.5" if name == "qwen3" else name]
        text = written(tokenizer, name, late)
        assert re.findall(r"<\|(?:im_start|start_header_id)\|>(\w+)", text) == roles, text


def test_thinking_that_a_template_always_cuts_off_is_trained_where_the_model_writes_it(
    tokenizers, templated
):
    tokenizer = tokenizers["chatml"]
    template = templated(tokenizer, R1)
    assert template.stop_tokens == [tokenizer.eos_token_id]
    messages = conversation("q", THINK.format("t", "a"), "r", THINK.format("u", "b"))
    opened = "<|im_start|>U:q<|im_start|>A:"
    history = "\n\na<|im_end|><|im_start|>U:r<|im_start|>A:<think>\n"
    assert texts(tokenizer, template, messages, "auto") == [
        opened + history + "[u\n</think>\n\nb<|im_end|>]",
        opened + "<think>\n[t\n</think>\n\na<|im_end|>]",
    ]
    with pytest.raises(DropRowError, match="rewrites earlier turns"):
        encode(template, messages)
    with pytest.raises(DropRowError, match="where it opens the assistant's turn"):
        encode(template, conversation("q", "no thinking"))


@named
def test_a_prompt_may_begin_the_answer(tokenizers, name):
    """Its tokens are those of the prompt that is continued at inference, and they are not trained."""
    tokenizer, template = tokenizers[name], ChatTemplate(tokenizers[name], name)
    begun = Message("assistant", "Sure, <|im_", begun=11)
    (prompt,) = encode_all(template, template.render([Message("user", "q"), begun]))
    whole, = encode_all(template, template.render([Message("user", "q"), Message(
        "assistant", "Sure, <|im_end|> it is", begun=11)], (), [1]))  # fmt: skip
    start, stop = whole.spans[0]
    assert prompt.tokens == whole.tokens[:start] and tokenizer.decode(prompt.tokens).endswith(
        " Sure, <|im_"[-11:]
    )
    assert tokenizer.decode(whole.tokens[start:stop]) == "end|> it is" + END[name]


def test_keys_and_marks_that_nobody_would_see_are_refused(tokenizers):
    template = ChatTemplate(tokenizers["chatml"], "chatml")
    named_user = Message("user", "q", more={"name": "n", "id": 3, "thinking": ""})
    encode(template, [named_user, Message("assistant", "a")])
    for message, sentence in ((Message("assistant", "a", more={"thinking": "t"}), "key 'thinking', which the chat"),
                              (Message("user", "see <image>"), "mark <image>")):  # fmt: skip
        with pytest.raises(BadRowError, match=sentence):
            encode(template, [message, Message("assistant", "a")])


def test_an_answer_that_begins_with_a_newline_has_the_tokens_of_the_whole_text(tmp_path):
    """Its newline and the one before it are one token, which is trained; a prompt alone keeps its own tokens."""
    folder = write_tokenizer(tmp_path / "merges", CHATML)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"]["ĊĊ"], text["model"]["merges"] = 300, [["Ċ", "Ċ"]]
    text["pre_tokenizer"]["use_regex"] = (
        False  # so that two newlines are one word, as in Llama-3 and Qwen
    )
    write_json(folder / "tokenizer.json", text)
    tokenizer = load_tokenizer(folder, eos_token="<|im_end|>")
    template = ChatTemplate(tokenizer, "chatml")
    rendered = template.render(conversation("q", "\na"), (), [1])
    (whole,) = encode_all(template, rendered, as_whole=True)
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n\na<|im_end|>"
    assert whole.tokens == tokenizer(text)["input_ids"] and tokenizer.decode(
        whole.tokens[slice(*whole.spans[0])]
    ) == ("\n\na<|im_end|>")
    (alone,) = encode_all(template, rendered)
    prompt = encode(template, conversation("q"), generation_prompt=True)
    assert alone.tokens[: alone.spans[0][0]] == prompt.tokens and alone.tokens != whole.tokens


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
