"""Print tokenised examples with the trained tokens marked, to show what the loss sees."""

from itertools import islice

import numpy as np

from ulysses.config.section import visible
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.parallel.batch import shared_prompts


def preview_examples(
    dataset: TokenizedDataset, tokenizer: PreTrainedTokenizerFast, count: int
) -> None:
    """Print the first `count` examples decoded, with the trained tokens between [[ and ]]."""
    for example in islice(dataset, count):
        shared = shared_prompts(example.sequences)
        for place, (sequence, (_, left_out)) in enumerate(zip(example.sequences, shared)):
            name = f"{dataset.kind} {place + 1}"
            if dataset.kind == "pair":
                name = "rejected" if place else "chosen"
            after = f" after {left_out} of the first sequence" if left_out else ""
            is_trained = np.not_equal(sequence.loss_weights[left_out:], 0)
            is_trained[0] = False  # nothing predicts the first token
            tokens, ends = sequence.tokens[left_out:], np.flatnonzero(np.diff(is_trained)) + 1
            parts = map(tokenizer.decode, np.split(tokens, ends))
            text = "".join(f"[[{part}]]" if i % 2 else part for i, part in enumerate(parts))
            numbers = {**example.columns, **sequence.columns}.items()
            print(
                f"example {example.index} ({name}): {len(tokens)} tokens{after}, {is_trained.sum()} trained",
                *(f"{key} {value:g}" for key, value in numbers),
                sep=", ",
            )
            print(visible(text, lines=True))
    print(dataset.report)
