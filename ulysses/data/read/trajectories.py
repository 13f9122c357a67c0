"""Read rows of trajectories that were drawn elsewhere, and say what each of their tokens is.

{"group": "a", "token_ids": [5, 7, 9, 4], "mask": [0, 0, 1, 1], "logprobs": [0, 0, -0.4, -1.2], "reward": 1.0}
"""

import hashlib
import math
import re
from collections.abc import Callable
from itertools import compress
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from ulysses.config.section import LARGEST
from ulysses.data import BadRowError
from ulysses.data.read.formats import column_of
from ulysses.data.read.messages import from_json
from ulysses.data.read.sources import RawRow

# columns that mean something to other programs, and are counted because they are not read here
UNREAD = re.compile(
    "(.*_)?(masks?|labels?|log_?probs?|logps?|advantages?|rewards?|scores?|returns?|values?|weights?|loss(es)?|truncated)|"
    "train(ing|able)?|temperature|top_[pk]|(finish|stop)_reason|done|ended|episode(_id)?|branch(_id)?|images?|"
    "multi_modal.*|pixel_.*|(input|prompt|completion|response|position|token_type)_ids"
)
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


class TrajectoryRow(BaseModel):
    """A row; each list has an entry for every token.

    group: rows with the same one are compared with each other.
    mask: whether the policy drew the token, which is trained then.
    logprobs: what a drawn token had for the sampler; those of others mean nothing.
    advantages: a list, or a number for all tokens; without them they are computed from the rewards.
    """

    group: int | str
    token_ids: list[Annotated[int, Field(ge=0)]]
    mask: list[bool]
    logprobs: list[Number | None]
    reward: Number | None = None
    advantages: Number | list[Number] | None = None


def read_trajectory(
    raw: RawRow,
    columns: dict[str, str],
    vocabulary: int,
    longest: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Return a row as an example with one sequence, in the columns that tokenise.py writes.

    `weights` is the mask, and `given` is 0 for a row without advantages.

    Args:
        columns: {our key: the row's}, for keys of other names.
        vocabulary: how many tokens there are.
        longest: the most tokens of a row.
        note: is called with what the report should count.

    Raises BadRowError for a row that cannot be trained on, or the error in the place of a row.
    """
    if isinstance(raw.value, ValueError):
        raise raw.value
    try:
        is_text = isinstance(raw.value, bytes)
        row = from_json(raw.value.decode("utf-8-sig")) if is_text else raw.value
        row = {**row, **{ours: column_of(row, theirs) for ours, theirs in columns.items()}}
        found = TrajectoryRow.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadRowError(f"is no trajectory: {place}: {first['msg']}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRowError(f"is no trajectory: {error}") from None
    tokens, mask, given = found.token_ids, found.mask, found.advantages
    count, largest = len(tokens), max(tokens, default=0)
    sizes = [len(x) for x in (tokens, mask, found.logprobs, given) if isinstance(x, list)]
    if {*sizes} != {count}:
        raise BadRowError(f"has lists of {sizes} entries; give one entry for each token")
    if count > longest:
        raise BadRowError(f"has {count} tokens but data.max_length is {longest}; raise it")
    if largest >= vocabulary:
        raise BadRowError(f"has the token {largest} but the model knows {vocabulary}")
    if any(x is None or x > 1e-3 for x in compress(found.logprobs, mask)):
        raise BadRowError("has drawn tokens whose logprobs are null or above 0")
    if not any(mask[1:]) or mask[0]:
        raise BadRowError("trains no token, or the first, which nothing predicts")
    if found.reward is None and given is None:
        raise BadRowError("has neither reward nor advantages")
    for name in filter(UNREAD.fullmatch, {*row}.difference(vars(found), columns.values())):
        if row[name] is not None:
            note(f"the column {name!r} was not read")
    group = hashlib.sha256(repr((raw.source, found.group)).encode()).digest()
    return {
        "tokens": np.array(tokens, np.int32),
        "weights": np.array(mask, np.float32),
        "token_logps": np.array([x or 0.0 for x in found.logprobs], np.float32),
        "token_advantages": np.zeros(count, np.float32) + np.float32(given or 0),
        "reward": math.nan if found.reward is None else found.reward,
        "given": float(given is not None),
        "_sizes": [count, 0, 0],
        "_counts": 1,
        "_source": raw.source,
        "_prompt": np.frombuffer(group, np.int64)[0],
    }
