"""SentencePiece tokenizers put a space before a text: never where we cut one, in no stage, token for token."""

import json

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message
from ulysses.data.read.tokenizer import load_tokenizer

TEXT = "The cat sat on the mat, and the other cats sat there too. Sure, it is (so) [INST] [/INST] user a\n"
SPACED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {  # the normalizer and the pre-tokenizer
    "llama2": (SPACED, None),  # and Mistral v0.1, v0.2, TinyLlama
    "mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "nothing": (None, pre_tokenizers.Metaspace(prepend_scheme="never")),
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
}
TEMPLATES = {  # with the space in the answer, without one, and with one after a special token
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "tinyllama": "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}</s>\n{% else %}"
    "<|assistant|>\n{% generation %}{{ m.content }}</s>{% endgeneration %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "spaces": "{% for m in messages %}{{ bos_token }} {{ m.role }}:{{ ' ' + m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }} assistant:{% endif %}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path):
    normalizer, pre_tokenizer = KINDS[request.param]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    is_bytes = request.param == "bytes"
    made.pre_tokenizer = pre_tokenizer if is_bytes else pre_tokenizers.Metaspace()
    single = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=single, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT.split("\n"), trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(content))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.ByteLevel() if is_bytes else decoders.Sequence(parts)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL.values()])
    (tmp_path / "t").mkdir()
    made.save(str(tmp_path / "t/tokenizer.json"))
    return load_tokenizer(tmp_path / "t", **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_have_the_tokens_of_their_text(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    template = ChatTemplate(tokenizer)
    said = ["the cat sat", " Sure, it is", "so?", "the mats, too\nand the cats"]
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(said)]
    plain = [{"role": m.role, "content": m.content} for m in messages]

    def whole(plain, **options):
        text = tokenizer.apply_chat_template(
            plain, chat_template=template.text, tokenize=False, **options
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ((tokens, weights),) = template.encoder.encode_batch(template.render(messages, (), [1, 3]))
    end = len(tokens)
    assert tokens == whole(plain)[:end] and tokens[-1] == tokenizer.eos_token_id
    trained = np.flatnonzero(np.diff([0, *weights, 0])).tolist()
    for count, start, stop in ((1, *trained[:2]), (3, *trained[2:])):
        ((prompt, _),) = template.encoder.encode_batch(template.render(messages[:count]))
        assert prompt == tokens[:start] == whole(plain[:count], add_generation_prompt=True)
        assert tokenizer.decode(tokens[start:stop]).strip() == said[count].strip() + "</s>"
    # in sft the answer may share a token with the line break before it; here it does not
    assert template.encoder.encode_batch(
        template.render(messages, (), [1, 3]), as_whole=True
    ) == [(tokens, weights)]


@pytest.mark.parametrize("kind", ["text", "t.txt"])
def test_documents_that_are_cut_have_the_tokens_of_the_whole(
    tokenizer, open_rows, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr("ulysses.data.read.sources.CHUNK_CHARACTERS", 50)
    text = TEXT * 5 + "漢字 " * 60
    rows, name = ([{"text": text}], "rows.jsonl") if kind == "text" else (text, kind)
    (example,) = open_rows(rows, "text", 9000, tokenizer=tokenizer, name=name)
    found = example.sequences[0].tokens.tolist()
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"] + [
        tokenizer.eos_token_id
    ]
