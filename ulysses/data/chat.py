"""Conversations -> tokens and the exact spans of tokens that the assistant wrote (the only `transformers` import).

    messages --template--> "<header>question<end><header>" "answer<end>" ...    cut where the assistant begins and ends,
                            tokens, not trained             tokens, trained     then each piece is tokenised on its own

Pieces make the mask exact: a prompt's tokens are the same with and without its answer, as at inference. Special-token
strings inside a message stay text; only the template writes special tokens.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ulysses.data.records import DataError, DropRowError, Message

NAMED_TEMPLATES = ("llama3", "qwen2.5", "chatml", "plain")
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "</s>",
)
OPEN, CLOSE, GUARD = (
    "\ufdd0",
    "\ufdd1",
    "\ufdd2",
)  # Unicode noncharacters, never in text meant for interchange
TEXT_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str | Path, **special: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, a hub id or a bare tokenizer.json; never runs code from the folder.

    Args:
        special: bos_token, eos_token, ... by their text; a bare tokenizer.json needs at least eos_token.

    Raises DataError: nothing there, or a named token is not in the vocabulary.
    """
    place = Path(path).expanduser()
    file = place if place.is_file() else place / "tokenizer.json"
    try:
        if file.is_file() and (place.is_file() or not (place / "tokenizer_config.json").exists()):
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif place.is_dir() and not file.exists():
            tokenizer = AutoTokenizer.from_pretrained(
                str(place), trust_remote_code=False, use_fast=True
            )
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(place) if place.is_dir() else str(path)
            )
    except Exception as error:  # every library layer raises its own class
        problem = " ".join(str(error).split())[:300]
        raise DataError(
            f"no tokenizer could be loaded from {path} ({place.absolute()}): {problem}"
        ) from None
    vocabulary = tokenizer.get_vocab()
    for name, text in special.items():
        if name not in SPECIAL_NAMES:
            raise DataError(f"special token {name!r} is unknown; name {', '.join(SPECIAL_NAMES)}")
        if text not in vocabulary:
            raise DataError(
                f"{name} is {text!r}, which is not in the vocabulary of {file}; its special tokens are "
                f"{', '.join(_special_texts(tokenizer)) or 'none'}"
            )
        setattr(tokenizer, name, text)
    if tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer {path} names no EOS token; name one, for example "
            'model.special_tokens = { eos_token = "<|endoftext|>" } (its special tokens are '
            f"{', '.join(_special_texts(tokenizer)) or 'none'})"
        )
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash everything of a tokenizer that decides tokens (not its chat template)."""
    names = [getattr(tokenizer, name) for name in SPECIAL_NAMES]
    text = tokenizer.backend_tokenizer.to_str() + json.dumps(names)
    return hashlib.sha256(text.encode()).hexdigest()


def _special_texts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return [token.content for _, token in sorted(added.items()) if token.special]


class TextEncoder:
    """Tokenise plain text: special-token strings in it stay text, nothing is put around it.

    `bos` is None unless the tokenizer itself begins texts with it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend = Tokenizer.from_str(
            tokenizer.backend_tokenizer.to_str()
        )  # ours: the settings below stay here
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        added = self.backend.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        patterns = []
        for token in sorted(added.values(), key=lambda t: -len(t.content)):
            if token.special:
                left, right = (r"\s*" if side else "" for side in (token.lstrip, token.rstrip))
                patterns.append(f"{left}({re.escape(token.content)}){right}")
        self.special_pattern = re.compile("|".join(patterns) or r"(?!)")
        self.eos = int(tokenizer.eos_token_id)
        first = tokenizer("a")["input_ids"][:1]
        self.bos = tokenizer.bos_token_id if tokenizer.bos_token_id in first else None

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [
            e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def split_special(self, text: str) -> list[str | int]:
        """Cut rendered text into plain texts and the ids of the special tokens between them."""
        parts: list[str | int] = []
        start = 0
        for match in self.special_pattern.finditer(text):
            parts += [text[start : match.start()], self.special[match[match.lastindex or 0]]]
            start = match.end()
        parts.append(text[start:])
        return [
            part.replace(GUARD, "") if isinstance(part, str) else part
            for part in parts
            if part != ""
        ]


class Encoded(NamedTuple):
    """Tokens of a conversation; spans[i] is (start, stop) of assistant message i with its end-of-turn token."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class _Piece(NamedTuple):
    parts: list[str | int]  # plain texts and special token ids
    trained: bool


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} puts marks around what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 asks for this class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


class ChatTemplate:
    """A compiled chat template together with its tokenizer.

    Args:
        template: "tokenizer" (its own), "llama3", "qwen2.5", "chatml", "plain", or the path of a .jinja file.

    Raises DataError: no such template, or it writes special tokens that the tokenizer does not have.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str = "tokenizer") -> None:
        self.encoder = TextEncoder(tokenizer)
        self.name = template
        self.text = _template_text(tokenizer, template)
        self.marks_generation = re.search(r"\{%-?\s*generation\b", self.text) is not None
        self._special_names = {name: getattr(tokenizer, name) or "" for name in SPECIAL_NAMES}
        try:
            self._compiled = _environment().from_string(self.text)
        except TemplateError as error:
            raise DataError(f"chat template {template} is not valid Jinja: {error}") from None
        self._check(tokenizer)

    @property
    def end_of_turn(self) -> int:
        """The id of the token that ends an assistant's turn: EOS where the template writes none."""
        encoded = self.encode([Message("user", "a"), Message("assistant", "a")])
        return encoded.tokens[encoded.spans[-1][1] - 1]

    @property
    def stop_tokens(self) -> list[int]:
        """Token ids that end an assistant turn: the template's end-of-turn token and EOS."""
        return sorted({self.end_of_turn, self.encoder.eos})

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        generation_prompt: bool = False,
    ) -> Encoded:
        """Tokenise one conversation; see encode_batch. DropRowError if the template cannot express it."""
        outcome = self.encode_batch([(messages, tools, generation_prompt)])[0]
        if isinstance(outcome, DropRowError):
            raise outcome
        return outcome

    def encode_batch(
        self, conversations: Iterable[tuple[Sequence[Message], Sequence[Any], bool]]
    ) -> list[Encoded | DropRowError]:
        """Tokenise (messages, tools, generation_prompt) triples.

        The tokens begin with exactly one BOS where the tokenizer or the template asks for one. They end with the last
        assistant message's end-of-turn token (EOS where the template writes none), or with the opening of the
        assistant's turn if generation_prompt.
        """
        outcomes: list[list[_Piece] | DropRowError] = []
        texts: dict[str, list[int]] = {}
        for messages, tools, generation_prompt in conversations:
            try:
                pieces = self._pieces(messages, tools, generation_prompt)
            except DropRowError as error:
                outcomes.append(error)
                continue
            cut = [_Piece(self.encoder.split_special(text), trained) for text, trained in pieces]
            texts.update(
                (part, []) for piece in cut for part in piece.parts if isinstance(part, str)
            )
            outcomes.append(cut)
        texts = dict(zip(texts, self.encoder.encode_texts(list(texts))))
        return [self._join(o, texts) if isinstance(o, list) else o for o in outcomes]

    def _join(self, pieces: "list[_Piece]", texts: dict[str, list[int]]) -> Encoded:
        tokens: list[int] = []
        spans = []
        for piece in pieces:
            start = len(tokens)
            for part in piece.parts:
                tokens += texts[part] if isinstance(part, str) else [part]
            if piece.trained:
                spans.append((start, len(tokens)))
        bos = self.encoder.bos
        if bos is not None and tokens[:1] != [bos]:
            tokens, spans = [bos, *tokens], [(start + 1, stop + 1) for start, stop in spans]
        return Encoded(tokens, spans)

    def _pieces(
        self, messages: Sequence[Message], tools: Sequence[Any], generation_prompt: bool
    ) -> list[tuple[str, bool]]:
        """Render and cut into (text, written by the assistant)."""
        if tools and "tools" not in self.text:
            raise DropRowError("the chat template has no place for tools")
        if any(m.tool_calls for m in messages) and "tool_calls" not in self.text:
            raise DropRowError("the chat template has no place for tool calls")
        plain = [self._message(m) for m in messages]
        guarded_tools = self._guard(list(tools)) or None
        rendered = self._render(plain, guarded_tools, generation_prompt)
        if self.marks_generation:
            text, spans = _take_marks(rendered)
        else:
            text, spans = rendered, self._spans_by_prefix(plain, guarded_tools, rendered)
        expected = sum(m.role == "assistant" for m in messages)
        if len(spans) != expected:
            raise DropRowError(
                f"the chat template shows {len(spans)} of {expected} assistant messages"
            )
        pieces: list[tuple[str, bool]] = []
        at = 0
        for index, (start, stop) in enumerate(spans):
            stop, ended = self._turn_end(text, start, stop)
            last = index == len(spans) - 1
            answer = text[start:stop]
            if last and not ended and not generation_prompt:
                answer += self._special_names["eos_token"]
            pieces += [(text[at:start], False), (answer, True)]
            at = stop
        return [*pieces, (text[at:], False)] if generation_prompt or not spans else pieces

    def _turn_end(self, text: str, start: int, stop: int) -> tuple[int, bool]:
        """Move the end of an answer to just after its end-of-turn token, if it has one."""
        inside = list(self.encoder.special_pattern.finditer(text, start, stop))
        if inside and not text[inside[-1].end() : stop].strip():
            return inside[-1].end(), True
        after = self.encoder.special_pattern.match(text, stop)
        if after and after[0].strip() in (*TURN_ENDS, self._special_names["eos_token"]):
            return after.end(), True
        return stop, False

    def _spans_by_prefix(
        self, messages: list[Any], tools: Any, whole: str
    ) -> list[tuple[int, int]]:
        """Find each answer as what rendering one message more adds to the opened assistant turn."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self._render(messages[:index], tools, True)
            closed = self._render(messages[: index + 1], tools, False)
            if not closed.startswith(opened) or not whole.startswith(closed.rstrip("\n")):
                raise DropRowError(
                    "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                    "mark them in the template with {% generation %}"
                )
            spans.append((len(opened), min(len(closed), len(whole))))
        return spans

    def _render(self, messages: list[Any], tools: Any, generation_prompt: bool) -> str:
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=generation_prompt,
                **self._special_names,
            )
        except (TemplateError, TypeError) as error:
            raise DropRowError(f"the chat template refuses it: {error}") from None

    def _message(self, message: Message) -> dict[str, Any]:
        plain = {"role": message.role, "content": self._guard(message.content)}
        if message.tool_calls:
            plain["tool_calls"] = self._guard(list(message.tool_calls))
        return plain

    def _guard(self, value: Any) -> Any:
        """Break special-token strings inside data with a mark that split_special takes out again."""
        if isinstance(value, str):
            if OPEN in value or CLOSE in value or GUARD in value:
                raise DropRowError("it holds one of the Unicode noncharacters U+FDD0 to U+FDD2")
            return self.encoder.special_pattern.sub(_broken, value)
        if isinstance(value, dict):
            return {self._guard(key): self._guard(entry) for key, entry in value.items()}
        return [self._guard(entry) for entry in value] if isinstance(value, list | tuple) else value

    def _check(self, tokenizer: PreTrainedTokenizerFast) -> None:
        question = [{"role": "user", "content": "a"}]
        try:
            opened, closed = self._render(question, None, True), self._render(question, None, False)
            answered = self._render([*question, {"role": "assistant", "content": "a"}], None, False)
        except DropRowError as error:
            raise DataError(
                f"chat template {self.name} cannot render one question: {error}"
            ) from None
        if opened == closed and not self.marks_generation:
            raise DataError(
                f"chat template {self.name} knows neither add_generation_prompt nor {{% generation %}}, so "
                "the assistant's tokens cannot be told apart; add one of them"
            )
        absent = sorted(
            {t for t in TEXT_TOKEN.findall(opened + answered) if t not in tokenizer.get_vocab()}
        )
        if absent:
            has = ", ".join(self.encoder.special) or "none"
            raise DataError(
                f"chat template {self.name} writes {', '.join(absent)}, which the tokenizer does not have "
                f"(its special tokens are {has}); set data.chat_template to another of "
                f"{', '.join(NAMED_TEMPLATES)} or to a .jinja file"
            )
        whole, *parts = self.encoder.encode_texts(["\na", "\n", "a"])
        if whole != parts[0] + parts[1]:
            raise DataError(
                "this tokenizer puts a space before every text (SentencePiece style), so the parts of a "
                "chat cannot be tokenised on their own; use a byte-level tokenizer such as Llama-3's"
            )


def _broken(match: re.Match[str]) -> str:
    first = match.start(match.lastindex or 0) - match.start() + 1
    return match[0][:first] + GUARD + match[0][first:]


def _take_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans, start = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", rendered):
        if part == OPEN:
            start = len(text)
        elif part == CLOSE:
            spans.append((start, len(text)))
        else:
            text += part
    return text, spans


def _template_text(tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    if name == "tokenizer":
        own = tokenizer.chat_template
        own = own.get("default") if isinstance(own, dict) else own
        if not own:
            raise DataError(
                "the tokenizer has no chat template; set data.chat_template to "
                f"{', '.join(NAMED_TEMPLATES)} or a .jinja file"
            )
        return own
    path = (
        Path(__file__).with_name(f"{name}.jinja")
        if name in NAMED_TEMPLATES
        else Path(name).expanduser()
    )
    if not path.is_file():
        raise DataError(
            f"chat template {name!r} is neither tokenizer, {', '.join(NAMED_TEMPLATES)} nor a file "
            f"({path.absolute()})"
        )
    return path.read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment  # no strftime_now: templates then use their fixed date, and data does not change by the day
