"""Data: from the rows of a file to the batch that a rank trains on.

row                  what a file, a folder or a hub dataset holds                  sources.py
Record               a conversation, a pair of answers, or a document               formats.py
Example              tokens with weights, kept in memory-mapped files               chat.py, encode.py, dataset.py
micro-batches        the examples of a step, packed for every rank                  steps.py, ulysses/parallel/batch.py
"""


class DataError(ValueError):
    """Raised for data that cannot be used: one sentence that names the file, and the row where there is one."""


class BadRowError(ValueError):
    """Raised for a row that breaks its format, such as a missing key; the reader adds file and row number."""


class DropRowError(ValueError):
    """Raised for a well-formed row that cannot be trained on, such as an empty answer; it is counted and left out."""
