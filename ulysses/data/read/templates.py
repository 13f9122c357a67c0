"""Find the text of a chat template, the tokenizer's own, a built-in one or a file, and say in what Jinja it is read."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ulysses.data import DataError

NAMED_TEMPLATES = ("llama3", "llama3.1", "qwen2.5", "qwen3", "chatml", "plain")
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # marks in rendered text
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def template_text(tokenizer: Any, name: str) -> str:
    """Return the Jinja text; DataError if there is no such template."""
    if name == "tokenizer":
        try:
            return tokenizer.get_chat_template()
        except ValueError:
            raise DataError(
                "the tokenizer has no chat template; set data.chat_template to "
                f"{', '.join(NAMED_TEMPLATES)} or a .jinja file"
            ) from None
    path = Path(name).expanduser()
    if name in NAMED_TEMPLATES:
        path = Path(__file__).with_name(f"{name}.jinja")
    if not path.is_file():
        raise DataError(
            f"chat template {name!r} is neither tokenizer, {', '.join(NAMED_TEMPLATES)} nor a file "
            f"({path.absolute()})"
        )
    return path.read_text(encoding="utf-8")


def template_environment() -> Environment:
    """Return the sandbox in which templates are compiled, with what Hugging Face's templates expect there."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # There is no strftime_now: templates then write their fixed date, and tokens do not change by the day.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def with_marks(text: str) -> str:
    """Let {% generation %} and {% endgeneration %} print marks around what the assistant wrote."""
    return GENERATION.sub(
        lambda tag: f'{tag[1]}print "{CLOSE if tag[2] else OPEN}"{tag[3]}', text
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
