"""Print tokenised examples with the trained tokens marked, to show what the loss sees."""

import sys
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from ulysses.data.dataset import TokenizedDataset

ON_TERMINAL, ON_PAPER = ("\x1b[30;42m", "\x1b[0m"), ("[[", "]]")  # black on green, or brackets


def preview_examples(dataset: TokenizedDataset, tokenizer: Any, count: int) -> None:
    """Print the first `count` examples decoded: trained tokens in colour on a terminal, elsewhere in [[ and ]]."""
    begin, end = ON_TERMINAL if sys.stdout.isatty() else ON_PAPER
    for index in range(min(count, len(dataset))):
        example = dataset[index]
        numbers = "".join(f", {name} {value:g}" for name, value in example.columns.items())
        one = "sequence" if dataset.kind == "sequence" else "answer"
        for place, sequence in enumerate(example.sequences):
            name = f"{one} {place + 1}" if len(example.sequences) > 1 else dataset.kind
            if dataset.kind == "pair":
                name = ("chosen", "rejected")[place]
            if dataset.kind == "ranked":
                name += f", rank {sequence.columns['rank'] + 1:g}"
            shared = sequence.prefix_length
            after = f" after {shared} of {one} 1" if shared else ""
            is_trained = np.not_equal(sequence.loss_weights, 0)
            is_trained[0] = False  # nothing predicts the first token
            text = ""
            marked = zip(is_trained, sequence.tokens.tolist())
            for trained, run in groupby(marked, key=itemgetter(0)):
                part = tokenizer.decode([token for _, token in run])
                text += begin + part + end if trained else part
            size = f"{len(is_trained)} tokens{after}, {is_trained.sum()} trained"
            print(f"example {index} ({name}): {size}{numbers}", text, sep="\n")
    print(dataset.report)
