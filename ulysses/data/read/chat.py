"""Tokenise conversations, and find exactly the tokens that the assistant wrote (only this file imports transformers).

    messages --template--> "<header>question<end><header>" "answer<end>" ...    cut where the assistant begins and ends,
                            tokens, not trained             tokens, trained     then each piece is tokenised on its own

Because pieces are tokenised on their own, a prompt has the same tokens with and without its answer, as it has at
inference. Strings inside a message that look like special tokens stay text; only the template writes special tokens.
Templates of reasoning models write earlier turns differently, without their thinking. Each answer is then rendered as
the end of its own conversation, so that it follows the history that the model will see.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from string import printable
from typing import Any

from jinja2 import TemplateError, nodes
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.cache import digest_of_value
from ulysses.data.read.messages import Message
from ulysses.data.read.sources import in_batches, safe_parts
from ulysses.data.read.templates import (
    CLOSE,
    GUARD,
    NAMED_TEMPLATES,
    OPEN,
    at_marks,
    content_of_calls,
    ends,
    is_lost,
    join_bounded,
    template_environment,
    template_text,
    too_much,
    with_marks,
)

TURN_ENDS = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end_of_text|> <|endoftext|> <|end|> </s>".split()
)
# Marks in rendered text. They are Unicode noncharacters, which no text meant for interchange holds.
BEGUN = "\ufdd3"
MARKS = OPEN, CLOSE, GUARD, BEGUN
TEXT_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
NEWLINE = re.compile(r"\s*[\r\n]")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
OURS = {"messages", "tools", "add_generation_prompt", *SPECIAL_NAMES}  # no row sets them
IDENTITIES = ("id", "name", "tool_call_id")  # keys of a message that a template need not show
# of texts that are tokenised together; the results of more would not stay in the processor's cache
CHARACTERS_AT_ONCE = 1 << 15
SAMPLE = printable * 100
# settings of a tokenizer's parts with which it puts no space before a text
NO_SPACE = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
Span = tuple[int, int]  # start and stop
Rendered = list[tuple[str | int, float]]  # texts, or ids of special tokens, and their weights
Encoded = tuple[list[int], list[float]]  # tokens and their weights


def load_tokenizer(path: str | Path, **special: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, a hub id or a bare tokenizer.json; code in the folder is never run.

    Args:
        special: the texts of bos_token, eos_token, ...; a bare tokenizer.json needs at least eos_token.

    Raises DataError: there is no tokenizer, or a named token is not in its vocabulary.
    """
    place = Path(path).expanduser()
    try:
        if place.is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(place))
        # vocab.json, merges.txt; few folders need the import, which takes seconds
        elif place.is_dir() and not (place / "tokenizer.json").exists():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(place))
    except Exception as error:  # every layer below has its own classes
        problem = " ".join(str(error).split())[:300]
        raise DataError(
            f"no tokenizer could be loaded from {path} ({place.absolute()}): {problem}"
        ) from None
    added = tokenizer.added_tokens_decoder.values()
    known = ", ".join(token.content for token in added if token.special) or "none"
    for name, text in special.items():
        if name not in SPECIAL_NAMES:
            raise DataError(
                f"special token {name!r} is unknown; name {', '.join(SPECIAL_NAMES)}"
            )
        if text not in tokenizer.get_vocab():
            raise DataError(
                f"{name} is {text!r}, which is not in the vocabulary of {path}; its special tokens are {known}"
            )
        setattr(tokenizer, name, text)
    if tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer {path} names no EOS token; name one, for example "
            f'model.special_tokens = {{ eos_token = "<|endoftext|>" }} (its special tokens are {known})'
        )
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash everything of a tokenizer that decides tokens, which its chat template does not."""
    names = [getattr(tokenizer, name) for name in SPECIAL_NAMES]
    return digest_of_value([tokenizer.backend_tokenizer.to_str(), names])


class TextEncoder:
    """Tokenise plain text: strings in it that look like special tokens stay text, and nothing is put around it.

    Attributes:
        special: ids of the special tokens by their text.
        special_pattern: matches a special token, with the white space that it strips.
        bos: None unless the tokenizer itself begins texts with it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        # A copy, so that these settings do not change the caller's tokenizer.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        if not ends(lambda: self.backend.encode(SAMPLE)):
            raise DataError(
                f"the tokenizer takes too much time or memory for {len(SAMPLE):,} characters; mend its normalizer or "
                "its pattern"
            )
        self.eos = int(tokenizer.eos_token_id)
        first = tokenizer("a")["input_ids"][:1]
        self.bos = tokenizer.bos_token_id if tokenizer.bos_token_id in first else None
        self._take_spaces(tokenizer.eos_token)
        self.backend.encode_special_tokens = True
        added = self.backend.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special}
        patterns = [
            r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
            for _, token in sorted(added, key=lambda item: -len(item[1].content))
            if token.special
        ]
        self.special_pattern = re.compile(f"({'|'.join(patterns) or '(?!)'})")

    def _take_spaces(self, special: str) -> None:
        """Take out the space that SentencePiece tokenizers put before a text, and learn where it belongs.

        It does not belong where we cut a text in parts. `begin` puts it before the others.
        """

        def encoded(text: str) -> list[int]:
            return self.backend.encode(text, add_special_tokens=False).ids

        cases = list(product((True, False), ("a", " a")))
        usual = [
            encoded(text if first else special + text)[not first :] for first, text in cases
        ]
        for part in (self.backend.normalizer, self.backend.pre_tokenizer):
            is_several = isinstance(part, normalizers.Sequence | pre_tokenizers.Sequence)
            for each, (name, value) in product(
                part if is_several else [part], NO_SPACE.items()
            ):
                if hasattr(each, name):
                    setattr(each, name, value)
        self._spaced = {
            (first, text.startswith(" "))
            for (first, text), found in zip(cases, usual)
            if found == encoded(" " + text)
        }

    def begin(self, text: str, is_first: bool = True) -> str:
        """Return a text, the first one or one after a special token, with the space that the tokenizer puts there."""
        return " " * ((is_first, text.startswith(" ")) in self._spaced) + text

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text.

        The tokenizer gets few characters at once, because its own result takes 200 bytes for each token.
        """
        encoded: list[list[int]] = [[] for _ in texts]
        parts = ((i, part) for i, text in enumerate(texts) for part in safe_parts(text))
        for batch in in_batches(parts, CHARACTERS_AT_ONCE):
            places, strings = zip(*batch)
            try:
                results = self.backend.encode_batch_fast(strings, add_special_tokens=False)
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
                    raise
                raise BadRowError(f"cannot be tokenised: {error}") from None
            for i, result in zip(places, results):
                encoded[i] += result.ids
        return encoded

    def guard(self, value: Any) -> Any:
        """Break strings in data that look like special tokens with a mark that split_special takes out again."""
        if isinstance(value, str):
            if not value.isascii() and any(mark in value for mark in MARKS):
                raise DropRowError("it holds one of the Unicode noncharacters U+FDD0 to U+FDD3")
            return self.special_pattern.sub(_broken, value)
        if isinstance(value, dict):
            guarded = {self.guard(key): self.guard(entry) for key, entry in value.items()}
            return type(value)(guarded)
        if isinstance(value, list | tuple):
            return [self.guard(entry) for entry in value]
        return value

    def split_special(self, text: str) -> list[str | int]:
        """Cut rendered text into plain texts and the ids of the special tokens between them."""
        found: list[str | int] = []
        for place, part in enumerate(self.special_pattern.split(text)):
            plain = part.replace(GUARD, "").replace(BEGUN, "")
            if plain:
                found.append(self.special[plain.strip()] if place % 2 else plain)
        return found


def _broken(match: re.Match[str]) -> str:
    token = match[0].strip()
    return match[0].replace(token, GUARD.join(token))


class ChatTemplate:
    """A compiled chat template together with its tokenizer.

    Args:
        template: "tokenizer" (its own), one of NAMED_TEMPLATES, or the path of a .jinja file.

    Raises DataError: there is no such template, or it writes special tokens that the tokenizer does not have.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str = "tokenizer") -> None:
        self.encoder = TextEncoder(tokenizer)
        self.text = template_text(tokenizer, template)
        self._special_names = {name: getattr(tokenizer, name) or "" for name in SPECIAL_NAMES}
        environment, marked = template_environment(), with_marks(self.text)
        given = {"tools": None}

        def sample() -> list[str]:
            """Render a question with and without an opened turn, and with an answer."""
            self._compiled = environment.from_string(marked)
            both = [{"role": role, "content": "2"} for role in ("user", "assistant")]
            self._no_content = content_of_calls(both[:1], partial(self._render, given))
            parts = (both[:1], True), (both[:1], False), (both, False)
            return [self._render(given, *part) for part in parts]

        try:
            if not ends(sample):
                too_much()
            opened, closed, answered = sample()
        except TemplateError as error:
            raise DataError(f"chat template {template} is not valid Jinja: {error}") from None
        except (DropRowError, BadRowError) as error:
            problem = f"chat template {template} cannot render one question: {error}"
            raise DataError(problem) from None
        self.marks_generation = OPEN in answered
        self._opening = opened.removeprefix(closed)  # of the assistant's turn
        tree = environment.parse(marked)
        self._reads = {node.attr for node in tree.find_all(nodes.Getattr)}
        self._reads |= {node.value for node in tree.find_all(nodes.Const)}
        self._variables = {node.name for node in tree.find_all(nodes.Name)} - OURS
        # Mistral's and Llama-2's write nothing there
        is_opened = opened != closed or answered.removeprefix(opened).strip().startswith("2")
        if not is_opened and not self.marks_generation:
            raise DataError(
                f"chat template {template} knows neither add_generation_prompt nor {{% generation %}}, so "
                "the assistant's tokens cannot be told apart; add one of them"
            )
        known = tokenizer.backend_tokenizer.token_to_id
        written = TEXT_TOKEN.findall(opened + answered)
        absent = sorted({text for text in written if known(text) is None})
        if absent and template != "tokenizer":  # TinyLlama's own writes <|user|> as plain text
            raise DataError(
                f"chat template {template} writes {', '.join(absent)}, which the tokenizer does not have; set "
                f"data.chat_template to another of {', '.join(NAMED_TEMPLATES)} or to a .jinja file"
            )

    @property
    def end_of_turn(self) -> int:
        """The id of the token that ends an assistant's turn: EOS where the template writes none."""
        # some templates begin every answer with thinking
        for answer in ("<think>\na\n</think>\n\na", "a"):
            with suppress(DropRowError):
                messages = [Message("user", "a"), Message("assistant", answer)]
                return self.encode_batch(self.render(messages, answers=[1]))[0][0][-1]
        raise DataError("the chat template writes no answer where it opens its turn")

    @property
    def stop_tokens(self) -> list[int]:
        """Ids of the tokens that end an assistant turn: the template's end-of-turn token and EOS."""
        return sorted({self.end_of_turn, self.encoder.eos})

    def encode_batch(
        self, conversations: Sequence[Rendered], *, as_whole: bool = False
    ) -> list[Encoded]:
        """Tokenise several conversations at once, which is faster.

        Args:
            as_whole: an answer that begins with a newline may share its first token with the end of its prompt, as in
                the tokens of the whole text; otherwise its prompt has the tokens that it has alone.
        """
        parts = {part for rendered in conversations for part, _ in rendered}
        texts = [part for part in parts if isinstance(part, str)]
        ids: dict[Any, list[int]] = dict(zip(texts, self.encoder.encode_texts(texts)))
        encoded = []
        for rendered in conversations:
            tokens: list[int] = []
            weights: list[float] = []
            before: Any = 0
            for part, weight in rendered:
                own, alone = ids.get(part, [part]), []
                if as_whole and weight and isinstance(before, str) and NEWLINE.match(str(part)):
                    alone = ids[before]
                    (own,) = self.encoder.encode_texts([f"{before}{part}"])
                start, before = len(tokens) - len(alone), part
                while alone != own[: len(alone)]:
                    alone = alone[:-1]
                tokens[start:] = own
                weights[start:] = [0.0] * len(alone) + [weight] * (len(own) - len(alone))
            encoded.append((tokens, weights))
        return encoded

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        answers: Sequence[int] = (),
        turns: str = "together",
        variables: Mapping[str, Any] | None = None,
    ) -> list[Rendered]:
        """Render a conversation, and weigh what the assistant wrote; everything else has the weight 0.

        Every text begins with one BOS where the tokenizer or the template asks for one, and ends with the end-of-turn
        token of its last answer (EOS where the template writes none).

        Args:
            answers: the assistant messages that are to be told apart, by their places; without any, the conversation is
                a prompt, which ends with the opening of the assistant's turn or with the beginning of its answer.
            turns: "together" renders all answers in one text; "auto" uses a further text, the conversation up to the
                answer, where the template writes an answer differently in a longer conversation; "separate" gives every
                answer its own text. The last answer's text comes first.
            variables: what else the template reads, such as enable_thinking.

        Raises DropRowError if the template cannot express it, BadRowError if it does not show all of it.
        """
        calls = any(message.tool_calls for message in messages)
        for used, key in ((tools, "tools"), (calls, "tool_calls")):
            if used and key not in self.text:
                what = key.replace("_", " ")
                raise DropRowError(f"the chat template has no place for {what}")
        plain = [self._plain(message) for message in messages]
        given = {key: value for key, value in (variables or {}).items() if value is not None}
        if unread := given.keys() - self._variables:
            raise BadRowError(
                f"sets {min(unread)!r} in chat_template_kwargs, which its template does not read, or no row may set; "
                'remove it, or set columns = {unused = "chat_template_kwargs"}'
            )
        given = self.encoder.guard({**given, "tools": tools or None})
        if not answers:
            begun = bool(messages) and messages[-1].begun > 0
            text = "".join(at_marks(self._render(given, plain, not begun)))
            return [self._cut(text.partition(BEGUN)[0], {})]
        last = answers[-1]
        whole, known = self._up_to(plain, given, last)
        if not self.marks_generation and turns != "separate" and len(answers) > 2:
            known = self._at_once(plain, given, whole, known)
        # Only templates that know of thinking are known to write earlier turns differently.
        elif turns == "separate" or (turns == "auto" and "think" in self.text):
            known = {last: known[last]}
        texts: dict[str, dict[Span, float]] = {}
        for i in reversed(answers):
            if i not in known:
                text, spans = self._up_to(plain, given, i)
                known[i] = spans[i]
                if turns == "separate" or not whole.startswith(text.rstrip("\n")):
                    whole = text
            weight = messages[i].weight
            texts.setdefault(whole, {})[known[i]] = 1.0 if weight is None else weight
            if is_lost(plain[i], whole[slice(*known[i])]):
                raise DropRowError("the chat template leaves out a part of an answer")
        if turns == "together" and len(texts) > 1:
            raise DropRowError(
                "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                'mark them in the template with {% generation %}, or train each turn with data.turns = "auto"'
            )
        return [self._cut(text, weights) for text, weights in texts.items()]

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as templates read it, its text guarded; BadRowError if it holds what nobody would see."""
        for key, value in message.more.items():
            if value not in ("", [], {}) and key not in {*self._reads, *IDENTITIES}:
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
        plain = {**self.encoder.guard(message.more), "role": message.role, "content": content}
        if message.tool_calls:
            plain["tool_calls"] = self.encoder.guard(message.tool_calls)
            plain["content"] = content or self._no_content
        return plain

    def _up_to(self, messages: list[Any], given: Any, last: int) -> tuple[str, dict[int, Span]]:
        """Render the messages up to answer `last`; return the text, and where this answer and other marked ones are."""
        if self.marks_generation:
            text = self._render(given, messages[: last + 1])
            parts = at_marks(text)
            places = [i for i in range(last + 1) if messages[i]["role"] == "assistant"]
            if (shown := len(parts) // 2) != len(places):
                count = f"{shown} of {len(places)} assistant messages"
                raise DropRowError(f"the chat template shows {count}")
            ends = list(accumulate(map(len, parts)))
            return "".join(parts), dict(zip(places, zip(ends[::2], ends[1::2])))
        opened = self._render(given, messages[:last], True)
        # Some templates cut the thinking off every answer, although the model begins its own with it.
        content = (messages[last]["content"] or "").replace("</think>", f"</think{GUARD}>")
        for message in (messages[last], {**messages[last], "content": content}):
            text = self._render(given, [*messages[:last], message])
            if text.startswith(opened) and not is_lost(message, text[len(opened) :]):
                return text, {last: (len(opened), len(text))}
        raise DropRowError(
            "the chat template does not write an answer, or not all of it, where it opens the assistant's turn"
        )

    def _at_once(
        self, messages: list[Any], given: Any, text: str, last: dict[int, Span]
    ) -> dict[int, Span]:
        """Find all answers by marks in the last one's text, in time linear in the turns; only `last` if in doubt."""
        marked = messages[: max(last) + 1]
        places = [i for i, message in enumerate(marked) if message["role"] == "assistant"]
        for i in places:
            content = marked[i]["content"]
            if not content or content != content.strip() or len(marked[i]) > 2:
                return last
            marked[i] = {**marked[i], "content": OPEN + content + CLOSE}
        start, first = self._up_to(messages, given, places[0])
        parts = at_marks(self._render(given, marked))
        ends, tail = list(accumulate(map(len, parts))), parts[-1]
        spans = {i: (a, b + len(tail)) for i, a, b in zip(places, ends[::2], ends[1::2])}
        is_certain = (
            "".join(parts) == text
            and len(parts) == 2 * len(places) + 1
            and text.startswith(start.rstrip("\n"))
            and {**first, **last}.items() <= spans.items()
            and all(part.endswith(self._opening) for part in parts[:-1:2])
            and all(part.startswith(tail) for part in parts[2::2])
        )
        return spans if is_certain else last

    def _cut(self, text: str, answers: dict[Span, float]) -> Rendered:
        """Cut a rendered text around weighted answers, which end just after their end-of-turn tokens."""
        encoder, eos = self.encoder, self._special_names["eos_token"]
        parts, place = [], 0
        for (start, end), weight in sorted(answers.items()):
            start = max(start, text.find(BEGUN, start, end) + 1)
            *_, inside = None, *encoder.special_pattern.finditer(text, start, end)
            after = encoder.special_pattern.match(text, end)
            if inside and not text[inside.end() : end].strip():
                end = inside.end()
            elif after and after[0].strip() in (*TURN_ENDS, eos):
                end = after.end()
            elif len(parts) == 2 * len(answers) - 2:
                text, end = text[:end] + eos, end + len(eos)
            parts += [(text[place:start], 0.0), (text[start:end], weight)]
            place = end
        rendered: Rendered = []
        for part, weight in parts or [(text, 0.0)]:
            for piece in encoder.split_special(part):
                is_first = not rendered
                if isinstance(piece, str) and (is_first or isinstance(rendered[-1][0], int)):
                    piece = encoder.begin(piece, is_first)
                rendered.append((piece, weight))
        if encoder.bos is not None and rendered[:1] != [(encoder.bos, 0.0)]:
            rendered.insert(0, (encoder.bos, 0.0))
        return rendered

    def _render(self, given: Any, messages: list[Any], generation_prompt: bool = False) -> str:
        try:
            return join_bounded(
                self._compiled.generate(
                    messages=messages,
                    add_generation_prompt=generation_prompt,
                    **given,
                    **self._special_names,
                )
            )
        except MemoryError:
            too_much()
        except BadRowError:
            raise
        except Exception as error:  # a template is code: it may fail in any way
            raise DropRowError(f"the chat template refuses it: {error}") from None
