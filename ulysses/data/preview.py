"""Print tokenised examples with the trained tokens marked, to show what the loss sees."""

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from ulysses.data.dataset import TokenizedDataset
from ulysses.parallel.batch import Sequence

ON_TERMINAL, ON_PAPER = ("\x1b[30;42m", "\x1b[0m"), ("[[", "]]")  # black on green, or brackets


def preview_examples(dataset: TokenizedDataset, tokenizer: Any, count: int) -> None:
    """Print the first `count` examples decoded: trained tokens in colour on a terminal, elsewhere in [[ and ]]."""
    begin, end = ON_TERMINAL if sys.stdout.isatty() else ON_PAPER
    names = ("chosen", "rejected") if dataset.kind == "pair" else (dataset.kind,)
    for index in range(min(count, len(dataset))):
        example = dataset[index]
        numbers = "".join(f", {name} {value:g}" for name, value in example.columns.items())
        for name, sequence in zip(names, example.sequences):
            trained = int(np.count_nonzero(sequence.loss_weights[1:]))
            print(
                f"example {index} ({name}): {len(sequence.tokens)} tokens, {trained} trained{numbers}",
                _marked(tokenizer, sequence, begin, end),
                sep="\n",
            )
    print(dataset.report)


def _marked(tokenizer: Any, sequence: Sequence, begin: str, end: str) -> str:
    is_trained = np.asarray(sequence.loss_weights) != 0
    is_trained[0] = False  # nothing predicts the first token
    edges = [0, *(np.flatnonzero(is_trained[1:] != is_trained[:-1]) + 1), len(is_trained)]
    text = ""
    for start, stop in pairwise(edges):
        part = tokenizer.decode(sequence.tokens[start:stop].tolist(), skip_special_tokens=False)
        text += begin + part + end if is_trained[start] else part
    return text
