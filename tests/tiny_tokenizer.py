"""A byte-level tokenizer without merges for tests: every byte is a token, special tokens as named."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ulysses.data.read.tokenizer import load_tokenizer

LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(
    folder: Path, specials: tuple[str, ...] = LLAMA3, bos: str | None = None, **config: str
) -> Path:
    """Write tokenizer.json (and tokenizer_config.json if `config` is given) and return the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in specials]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, **config}
            )
        )
    return folder


def made_tokenizer(
    folder: Path, specials: tuple[str, ...] = CHATML, eos: str = "<|im_end|>", bos: str | None = None, **more: str
) -> PreTrainedTokenizerFast:  # fmt: skip
    """Write a tokenizer and load it as a run does; `more` are further tokens, such as pad_token."""
    given = {"eos_token": eos, **({"bos_token": bos} if bos else {}), **more}
    return load_tokenizer(write_tokenizer(folder, specials, bos), **given)


def write_rows(path: Path, rows: list | str) -> str:
    """Write rows as JSON lines, or text as it is, and return the path as text."""
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return str(path)
