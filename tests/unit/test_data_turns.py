"""Each answer is trained after the prompt that inference shows, with its own text, or is left out and counted."""

import pytest

from tests import rows_of
from tests.tiny_tokenizer import made_tokenizer
from tests.unit.test_data_chat import (
    CALL,
    PLAIN_CHATML,
    THINK,
    TOOLS,
    conversation,
    encode_all,
    places_of_answers,
)
from ulysses.data import DataError, DropRowError
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPENS{% endif %}"
CHATML = LOOP + "{{ m.content }}" + END.replace("OPENS", "")
NAMES_TAGS = "<|im_start|>system\nWrite <think> and </think>.<|im_end|>\n" + CHATML
# Qwen's kind: the first and the last part of an answer are all that is kept, and a block always stands before it
SPLITS = (
    LOOP
    + "{% if m.role == 'assistant' %}{% set p = namespace(r=m.reasoning_content or '', c=m.content) %}"
    "{% if not m.reasoning_content is string and '</think>' in p.c %}"
    "{% set p.r = p.c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set p.c = p.c.split('</think>')[-1] %}{% endif %}"
    "<think>\n{{ p.r.strip() }}\n</think>\n\n{{ p.c.strip() }}{% else %}{{ m.content }}{% endif %}"
)
CLOSED = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
QWEN3 = SPLITS + END.replace("OPENS", CLOSED)
QWEN35 = SPLITS + END.replace("OPENS", "<think>\n")
# Mistral-Nemo's kind
LAST_SYSTEM = (
    "{% set s = messages[0].content + ' ' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[Q]{{ s if loop.last }}{{ m.content }}[/Q]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# gpt-oss's kind: what was thought before a call is forgotten when an answer follows; only the first call is written
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}{% set later = namespace(answer=false) %}"
    "{% for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}"
    "{% set later.answer = true %}{% endif %}{% endfor %}"
    "{% if not later.answer %} think {{ m.thinking or m.content }}{% endif %}"
    " call {{ m.tool_calls[0].function.name }}{% else %} {{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}{# tools #}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return made_tokenizer(tmp_path_factory.mktemp("tokenizer"), SPECIALS)


@pytest.fixture
def shown(tokenizer):
    """A function from a template and messages to the texts, trained parts in brackets, and what was left out."""

    def shown(text, messages, tools=(), variables=None, apart=True):
        notes = []
        given = messages, tools, places_of_answers(messages), apart, variables, notes.append
        found = encode_all(ChatTemplate(tokenizer, text), *given)
        return [
            encoded.text.replace("<|im_start|>", "@").replace("<|im_end|>", "$")
            for encoded in found
        ], notes

    return shown


ASKED = "@user\nq$\n@assistant\n"
ALONE = "an answer has <think> or </think> alone"
TEMPLATES = {"names tags": NAMES_TAGS, "qwen3": QWEN3, "qwen3.5": QWEN35, "chatml": CHATML}
# the template, an answer, and what is trained of it if that is not the answer as it is
THINKING = r"""
names tags => <think>\nt\n</think>\n\na =>
qwen3 => <think>\nt\n</think>\n\na =>
qwen3 => <think>\na\n</think>\n\nb\n<think>\nc\n</think>\n\nd =>
qwen3.5 => <think>\na\n</think>\n\nb\n<think>\nc\n</think>\n\nd =>
qwen3 => <think>\nOf <think> I think\n</think>\n\na =>
qwen3.5 => <think>\nOf <think> I think\n</think>\n\na =>
qwen3 => <think>\nt\n</think>\n\nUse </think> so. =>
qwen3 => The tag </think> ends it. => <think>\n\n</think>\n\nThe tag </think> ends it.
qwen3 => Use <think> and </think>. => <think>\n\n</think>\n\nUse <think> and </think>.
qwen3.5 => a => <think>\n\n</think>\n\na
qwen3.5 => t\n</think>\n\na => <think>\nt\n</think>\n\na
qwen3.5 => The tag </think> ends it. => ALONE
qwen3.5 => <think>\ncut off => ALONE
qwen3 => <think>\ncut off => ALONE
qwen3 => <think>\n\n</think>\n\na =>
chatml => The tag </think> ends it. =>
chatml => <think>\ncut off =>
""".replace("ALONE", ALONE)


@pytest.mark.parametrize("row", rows_of(THINKING))
def test_thinking_is_trained_as_the_row_has_it_or_the_row_is_dropped(shown, row):
    """Tags that an answer quotes are not the edges of thinking, whatever the system text names."""
    name, answer, trained = (cell.replace(r"\n", "\n") for cell in row)
    messages = conversation("q", answer)
    if trained == ALONE:
        with pytest.raises(DropRowError, match=ALONE):
            shown(TEMPLATES[name], messages)
        return
    (text,), notes = shown(TEMPLATES[name], messages)
    prompt, _, said = text.partition("[")
    opened = "<think>\n" * (name == "qwen3.5")
    assert prompt.endswith(ASKED + opened) and not notes
    assert opened + said == (trained or answer) + "$]"


@pytest.mark.parametrize("template", [QWEN3, CHATML])
def test_tags_of_thinking_may_be_special_tokens(tokenizer, tmp_path, template):
    """They are read as tags, and are the same tokens wherever they stand."""
    tags = "<think>", "</think>"
    special = made_tokenizer(tmp_path, (*SPECIALS, *tags))
    said = conversation(
        "Use <think>.", THINK.format("Of </think", "It is <think>."), "r", "Or </think>."
    )
    plain, found = (
        encode_all(ChatTemplate(each, template), said, (), [1, 3], True)
        for each in (tokenizer, special)
    )
    assert [one.text for one in found] == [one.text for one in plain]
    for one in found:
        count = sum(map(one.tokens.count, special.convert_tokens_to_ids([*tags])))
        assert count == sum(map(one.text.count, tags)) > 0


def test_thinking_under_a_key_may_name_the_tags_and_an_empty_key_hides_none(shown):
    said = {"reasoning_content": "The tag </think> ends."}
    (text,), _ = shown(QWEN3, [*conversation("q"), Message("assistant", "a", more=said)])
    assert text == f"{ASKED}[{THINK.format('The tag </think> ends.', 'a')}$]"
    empty = Message("assistant", THINK.format("t", "a"), more={"reasoning_content": ""})
    assert shown(QWEN3, [*conversation("q"), empty])[0] == [
        f"{ASKED}[{THINK.format('t', 'a')}$]"
    ]


def test_the_setting_that_closes_thinking_is_named(shown):
    thinks = conversation("q", THINK.format("t", "a"))
    with pytest.raises(
        DropRowError, match="has thinking, but .* turn .enable_thinking = False."
    ):
        shown(QWEN3, thinks, variables={"enable_thinking": False})
    empty = conversation("q", THINK.format("", "a"))
    (text,), _ = shown(QWEN3, empty, variables={"enable_thinking": False})
    assert text == f"{ASKED}<think>\n\n</think>\n\n[a$]"


def test_a_system_text_that_only_the_last_question_shows_is_in_every_prompt(shown):
    messages = [Message("system", "Be brief."), *conversation("q", "a", "r", "b")]
    texts, notes = shown(LAST_SYSTEM, messages)
    assert texts == ["[Q]q[/Q]a</s>[Q]Be brief. r[/Q][b</s>]", "[Q]Be brief. q[/Q][a</s>]"]
    assert not notes
    assert shown(LAST_SYSTEM, messages[:3], apart=False)[0] == texts[1:]
    with pytest.raises(DropRowError, match="rewrites earlier turns or moves the system text"):
        shown(LAST_SYSTEM, messages, apart=False)


def marked(text):
    """A template that marks the assistant's tokens itself."""
    marks = "{% generation %}{{ m.content }}{{ end }}{% endgeneration %}"
    return "{% set end = '<|im_end|>' %}" + text.replace("{{ m.content }}</s>", marks)


def test_marked_answers_are_trained_after_the_prompts_of_inference_too(shown):
    """The system text moves to the newest question, but the newest text still begins with its prompt."""
    moves = LAST_SYSTEM.replace("s if loop.last", "s if loop.last or loop.index0 == last")
    moves = "{% set last = messages | length - 3 %}" + moves
    messages = [Message("system", "S"), *conversation("q", "a", "r", "b")]
    expected = ["[Q]q[/Q]a$[Q]S r[/Q][b$]", "[Q]S q[/Q][a$]"]
    assert shown(marked(moves), messages) == (expected, [])
    assert shown(marked(LAST_SYSTEM), messages) == (expected, [])


def test_a_marked_answer_that_does_not_continue_its_prompt_is_left_out(shown):
    opens = LOOP + "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}{{ m.content }}"
    opens = marked(opens + "{% endif %}" + END.replace("OPENS", "<think>\n"))
    with pytest.raises(DropRowError, match="opens with '<.im_start.>assistant.n<think>"):
        shown(opens, conversation("q", "a"))
    texts, notes = shown(opens, conversation("q", "a", "r", THINK.format("t", "b")))
    (note,) = notes
    assert note.startswith("turns left out, the chat template does not write an answer where")
    assert len(texts) == 1 and texts[0].endswith(f"[{THINK.format('t', 'b')}$]")


# shows the first system text alone, and no results of tools
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP.replace("messages %}", "messages if m.role in ('user', 'assistant') %}")
    + "{{ m.content | trim | upper if m.role == 'user' else m.content }}"
    + END.replace("OPENS", "")
)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_an_answer_after_a_message_that_the_template_hides_is_left_out(tokenizer, shown, role):
    """What a template writes otherwise, as this one questions, is not hidden."""
    begin = [Message("system", "S"), *conversation(" q", "a")]
    hides = [*begin, Message(role, "It rains."), *conversation("r", "b")]
    note = f"the chat template does not show a {role} message"
    kept = [f"S{ASKED.replace('q', 'Q')}[a$]"]
    assert shown(FIRST_SYSTEM, begin) == (kept, [])
    assert shown(FIRST_SYSTEM, hides) == (kept, [f"turns left out, {note}"])
    with pytest.raises(DropRowError, match=note):
        ChatTemplate(tokenizer, FIRST_SYSTEM).render(hides[:5])
    with pytest.raises(DropRowError, match=note):
        shown(FIRST_SYSTEM, [begin[0], hides[3], *begin[1:]])


def calls(thinking="", content="", count=1):
    return Message("assistant", content, 1.0, (CALL,) * count, {"thinking": thinking})


def test_thinking_before_calls_is_shown_where_the_prompt_shows_it(shown):
    """Calls and their final answer stay in one text; a later question forgets what was thought."""
    task = [
        *conversation("q"),
        calls("t"),
        Message("tool", "7"),
        calls(content="u"),
        Message("tool", "8"),
    ]
    messages = [*task, Message("assistant", "a"), *conversation("r", "b")]
    first = "@user q$@assistant[ think t call f$]@tool 7$@assistant[ think u call f$]@tool 8$@assistant[ a$]"
    later = "@user q$@assistant call f$@tool 7$@assistant call f$@tool 8$@assistant a$@user r$@assistant[ b$]"
    assert shown(FORGETS, messages, tools=TOOLS) == ([later, first], [])
    assert shown(FORGETS, messages[:7], TOOLS, apart=False) == ([first], [])


def test_a_turn_that_cannot_be_told_is_left_out_alone(shown):
    """The second of two calls is not written."""
    messages = [
        *conversation("q"),
        calls("t", count=2),
        Message("tool", "7"),
        Message("assistant", "a"),
    ]
    texts, notes = shown(FORGETS, messages, tools=TOOLS)
    assert texts == ["@user q$@assistant think t call f$@tool 7$@assistant[ a$]"]
    (note,) = notes
    assert note.startswith(
        "turns left out, the chat template leaves out a part of an answer (its thinking, text or ca"
    )
    with pytest.raises(DropRowError, match="leaves out a part of an answer"):
        shown(FORGETS, messages, TOOLS, apart=False)
    with pytest.raises(DropRowError, match="leaves out a part of an answer"):
        shown(FORGETS, messages[:2], tools=TOOLS)


def test_answers_before_a_question_and_after_an_answer(shown):
    late = conversation("q", "a")
    asks = "{% if messages[0].role == 'system' %}{% endif %}" + QWEN3
    texts, notes = shown(asks, [Message("assistant", "Hello"), *late])
    empty = THINK.format("", "{}$")
    assert texts == ["@assistant\n" + empty.format("Hello") + f"\n{ASKED}[{empty.format('a')}]"]
    assert notes == [
        "turns left out, an answer stands where the chat template opens no turn, before the first question"
    ]
    texts, notes = shown(asks, [*late, Message("assistant", "b")])
    assert texts == [f"{ASKED}[{empty.format('a')}]\n@assistant\n[{empty.format('b')}]"]


def test_a_template_that_opens_turns_otherwise_shows_both_texts(shown):
    other = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>model\n")
    with pytest.raises(
        DropRowError,
        match=r"opens with '<.im_start.>model.n', but writes .* '<.im_start.>assistant.n2",
    ):
        shown(other, conversation("q", "a"))


SHOWS_TOOLS = (
    "{% for t in tools %}{{ t.function.name }} {% endfor %}"
    + LOOP
    + (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        + END.replace("OPENS", "")
    )
)


@pytest.mark.parametrize(
    "given",
    [
        {"default": PLAIN_CHATML, "tool_use": SHOWS_TOOLS},
        {"tool_use": SHOWS_TOOLS},
        SHOWS_TOOLS,
    ],
)
def test_rows_with_tools_have_the_template_for_tools(tokenizer, given):
    tokenizer.chat_template = given
    template = ChatTemplate(tokenizer)
    called = [*conversation("q"), Message("assistant", "", 1.0, (CALL,))]
    (found,) = encode_all(template, called, TOOLS, [1])
    assert (
        found.text.startswith("f <|im_start|>user")
        and '[{"name": "f", "arguments"' in found.text
    )
    assert template.end_of_turn == tokenizer.convert_tokens_to_ids("<|im_end|>")
    if "default" in given:
        (found,) = encode_all(template, conversation("q", "a"), (), [1])
        assert found.text.endswith("assistant\n[a<|im_end|>]")
        return
    with pytest.raises(DropRowError, match="is for rows with tools alone"):
        template.render(conversation("q", "a"), (), [1])


def test_templates_of_other_names_are_none(tokenizer):
    tokenizer.chat_template = {"rag": PLAIN_CHATML}
    with pytest.raises(DataError, match="no chat template of the name default or tool_use"):
        ChatTemplate(tokenizer)
