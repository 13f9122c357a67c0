"""Print tokenised examples with the trained tokens marked, to show what the loss sees."""

from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from ulysses.config.section import visible
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.parallel.batch import shared_prompts


def preview_examples(dataset: TokenizedDataset, tokenizer: Any, count: int) -> None:
    """Print the first `count` examples decoded, with the trained tokens between [[ and ]]."""
    names = ("chosen", "rejected") if dataset.kind == "pair" else ()
    for index in range(min(count, len(dataset))):
        example = dataset[index]
        left_out = [count for _, count in shared_prompts(example.sequences)]
        for place, (sequence, shared) in enumerate(zip(example.sequences, left_out)):
            name = names[place] if names else f"{dataset.kind} {place + 1}"
            numbers = {**example.columns, **sequence.columns}.items()
            after = f" after {shared} of the first sequence" if shared else ""
            is_trained = np.not_equal(sequence.loss_weights[shared:], 0)
            is_trained[0] = False  # nothing predicts the first token
            text = ""
            marked = zip(is_trained, sequence.tokens[shared:].tolist())
            for trained, run in groupby(marked, key=itemgetter(0)):
                part = tokenizer.decode([token for _, token in run])
                text += f"[[{part}]]" if trained else part
            size = f"{len(is_trained)} tokens{after}, {is_trained.sum()} trained"
            print(
                f"example {index} ({name}): {size}",
                *(f"{key} {value:g}" for key, value in numbers),
                sep=", ",
            )
            print(visible(text, lines=True))
    print(dataset.report)
