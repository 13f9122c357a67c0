"""Print tokenised examples with the trained tokens highlighted, to see what the loss sees."""

import sys
from itertools import pairwise
from typing import Any, TextIO

import numpy as np

from ulysses.data.dataset import TokenizedDataset

TRAINED, PLAIN, BOLD, RESET = "\x1b[30;42m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def inspect_examples(
    dataset: TokenizedDataset,
    tokenizer: Any,
    count: int,
    *,
    stream: TextIO | None = None,
    color: bool | None = None,
) -> None:
    """Print the first `count` examples decoded; without colour, trained tokens stand between [[ and ]].

    Args:
        color: use terminal colours; by default only where the stream is a terminal.
    """
    stream = stream or sys.stdout
    color = stream.isatty() if color is None else color
    begin, end = (TRAINED, RESET + PLAIN) if color else ("[[", "]]")
    names = ("chosen", "rejected") if dataset.kind == "pair" else (dataset.kind,)
    for index in range(min(count, len(dataset))):
        example = dataset[index]
        numbers = "".join(f", {name} {value:g}" for name, value in example.columns.items())
        for name, sequence in zip(names, example.sequences):
            weights = np.asarray(sequence.loss_weights)
            trained = int((weights[1:] != 0).sum())
            title = f"example {index} ({name}): {len(weights)} tokens, {trained} trained{numbers}"
            print(f"{BOLD}{title}{RESET}" if color else title, file=stream)
            print(
                (PLAIN if color else "")
                + _marked(tokenizer, sequence.tokens, weights, begin, end)
                + (RESET if color else ""),
                file=stream,
            )
    print(dataset.report, file=stream)


def _marked(tokenizer: Any, tokens: Any, weights: np.ndarray, begin: str, end: str) -> str:
    is_trained = weights != 0
    is_trained[0] = False  # nothing predicts the first token
    edges = [0, *(np.flatnonzero(is_trained[1:] != is_trained[:-1]) + 1), len(weights)]
    text = ""
    for start, stop in pairwise(edges):
        part = tokenizer.decode([int(t) for t in tokens[start:stop]], skip_special_tokens=False)
        text += begin + part + end if is_trained[start] else part
    return text
