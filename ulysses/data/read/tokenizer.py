"""Load tokenizers, and tokenise plain text with them (only this file imports transformers)."""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.cache import digest_of_value
from ulysses.data.read.sources import safe_parts

# Marks in rendered text: around an answer, inside of strings that look like special tokens, and where an answer begins
# that its prompt has begun. They are Unicode noncharacters, which no text meant for interchange holds.
MARKS = OPEN, CLOSE, GUARD, BEGUN = "\ufdd0\ufdd1\ufdd2\ufdd3"
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
# Tags around thinking, which a mark inside of them hides from templates. They are the same tokens wherever they stand.
HIDDEN_TAG = re.compile(f"(</?think){GUARD}>")
NAMED_TEMPLATES = ("llama3", "llama3.1", "qwen2.5", "qwen3", "chatml", "plain")
TURN_ENDS = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end_of_text|> <|endoftext|> <|end|> </s>".split()
)
NEWLINE = re.compile(r"\s*[\r\n]")
# settings of a tokenizer's parts with which it puts no space before a text
NO_SPACE = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
# parts of a text, or ids of special tokens, with their weights in the loss
Rendered = list[tuple[str | int, float]]


class Encoded(NamedTuple):
    """The ids of a text, and their weights in the loss."""

    ids: list[int]
    weights: list[float]


def load_tokenizer(path: str | Path, **special: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, a hub id or a bare tokenizer.json; code in the folder is never run.

    Args:
        special: the texts of bos_token, eos_token, ...; a bare tokenizer.json needs at least eos_token.

    Raises DataError: there is no tokenizer, or a named token is not in its vocabulary.
    """
    file = Path(expanduser(path))
    try:
        if file.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        # a folder of vocab.json and merges.txt: few need this import, which takes seconds
        elif file.is_dir() and not (file / "tokenizer.json").exists():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(file), trust_remote_code=False)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file))
    except Exception as error:  # every library below has its own classes
        problem = " ".join(str(error).split())[:300]
        raise DataError(
            f"no tokenizer could be loaded from {path} ({file.absolute()}): {problem}"
        ) from None
    added = tokenizer.added_tokens_decoder.values()
    special_tokens = ", ".join(token.content for token in added if token.special) or "none"
    for name, text in special.items():
        if name not in SPECIAL_NAMES:
            raise DataError(
                f"special token {name!r} is unknown; name {', '.join(SPECIAL_NAMES)}"
            )
        if text not in tokenizer.get_vocab():
            raise DataError(
                f"{name} is {text!r}, which is not in the vocabulary of {path}; its special tokens are {special_tokens}"
            )
        setattr(tokenizer, name, text)
    if tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer {path} names no EOS token; name one, for example "
            f'model.special_tokens = {{ eos_token = "<|endoftext|>" }} (its special tokens are {special_tokens})'
        )
    return tokenizer


def template_text(
    tokenizer: PreTrainedTokenizerFast, name: str, for_tools: bool = False
) -> str:
    """Return the Jinja text of a template, which `name` itself may be; DataError if there is no such template.

    A tokenizer may have several. As in transformers, "tool_use" is for rows with tools, and "default" for the others.
    """
    if name == "tokenizer":
        # with a list, also an empty one, transformers takes "tool_use" where there is one
        for tools in ([], None) if for_tools else (None, []):
            with suppress(ValueError):
                return tokenizer.get_chat_template(tools=tools)
        named = " of the name default or tool_use" if tokenizer.chat_template else ""
        raise DataError(
            f"the tokenizer has no chat template{named}; set data.chat_template to "
            f"{', '.join(NAMED_TEMPLATES)} or a .jinja file"
        )
    if "{%" in name or "{{" in name:
        return name
    path = Path(expanduser(name))
    if name in NAMED_TEMPLATES:
        path = Path(__file__).with_name(f"{name}.jinja")
    if not path.is_file():
        raise DataError(
            f"chat template {name!r} is neither tokenizer, {', '.join(NAMED_TEMPLATES)} nor a file "
            f"({path.absolute()})"
        )
    return path.read_text(encoding="utf-8-sig")


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash everything of a tokenizer that decides the tokens of rendered texts, so not its chat template."""
    names = [getattr(tokenizer, name) for name in SPECIAL_NAMES]
    return digest_of_value([tokenizer.backend_tokenizer.to_str(), names])


class TextEncoder:
    """Tokenise plain text: strings in it that look like special tokens stay text, and nothing is put around it.

    Attributes:
        special: ids of the special tokens, and of all that may end a turn, by their text.
        special_pattern: matches a special token, with the white space that it strips.
        bos: None unless the tokenizer itself begins texts with it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        # A copy, so that these settings do not change the caller's tokenizer.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos = int(tokenizer.eos_token_id)
        first = tokenizer("a")["input_ids"][:1]
        self.bos = tokenizer.bos_token_id if tokenizer.bos_token_id in first else None
        self._take_spaces(tokenizer.eos_token)
        self.backend.encode_special_tokens = True
        added = self.backend.get_added_tokens_decoder()
        # what ends a turn does so too where it was added as a token like any other
        ends = {*TURN_ENDS, tokenizer.eos_token}
        special = [i for i, token in added.items() if token.special or token.content in ends]
        # so that their text in data stays text
        self.backend.add_special_tokens([added[i] for i in special])
        self.special = {added[i].content: i for i in special}
        patterns = [
            (r"\s*" if token.lstrip else "")
            + re.escape(token.content)
            + (r"\s*" if token.rstrip else "")
            for token in sorted(map(added.get, special), key=lambda token: -len(token.content))
        ]
        self.special_pattern = re.compile(f"({'|'.join(patterns) or '(?!)'})")

    def _take_spaces(self, special: str) -> None:
        """Stop the backend from putting a space before texts, as SentencePiece tokenizers do, and learn where it would.

        We cut texts into parts, and only some parts begin where the tokenizer would put a space. `with_space` puts it.
        """
        encode = partial(self.backend.encode, add_special_tokens=False)
        # a text that stands first, and one after a special token, whose own id is left out
        before = {(True, text): encode(text).ids for text in ("a", " a")}
        before |= {(False, text): encode(special + text).ids[1:] for text in ("a", " a")}
        for part in (self.backend.normalizer, self.backend.pre_tokenizer):
            is_several = isinstance(part, normalizers.Sequence | pre_tokenizers.Sequence)
            for each in part if is_several else [part]:
                for name, value in NO_SPACE.items():
                    if hasattr(each, name):
                        setattr(each, name, value)
        self._spaced = {
            (is_first, text.startswith(" "))
            for (is_first, text), ids in before.items()
            if ids == encode(" " + text).ids
        }

    def with_space(self, text: str, is_first: bool = True) -> str:
        """Return a text that stands first, or after a special token, with the space that the tokenizer puts there."""
        needs_space = (is_first, text.startswith(" ")) in self._spaced
        return " " + text if needs_space else text

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text; a long one is cut, because the tokenizer needs 200 bytes for each token."""
        ids = []
        for part in safe_parts(text):
            try:
                (encoding,) = self.backend.encode_batch_fast([part], add_special_tokens=False)
            except BaseException as error:
                # Rust's error is no Exception
                if type(error).__name__ != "PanicException":
                    raise
                raise BadRowError(f"cannot be tokenised: {error}") from None
            ids += encoding.ids
        return ids

    def guard(self, value: object) -> Any:
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

    def encode_batch(
        self, texts: Sequence[Rendered], *, as_whole: bool = False
    ) -> list[Encoded]:
        """Tokenise rendered texts.

        Args:
            as_whole: let an answer that begins with a newline share its first token with the end of its prompt, as in
                the tokens of the whole text. Without it a prompt has the same tokens with and without its answer.
        """
        encode_text = cache(self.encode_text)  # answers to one prompt have its text in common
        encoded = []
        for rendered in texts:
            tokens = []
            weights = []
            before = 0
            for part, weight in rendered:
                ids = encode_text(part) if isinstance(part, str) else [part]
                prompt_ids = []
                if as_whole and weight and isinstance(before, str) and NEWLINE.match(str(part)):
                    prompt_ids = encode_text(before)
                    ids = self.encode_text(f"{before}{part}")
                start = len(tokens) - len(prompt_ids)
                # the ids that the prompt keeps: all before the token that it shares with the answer
                while prompt_ids != ids[: len(prompt_ids)]:
                    prompt_ids = prompt_ids[:-1]
                answer_size = len(ids) - len(prompt_ids)
                tokens[start:] = ids
                weights[start:] = [0.0] * len(prompt_ids) + [weight] * answer_size
                before = part
            encoded.append(Encoded(tokens, weights))
        return encoded

    def split_special(self, parts: Rendered) -> Rendered:
        """Cut texts with weights into plain texts and the ids of the special tokens between them, BOS before all."""
        rendered = []
        for text, weight in parts:
            text = HIDDEN_TAG.sub(r"\1>", text)
            for i, piece in enumerate(self.special_pattern.split(text)):
                plain = unguarded(piece)
                if i % 2 and plain:
                    rendered.append((self.special[plain.strip()], weight))
                elif plain:
                    if not rendered or isinstance(rendered[-1][0], int):
                        plain = self.with_space(plain, not rendered)
                    rendered.append((plain, weight))
        if self.bos is not None and rendered[:1] != [(self.bos, 0.0)]:
            rendered.insert(0, (self.bos, 0.0))
        return rendered


def _broken(match: re.Match[str]) -> str:
    token = match[0].strip()
    if token in ("<think>", "</think>"):
        return match[0]  # templates read it, and a model writes it as its token
    return match[0].replace(token, GUARD.join(token))


def unguarded(text: str) -> str:
    """Return a text without the marks that guard what a template reads."""
    return text.replace(GUARD, "").replace(BEGUN, "")


def without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendered text without the marks around its answers, and where in it the answers stand."""
    parts = text.replace(CLOSE, OPEN).split(OPEN)  # those with odd indices are the answers
    edges = list(accumulate(map(len, parts)))
    return "".join(parts), list(zip(edges[::2], edges[1::2]))
