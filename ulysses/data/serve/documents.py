"""Plain text: documents in pieces; imported by pre-training."""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter

import numpy as np

from ulysses.data import BadRowError, DataError
from ulysses.data.read.sources import FoundRow
from ulysses.data.read.tokenizer import TextEncoder

Columns = dict[str, object]  # of examples, as the files hold them: tokens, weights and numbers
Part = tuple[str, int, np.ndarray]  # of a document: its row, source and tokens


def document_part(row: FoundRow, text: str, encoder: TextEncoder) -> Part:
    """Tokenise a part of a document; DataError names its row."""
    try:
        begun = text if row.continues else encoder.begin(text)
        (tokens,) = encoder.encode_texts([begun])
    except BadRowError as error:
        raise DataError(f"{row.where} {error}") from None
    return row.where, row.source, np.asarray(tokens, np.int32)


def cut_documents(parts: Iterable[Part], encoder: TextEncoder, limit: int) -> Iterator[Columns]:
    """Join the parts of each document, and cut it into pieces of at most `limit` tokens, as the files hold them.

    Truncation does not apply: no token is lost.
    """
    ends = np.asarray([encoder.eos], np.int32)
    begins = ends[:0] if encoder.bos is None else np.asarray([encoder.bos], np.int32)
    for (_, source), document in groupby(parts, key=itemgetter(0, 1)):
        left = begins
        for *_, tokens in chain(document, [(ends,)]):
            left = np.append(left, tokens)
            while len(left) > limit or (tokens is ends and len(left) > 1):
                piece = left[:limit]
                size = [len(piece), 0, 0]
                yield {"tokens": piece, "_sizes": size, "_counts": [1], "_source": [source]}
                left = left[limit - 1 :]  # the last token predicts the next piece's first
