"""Tokenise conversations, and find exactly the tokens that the assistant wrote.

    messages --template--> "<header>question<end><header>" "answer<end>" ...    cut where the assistant begins and ends,
                            tokens, not trained             tokens, trained     then each piece is tokenised on its own

Because pieces are tokenised on their own, a prompt has the same tokens with and without its answer, as it has at
inference. Strings inside a message that look like special tokens stay text; only the template writes special tokens.
Templates of reasoning models write earlier turns differently, without their thinking. Each answer is then rendered as
the end of its own conversation, after the prompt that the model will see; thinking.py tells whether it is complete.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from types import MappingProxyType

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.messages import MEDIA_KEYS, THINKING_KEYS, Arguments, Message
from ulysses.data.read.thinking import (
    Span,
    TemplateMessage,
    assistant_indices,
    hidden_messages,
    is_complete,
    spellings,
    split_thinking,
    why_incomplete,
)
from ulysses.data.read.tokenizer import (
    BEGUN,
    CLOSE,
    NAMED_TEMPLATES,
    OPEN,
    SPECIAL_NAMES,
    TURN_ENDS,
    PreTrainedTokenizerFast,
    Rendered,
    TextEncoder,
    template_text,
    without_marks,
)

GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# The date that strftime_now writes, so that tokens do not change by the day. A variable of that name sets another date.
# Templates that ask whether strftime_now is there have a date of their own, and do not get it.
DATE = "2025-01-01"
HAS_DATE = re.compile(r"\bstrftime_now\s+is\b")
RENDER_CHARACTERS = 1 << 28
TEXT_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
QUESTION: TemplateMessage = {"role": "user", "content": "2"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
# variables of a template that only we set
RESERVED = {"messages", "tools", "add_generation_prompt", *SPECIAL_NAMES}
LEFT_OUT = (
    "the chat template leaves out a part of an answer (its thinking, text or calls); take that part out of the data, "
    "or set data.chat_template to one that shows it"
)
ENDLESS = (
    "runs the chat template without end: it was stopped after too much text; mend its loops"
)
IDENTITIES = ("id", "name", "tool_call_id")  # keys of a message that a template need not show
Context = Mapping[str, object]  # all that a template reads besides messages


class ChatTemplate:
    """A compiled chat template together with its tokenizer.

    Args:
        template: "tokenizer" (the tokenizer's own), one of NAMED_TEMPLATES, or the path of a .jinja file.
        variables: values of further variables that the template reads, such as enable_thinking, for rows that do not
            set them.
        for_tools: take the tokenizer's template for rows with tools.

    Attributes:
        variables: the names of all further variables that the template reads.
        with_tools: the template of rows with tools, where the tokenizer has one of its own for them ("tool_use").
        marks_generation: whether the template marks answers by {% generation %}.

    Raises DataError: there is no such template, it does not read one of the variables, or it writes special tokens that
    the tokenizer does not have.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str = "tokenizer",
        variables: Mapping[str, object] = MappingProxyType({}),
        for_tools: bool = False,
    ) -> None:
        self.encoder = TextEncoder(tokenizer)
        self.text = template_text(tokenizer, template, for_tools)
        self._special_texts = {name: getattr(tokenizer, name) or "" for name in SPECIAL_NAMES}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        # the tags {% generation %} and {% endgeneration %} print marks around what the assistant wrote
        marked = GENERATION.sub(
            lambda tag: f'{tag[1]}print "{CLOSE if tag[2] else OPEN}"{tag[3]}', self.text
        )
        date_of_ours = {} if HAS_DATE.search(self.text) else {"strftime_now": DATE}
        self._context = self.encoder.guard(date_of_ours | dict(variables))
        try:
            opened, closed, answered = self._sample(environment, marked)
        except TemplateError as error:
            raise DataError(f"chat template {template} is not valid Jinja: {error}") from None
        except (DropRowError, BadRowError) as error:
            raise DataError(
                f"chat template {template} cannot render one question: {error}"
            ) from None
        self._opening = opened.removeprefix(closed)  # of the assistant's turn
        tree = environment.parse(marked)
        names = {node.attr for node in tree.find_all(nodes.Getattr)}
        names |= {node.value for node in tree.find_all(nodes.Const)}
        # templates name the types of parts, too
        self._keys_read = names - {*MEDIA_KEYS}
        self.variables = meta.find_undeclared_variables(tree) - RESERVED
        self.with_tools = None
        if not for_tools:
            if template_text(tokenizer, template, True) != self.text:
                self.with_tools = ChatTemplate(tokenizer, template, variables, True)
                self.variables |= self.with_tools.variables
            self.check_variables(variables, "data.chat_template_kwargs")
        # the templates of Mistral and Llama-2 write nothing where a turn opens
        is_opened = opened != closed or answered.removeprefix(opened).strip().startswith("2")
        if not is_opened and not self.marks_generation:
            raise DataError(
                f"chat template {template} knows neither add_generation_prompt nor {{% generation %}}, so "
                "the assistant's tokens cannot be told apart; add one of them"
            )
        token_to_id = tokenizer.backend_tokenizer.token_to_id
        written = TEXT_TOKEN.findall(opened + answered)
        absent = sorted({text for text in written if token_to_id(text) is None})
        # a tokenizer's own template may do so: TinyLlama's writes <|user|> as plain text
        if absent and template != "tokenizer":
            raise DataError(
                f"chat template {template} writes {', '.join(absent)}, which the tokenizer does not have; set "
                f"data.chat_template to another of {', '.join(NAMED_TEMPLATES)} or to a .jinja file"
            )

    def _sample(self, environment: Environment, marked: str) -> list[str]:
        """Compile the template, and learn from a question what it does with tools, calls and thinking.

        Return the question with an opened turn, without one, and with an answer.
        """
        self._compiled = environment.from_string(marked)
        answer = {"role": "assistant", "content": "2"}
        context = {**self._context, "tools": None}
        # some templates render nothing without a tool
        self._sample_tools = []
        try:
            self._render(context, [QUESTION])
        except DropRowError:
            with suppress(DropRowError):
                self._render({**context, "tools": [TOOL]}, [QUESTION])
                self._sample_tools = context["tools"] = [TOOL]
        # What a template takes for no content beside calls: "" hides the calls from some, or becomes a further turn.
        function = {"name": "call_1", "arguments": Arguments(key_1="value_1")}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        lengths = {}
        for content in ("", None):
            calling = {"role": "assistant", "content": content, "tool_calls": calls}
            with suppress(DropRowError):
                text = self._render(context, [QUESTION, calling])
                if "call_1" in text:
                    lengths[content] = len(text)
        self._no_content = min(lengths, key=lengths.__getitem__, default="")
        opened = self._render(context, [QUESTION], True)
        closed = self._render(context, [QUESTION])
        # Qwen3.8's template reads thinking from a key of its own alone, and writes an empty block before thinking that
        # stands in the content. Blocks are counted in the answer alone: SmolLM3's system text names the tags, too.
        in_content = {**answer, "content": "<think>\n1\n</think>\n\n2"}
        in_key = {**answer, "reasoning_content": "1"}
        blocks = []
        with suppress(DropRowError):
            for thinking in (in_content, in_key):
                text = self._render(context, [QUESTION, thinking]).removeprefix(closed)
                blocks.append(text.count("</think>"))
        self._moves_thinking = blocks == [2, 1]
        answered, marked_answers = self._render_marked(context, [QUESTION, answer])
        self.marks_generation = marked_answers != []
        self._answered = answered.removeprefix(closed)
        return [opened, closed, answered]

    def check_variables(self, variables: Mapping[str, object], setting: str) -> None:
        """Raise DataError if a setting names a variable that the template does not read, or that only we set."""
        if unread := variables.keys() - self.variables:
            raise DataError(
                f"{setting} sets {min(unread)!r}, which the chat template does not read; remove it"
            )

    @property
    def end_of_turn(self) -> int:
        """The id of the token that ends an assistant's turn: EOS where the template writes none."""
        # some templates begin every answer with thinking
        for answer in ("<think>\na\n</think>\n\na", "a"):
            with suppress(DropRowError):
                messages = [Message("user", "a"), Message("assistant", answer)]
                texts = self.render(messages, self._sample_tools, answers=[1])
                return self.encoder.encode_batch(texts)[0].ids[-1]
        raise DataError("the chat template writes no answer where it opens its turn")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] = (),
        answers: Sequence[int] = (),
        apart: bool = False,
        variables: Mapping[str, object] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> list[Rendered]:
        """Render a conversation, and weigh what the assistant wrote; everything else has the weight 0.

        Every text begins with one BOS where the tokenizer or the template asks for one, and ends with the end-of-turn
        token of its last answer (EOS where the template writes none).

        Args:
            answers: the indices of the assistant messages that are to be told apart. Without any, the conversation is a
                prompt, which ends with the opening of the assistant's turn or with the beginning of its answer.
            apart: where the template writes an answer differently in a longer conversation, use a further text, the
                conversation up to the answer. The last answer's text comes first. Without it such a conversation, and
                one with an answer that the template cannot write, is an error.
            variables: values of the template's variables, before those that the template was made with.
            note: is called with the reason for each answer that is left out, where others are rendered without it.

        Raises DropRowError if the template cannot express it, BadRowError if it does not show all of it.
        """
        if tools and self.with_tools:
            return self.with_tools.render(messages, tools, answers, apart, variables, note)
        if self._sample_tools and not tools:
            raise DropRowError("the chat template is for rows with tools alone")
        calls = any(message.tool_calls for message in messages)
        for used, key in ((tools, "tools"), (calls, "tool_calls")):
            if used and key not in self.text:
                raise DropRowError(
                    f"the chat template has no place for {key.replace('_', ' ')}"
                )
        variables = dict(variables or {})
        if unread := variables.keys() - self.variables:
            raise BadRowError(
                f"sets {min(unread)!r} in chat_template_kwargs, which its template does not read, or no row may set; "
                'remove it, or set columns = {unused = "chat_template_kwargs"}'
            )
        template_messages = [self._template_message(message) for message in messages]
        context = self._context | self.encoder.guard({**variables, "tools": tools or None})
        if not answers:
            begun = bool(messages) and messages[-1].begun > 0
            text = self._render(context, template_messages, not begun)
            self._check_shown(template_messages, context, text)
            return [self._weighed(text.partition(BEGUN)[0], {})]
        texts = self._render_answers(template_messages, context, answers, apart, note)
        if not apart and len(texts) > 1:
            raise DropRowError(
                "the chat template rewrites earlier turns or moves the system text, so the assistant's tokens cannot "
                "be told apart; mark them in the template with {% generation %}"
            )
        return [
            self._weighed(text, {span: messages[i].weight for i, span in spans.items()})
            for text, spans in texts.items()
        ]

    def _render_answers(
        self,
        messages: list[TemplateMessage],
        context: Context,
        answers: Sequence[int],
        apart: bool,
        note: Callable[[str], None] | None,
    ) -> dict[str, dict[int, Span]]:
        """Render the texts that hold the answers, the last one's first; return where in them each answer stands."""
        texts, problems = {}, []
        text, places = "", {}  # the newest text, and where answers stand in it
        for i in reversed(answers):
            try:
                if i not in places:
                    own_text, own_places = self._render_answer(messages, context, i)
                    # the last answer's text may show where the earlier ones stand, which then need no text of their own
                    if not texts and self.marks_generation and not apart:
                        places = own_places
                    elif not texts and len(answers) > 2:
                        places = self._find_answers(messages, context, own_text, own_places)
                    places[i] = own_places[i]
                    # a longer text that begins with this one holds the answer at the same place
                    if not text.startswith(own_text.rstrip("\n")):
                        text = own_text
                elif not is_complete(messages[i], text, places[i]):
                    raise DropRowError(LEFT_OUT)
                texts.setdefault(text, {})[i] = places[i]
            except DropRowError as problem:
                problems.append(problem)
        if problems and not (apart and texts):
            raise problems[0]
        for problem in problems:
            if note:
                note(f"turns left out, {problem}")
        return texts

    def _template_message(self, message: Message) -> TemplateMessage:
        """Return a message as templates read it, its text guarded; BadRowError if it has what none would show."""
        for key, value in message.more.items():
            if value not in ("", [], {}) and key not in {*self._keys_read, *IDENTITIES}:
                raise BadRowError(
                    f"has a message with the key {key!r}, which the chat template does not read; remove it from the "
                    "data, or use a template that shows it"
                )
        if "<image>" in message.content and message.role != "assistant":
            raise BadRowError("has the mark <image> in a message; only text is supported")
        begun, rest = message.content[: message.begun], message.content[message.begun :]
        content = self.encoder.guard(rest)
        if begun:
            content = self.encoder.guard(begun) + BEGUN + content
        fields = {**self.encoder.guard(message.more), "role": message.role, "content": content}
        if message.role == "assistant":
            thinking, rest = split_thinking(content)
            if thinking is not None:
                # "" under a key would keep templates from looking into the content
                fields = {k: v for k, v in fields.items() if v or k not in THINKING_KEYS}
                if self._moves_thinking and not fields.get("reasoning_content"):
                    fields["reasoning_content"] = thinking.strip()
                    fields["content"] = rest.lstrip("\n")
        if message.tool_calls:
            fields["tool_calls"] = self.encoder.guard(message.tool_calls)
            fields["content"] = fields["content"] or self._no_content
        return fields

    def _render_answer(
        self, messages: list[TemplateMessage], context: Context, last: int
    ) -> tuple[str, dict[int, Span]]:
        """Render answer `last` after its prompt; return the text, and where this answer and other marked ones are."""
        before, message, prompt = messages[:last], messages[last], ""
        try:
            prompt = self._render(context, before, True)
        except DropRowError:
            if before and not self.marks_generation:
                raise
        if not (prompt or self.marks_generation):
            raise DropRowError(
                "an answer stands where the chat template opens no turn, before the first question"
            )
        self._check_shown(before, context, prompt)
        is_written = False
        for spelling in spellings(message, prompt):
            text, spans = self._render_after(prompt, context, [*before, spelling])
            if last in spans and is_complete(message, text, spans[last]):
                return text, spans
            is_written |= last in spans
        names = self.variables & context.keys() - {"strftime_now"}
        settings = ", ".join(f"{name} = {context[name]}" for name in sorted(names))
        if problem := why_incomplete(message, prompt, settings):
            raise DropRowError(problem)
        if is_written:
            raise DropRowError(LEFT_OUT)
        raise DropRowError(
            "the chat template does not write an answer where it opens the assistant's turn: it opens with "
            f"{self._opening!r}, but writes the answer '2' as {self._answered!r}; make "
            "them agree by data.chat_template_kwargs (enable_thinking = false where a turn opens with thinking), or "
            "set data.chat_template to another"
        )

    def _check_shown(
        self, messages: list[TemplateMessage], context: Context, prompt: str
    ) -> None:
        """Raise DropRowError for a message that the prompt does not show."""
        numbered = [*messages]
        for i in hidden_messages(messages, prompt):
            numbered[i] = messages[i] | {"content": f"{i:020}"}
        if not prompt or numbered == messages:
            return
        # a template may write a text in another way, without its line breaks, but not a number in the text's place
        for i in hidden_messages(numbered, self._render(context, numbered, True)):
            role = messages[i]["role"]
            raise DropRowError(f"the chat template does not show a {role} message")

    def _render_after(
        self, prompt: str, context: Context, messages: list[TemplateMessage]
    ) -> tuple[str, dict[int, Span]]:
        """Render messages of which the last answers a prompt; return the text, and where this and marked answers are.

        The last answer has no place if it does not continue the prompt.
        """
        text, marked = self._render_marked(context, messages)
        spans, last = {}, len(messages) - 1
        if self.marks_generation:
            indices = assistant_indices(messages)
            if len(marked) != len(indices):
                count = f"{len(marked)} of {len(indices)} assistant messages"
                raise DropRowError(f"the chat template shows {count}")
            spans = dict(zip(indices, marked))
        if not text.startswith(prompt):
            # Some prompts change once an answer follows: gpt-oss's template forgets the thinking before calls, and
            # Mistral-Nemo's shows the system text in the last message alone. A model continues the prompt, so the
            # answer is put there as the template writes it after a question of ours.
            asked = self._render(context, [QUESTION], True)
            answered = self._render(context, [QUESTION, messages[-1]])
            answer = answered.removeprefix(asked)
            if not (answered.startswith(asked) and text.endswith(answer)):
                return text, {}
            text, spans = prompt + answer, {}
        return text, spans or {last: (len(prompt), len(text))}

    def _find_answers(
        self,
        messages: list[TemplateMessage],
        context: Context,
        text: str,
        last: dict[int, Span],
    ) -> dict[int, Span]:
        """Find all answers in the text of the last one, by marks of the template or of ours; none if in doubt.

        Rendering every answer alone would take a time that grows with the square of the turns.
        """
        marked = messages[: max(last) + 1]
        indices = assistant_indices(marked)
        try:
            start, first = self._render_answer(messages, context, indices[0])
            if not text.startswith(start.rstrip("\n")):
                return {}
            if self.marks_generation:
                return {} if "think" in self.text else last
            for i in indices:
                content = marked[i]["content"]
                if not content or content != content.strip() or len(marked[i]) > 2:
                    return {}
                marked[i] = {**marked[i], "content": OPEN + content + CLOSE}
            found_text, found = self._render_marked(context, marked)
        except DropRowError:
            return {}
        if found_text != text or len(found) != len(indices):
            return {}
        tail = text[found[-1][1] :]
        spans = {i: (start, end + len(tail)) for i, (start, end) in zip(indices, found)}
        is_certain = {**first, **last}.items() <= spans.items() and all(
            text[:start].endswith(self._opening) and text.startswith(tail, end)
            for start, end in found
        )
        return spans if is_certain else {}

    def _weighed(self, text: str, answers: dict[Span, float]) -> Rendered:
        """Cut a rendered text around weighted answers, each with the token that ends its turn, and after the last."""
        parts, position = [], 0
        for i, ((start, end), weight) in enumerate(sorted(answers.items()), 1):
            start = max(start, text.find(BEGUN, start, end) + 1)
            turn_end = self._turn_end(text, start, end)
            answer = text[start : turn_end or end]
            if not turn_end and i == len(answers):
                answer += self._special_texts["eos_token"]
            parts += [(text[position:start], 0.0), (answer, weight)]
            position = turn_end or end
        return self.encoder.split_special(parts or [(text, 0.0)])

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """Return the end of the token that ends an answer, at its end or just after it; 0 if there is none."""
        pattern = self.encoder.special_pattern
        inside = [match.end() for match in pattern.finditer(text, start, end)]
        if inside and not text[inside[-1] : end].strip():
            return inside[-1]
        after = pattern.match(text, end)
        turn_ends = *TURN_ENDS, self._special_texts["eos_token"]
        return after.end() if after and after[0].strip() in turn_ends else 0

    def _render(
        self, context: Context, messages: list[TemplateMessage], opens: bool = False
    ) -> str:
        return self._render_marked(context, messages, opens)[0]

    def _render_marked(
        self, context: Context, messages: list[TemplateMessage], opens: bool = False
    ) -> tuple[str, list[Span]]:
        """Render messages; return the text, and where in it the marked answers are."""
        parts, size = [], 0
        variables = {**context, **self._special_texts, "add_generation_prompt": opens}
        try:
            if day := variables.get("strftime_now"):
                variables["strftime_now"] = date.fromisoformat(day).strftime
            for part in self._compiled.generate(variables, messages=messages):
                parts.append(part)
                size += len(part)
                if size > RENDER_CHARACTERS:
                    raise MemoryError
        except MemoryError:
            raise BadRowError(ENDLESS) from None
        except Exception as error:  # a template is code: it may fail in any way
            raise DropRowError(f"the chat template refuses it: {error}") from None
        return without_marks("".join(parts))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
