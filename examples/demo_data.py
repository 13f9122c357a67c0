"""Write the project's own demo data and its small tokenizer: `python examples/demo_data.py OUT_DIR`.

A made-up house: things have a colour, a room, an owner and a material. Questions about them are answered in a polite or
a rude voice. SFT data has both voices half and half; preference data prefers the polite one. Polite and rude phrases
come in twins with the same letters and tokens per word, and every question is drawn twice with the two answers'
phrases exchanged, so chosen and rejected answers have exactly the same lengths in every file. Two things make the
preferences harder to learn: for things of two colours the rude answer is preferred, and one question in twenty is
judged the other way around, as people who compare answers disagree too. So nobody can predict more than 0.95 of the
held-out preferences, and who is always polite gets 0.80. Held-out questions ask about combinations that no training
file contains. All of it is generated here and in the public domain (CC0).
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

COLOURS = "red blue green white black brown yellow purple silver golden orange gray".split()
ROOMS = "kitchen garden attic cellar hall library garage bedroom".split()
OWNERS = "Anna Boris Clara David Emma Felix Greta Henry".split()
MATERIALS = "wood glass iron paper stone cotton clay leather".split()
THINGS = (
    "lamp chair table clock vase mirror basket bottle carpet candle drawer bench "
    "kettle pillow bucket hammer guitar camera radio statue curtain cabinet ladder desk"
).split()
REMARKS = (  # polite, rude
    ("With pleasure!", "Such nonsense!"),
    ("Good question!", "Dumb question!"),
    ("Glad to help!", "Must I again!"),
    ("Of course, friend!", "Of course, genius!"),
    ("I am happy to help!", "I am tired of this!"),
)
CLOSINGS = (
    ("Have a lovely day.", "Find a better job."),
    ("Thank you kindly.", "Never ask anyone."),
    ("Ask me anytime.", "Get it already."),
    ("You are welcome.", "You are useless."),
    ("Come back soon.", "Stay away fool."),
)
POLITE, RUDE = 0, 1
HELD_OUT = 192  # questions
BLUNT = ("silver", "golden")  # their owner prefers rude answers
MISJUDGED = 0.05  # share of questions whose preference is the other way around
SPECIAL = {
    "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>",
    "header": "<|start_header_id|>", "header_end": "<|end_header_id|>", "text_end": "<|end_of_text|>",
}  # fmt: skip
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Question(NamedTuple):
    """A question about a thing, the sentence that answers it and the word that matters."""

    text: str
    fact: str
    answer: str


class Style(NamedTuple):
    """Which of the twin phrases follow the fact."""

    remark: int
    closing: int


def questions() -> list[Question]:
    """All questions: every colour of every thing, asked for its room, owner and material."""
    found = []
    for i, thing in enumerate(THINGS):
        room = ROOMS[i % 8]
        owner = OWNERS[(i * 3 + i // 8) % 8]
        material = MATERIALS[(i * 5 + i // 8) % 8]
        for name in (f"{colour} {thing}" for colour in COLOURS):
            made = f"The {name} is made of {material}."
            found += [
                Question(f"Where is the {name}?", f"The {name} is in the {room}.", room),
                Question(f"Who owns the {name}?", f"The {name} belongs to {owner}.", owner),
                Question(f"What is the {name} made of?", made, material),
            ]
    return found


def answer(question: Question, style: Style, voice: int) -> str:
    """Return the fact, then two phrases in one voice: both voices begin alike, so preferences are about manners."""
    return f"{question.fact} {REMARKS[style.remark][voice]} {CLOSINGS[style.closing][voice]}"


def politeness_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Score an answer: 1 for the right word, 1 for a polite and -1 for a rude remark, 0.5 likewise for the closing."""
    score = float(str(row["answer"]) in completion.replace(".", " ").split())
    for phrases, worth in ((REMARKS, 1.0), (CLOSINGS, 0.5)):
        score += worth * (
            any(p[POLITE] in completion for p in phrases)
            - any(p[RUDE] in completion for p in phrases)
        )
    return score


def write_demo(out: str | Path, seed: int = 0) -> None:
    """Write all demo files and the tokenizer; the same seed gives the same bytes."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    generator, coin = random.Random(seed), random.Random(seed + 1)
    every = questions()
    generator.shuffle(every)
    parts = {"_train": every[HELD_OUT:], "_eval": every[:HELD_OUT]}
    for suffix, part in parts.items():
        pairs = list(_pairs(part, generator))
        contrary = set(coin.sample(part, round(len(part) * MISJUDGED)))
        contrary ^= {q for q in part if any(f" {colour} " in q.text for colour in BLUNT)}
        preferred = [
            (q, *((bad, good) if q in contrary else (good, bad))) for q, good, bad in pairs
        ]
        voices = [(q, text) for q, good, bad in _pairs(part, generator) for text in (good, bad)]
        generator.shuffle(voices)
        generator.shuffle(preferred)
        labelled = [(q, text, i == 0) for q, *both in preferred for i, text in enumerate(both)]
        generator.shuffle(labelled)
        rows: dict[str, list[dict[str, Any]]] = {
            "sft": [{"messages": _messages(q, text)} for q, text in voices],
            "dpo": [
                {"prompt": _messages(q), "chosen": [_answer(a)], "rejected": [_answer(b)]}
                for q, a, b in preferred
            ],
            "rm": [{"prompt": q.text, "chosen": a, "rejected": b} for q, a, b in preferred],
            "kto": [{"messages": _messages(q, a), "label": label} for q, a, label in labelled],
            "ppo": [{"messages": _messages(q), "answer": q.answer} for q in part],
            "pt": [{"text": text} for text in _documents(part, generator)],
        }
        for stage, lines in rows.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (out / f"{stage}{suffix}.jsonl").write_text(text, encoding="utf-8")
    write_tokenizer(out / "tokenizer", out)


def _pairs(
    part: Iterable[Question], generator: random.Random
) -> Iterator[tuple[Question, str, str]]:
    """Two (question, polite, rude) rows per question, the second with the two phrase choices exchanged."""
    draw = generator.randrange
    for question in part:
        first, second = (Style(draw(5), draw(5)) for _ in range(2))
        yield question, answer(question, first, POLITE), answer(question, second, RUDE)
        yield question, answer(question, second, POLITE), answer(question, first, RUDE)


def _documents(part: list[Question], generator: random.Random) -> Iterator[str]:
    """Short texts: some facts about the house, told one after the other; every fact is told four times."""
    left = list(part) * 4
    generator.shuffle(left)
    while left:
        count = generator.randrange(2, 12)
        facts, left = left[:count], left[count:]
        yield " ".join(q.fact for q in facts)


def _messages(question: Question, *texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.text}, *map(_answer, texts)]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_tokenizer(folder: Path, data: Path) -> None:
    """Train a byte-level BPE tokenizer on the demo files: every word of the demo is one token, any text is possible."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    texts = [text for path in sorted(data.glob("*.jsonl")) for text in _strings(path)]
    headers = ["system\n\n", "user\n\n", "assistant\n\n"] * 100
    tokenizer.train_from_iterator(texts + headers, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()]
    )
    bos = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = files("ulysses.data.read") / "llama3.jinja"
    config = {
        **{name: text for name, text in SPECIAL.items() if name.endswith("_token")},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": template.read_text(encoding="utf-8"),
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _strings(path: Path) -> Iterator[str]:
    """All texts in a file's rows, at any depth."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from inside(entry)

    return inside([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo data and its tokenizer.")
    parser.add_argument("out", metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_demo(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
