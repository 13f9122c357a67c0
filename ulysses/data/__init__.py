"""Data: from the rows of a file to the batch that a rank trains on.

Record             what a row says: a conversation, answers, a document       sources.py, formats.py, messages.py
ids and weights    the tokens of its texts, and how each counts in the loss   chat.py, thinking.py, tokenizer.py
arrays on disk     all examples, which are read through memory maps           tokenise.py, workers.py, cache.py
Example            one of them: views of its sequences, and its numbers       dataset.py, steps.py
ShardedBatch       what one rank holds of a step's examples                   ulysses/parallel/batch.py
"""


class DataError(ValueError):
    """Raised for data that cannot be used: one sentence that names the file, and the row where there is one."""


class BadRowError(ValueError):
    """Raised for a row that breaks its format, such as a missing key; the reader adds file and row number."""


class DropRowError(ValueError):
    """Raised for a well-formed row that cannot be trained on, such as an empty answer; it is counted and left out."""
