"""Does a model learn to use a longer context? Train it on books at one length, continue at a longer one, and compare.

    python benchmarks/long_context.py BOOKS --out runs/long-context                # two minutes on one H200
    python benchmarks/long_context.py BOOKS --out runs/long-context --held-out persuasion.txt --optimizer.lr 5e-4
    python benchmarks/long_context.py BOOKS --out /tmp/toy --short 1024 --long 4096 --steps 20 --more 10 \\
        --tokens 4096 --vocabulary 500 --width 64 --layers 2        # a toy size that runs on a CPU

BOOKS is a folder of plain-text books (.txt), of which one is held out. A tokenizer of `--vocabulary` tokens is learnt
from the others. A random Llama is trained on them at `--short` tokens for `--steps` steps; from its export two runs go
on at `--long` tokens for `--more` steps on the same data, with the same seed: one as it is and one with YaRN, whose
factor is long / short. Each is evaluated on the held-out book, cut into pieces of `--long` tokens, before its first
step and after its last one: mean negative log-likelihood by the tokens' position, with standard errors as if tokens
were independent. Prints a table, and writes it as table.md with long_context.png into `--out`; every run's folder is
there too. Any of train.py's settings may follow, for all three runs.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from common import add_options, plain_parser, table
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ulysses.config.command_line import parse_command_line
from ulysses.run.training_run import TrainingRun

END = "<|endoftext|>"
HEAD_DIM = 64
Curve = dict[str, tuple[float, float]]  # octave: mean and standard error


def main() -> None:
    p = plain_parser(__doc__)
    p.add_argument("books", type=Path, help="folder of plain-text books")
    p.add_argument("--out", type=Path, required=True, help="a new folder for everything")
    add_options(
        p,
        held_out=("", "file name of the book; by default the last one"),
        short=(4096, "length of the first sequences"),
        long=(16384, "length of the later sequences"),
        steps=(400, "steps at the short length"),
        more=(100, "steps at the long length"),
        tokens=(65536, "tokens of a step"),
        vocabulary=(8192, "tokens that the tokenizer has"),
        width=(512, "hidden size"),
        layers=(8, "number of layers"),
    )
    a, rest = p.parse_known_args()
    books = sorted(a.books.glob("*.txt"))
    names = [book.name for book in books]
    if len(books) < 2 or (a.held_out or names[-1]) not in names:
        p.error(
            f"{a.books} holds {', '.join(names) or 'no .txt file'}; at least two are needed"
        )
    held_out = books.pop(names.index(a.held_out or names[-1]))
    if not (a.out / "tokenizer.json").exists():
        a.out.mkdir(parents=True, exist_ok=True)
        write_tokenizer(a.out / "tokenizer.json", books, a.vocabulary)

    common = {
        "stage": "pt", "data.train": [str(book) for book in books], "data.eval": str(held_out),
        "data.cache": str(a.out / "cache"), "batch.tokens_per_microbatch": a.tokens,
        "optimizer.weight_decay": 0.1, "run.save_last": False, "run.overwrite": True,
        "model.dtype": "bfloat16" if torch.cuda.is_available() else "float32",
    }  # fmt: skip
    shape = {
        "model_type": "llama", "vocab_size": a.vocabulary, "hidden_size": a.width, "num_hidden_layers": a.layers,
        "intermediate_size": 11 * a.width // 4, "num_attention_heads": max(1, a.width // HEAD_DIM),
        "num_key_value_heads": max(1, a.width // HEAD_DIM), "tie_word_embeddings": True,
        "max_position_embeddings": a.short,
    }  # fmt: skip
    at_short = {
        "model.init": "random", "model.config": shape, "model.tokenizer": str(a.out / "tokenizer.json"),
        "model.special_tokens": {"eos_token": END}, "data.max_length": a.short,
        "batch.examples": max(1, a.tokens // a.short), "run.steps": a.steps, "optimizer.lr": 1e-3,
    }  # fmt: skip
    at_long = {
        "model.path": str(a.out / "short/export"), "data.max_length": a.long, "run.export": False,
        "batch.examples": max(1, a.tokens // a.long), "run.steps": a.more, "optimizer.lr": 3e-4,
    }  # fmt: skip
    yarn = {
        "model.rope.type": "yarn", "model.rope.factor": a.long / a.short,
        "model.rope.original_max_position_embeddings": a.short,
    }  # fmt: skip
    train(a.out / "short", common | at_short, rest)
    curves = {}
    for name, rope in (("as it is", {"model.rope.extrapolate": True}), ("YaRN", yarn)):
        before, after = train(a.out / name.replace(" ", "-"), common | at_long | rope, rest)
        curves |= {f"{name}, before": before, f"{name}, after {a.more} steps": after}
    rows = [
        {"position": octave, **{name: "{:.4f} ± {:.4f}".format(*c[octave]) for name, c in curves.items()}}
        for octave in curves["YaRN, before"]
    ]  # fmt: skip
    text = table(rows, ["position", *curves])
    (a.out / "table.md").write_text(text + "\n")
    draw(curves, f"{held_out.stem}, held out").savefig(a.out / "long_context.png", dpi=120)
    print(text, f"wrote {a.out / 'table.md'} and long_context.png", sep="\n", flush=True)


def train(folder: Path, settings: dict[str, Any], rest: list[str]) -> tuple[Curve, Curve]:
    """Run train.py's settings; return the held-out curves before the first step and after the last one."""
    given = {
        word.removeprefix("--").partition("=")[0] for word in rest if word.startswith("--")
    }
    values = {"run.output": str(folder)} | settings
    values = {key: value for key, value in values.items() if key not in given}
    with TrainingRun(parse_command_line(rest, **values).config) as run:
        before = run.trainer.evaluate()
        run.train()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return by_octave(before), by_octave(json.loads(lines[-1]))


def by_octave(metrics: dict[str, float]) -> Curve:
    """Pick the nll by position, and its standard errors, from what an evaluation found."""
    names = [name for name in metrics if re.match(r"eval/nll/\d", name)]
    errors = (metrics[name.replace("nll", "nll_se")] for name in names)
    return {name[9:]: (metrics[name], error) for name, error in zip(names, errors)}


def write_tokenizer(path: Path, books: list[Path], vocabulary: int) -> None:
    """Learn a byte-level BPE tokenizer from the books."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet
    )
    tokenizer.train([str(book) for book in books], trainer)
    tokenizer.save(str(path))


def draw(curves: dict[str, Curve], title: str) -> Figure:
    """Draw all curves over the octaves; before in dotted lines, after in solid ones."""
    figure = Figure((8, 5), layout="constrained")
    axis = figure.add_subplot(title=title, ylabel="negative log-likelihood (nats per token)")
    for i, (name, curve) in enumerate(curves.items()):
        means, errors = zip(*curve.values())
        style = "o:" if i % 2 == 0 else "o-"
        axis.errorbar(list(curve), means, errors, fmt=style, color=f"C{i // 2}", label=name)
    axis.set_xlabel("position in the sequence (tokens)")
    axis.grid(alpha=0.25)
    axis.legend()
    return figure


if __name__ == "__main__":
    main()
    os._exit(0)  # interpreter shutdown can abort while communication threads still run
