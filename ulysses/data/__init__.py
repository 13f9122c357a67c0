"""Data: from the rows of a file to the batch that a rank trains on.

Record               of a row: a conversation, answers to one prompt, a document    sources.py, formats.py, messages.py
ids and weights      of its texts: tokens, and how much each counts in the loss     chat.py, thinking.py, tokenizer.py
arrays on disk       of all examples, read through memory maps                      tokenise.py, workers.py, cache.py
Example              views of them: its sequences, and its numbers                  dataset.py, steps.py
ShardedBatch         what one rank holds of a step's examples                       ulysses/parallel/batch.py
"""


class DataError(ValueError):
    """Raised for data that cannot be used: one sentence that names the file, and the row where there is one."""


class BadRowError(ValueError):
    """Raised for a row that breaks its format, such as a missing key; the reader adds file and row number."""


class DropRowError(ValueError):
    """Raised for a well-formed row that cannot be trained on, such as an empty answer; it is counted and left out."""
