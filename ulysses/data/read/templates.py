"""Find the text of a chat template: the tokenizer's own, a built-in one by its name, or a file."""

from pathlib import Path
from typing import Any

from ulysses.data import DataError

NAMED_TEMPLATES = ("llama3", "llama3.1", "qwen2.5", "qwen3", "chatml", "plain")


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
