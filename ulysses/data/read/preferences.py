"""Several answers to one prompt: chosen and rejected, or a ranked list; imported when a row has them."""

from ulysses.data import BadRowError, DropRowError
from ulysses.data.read.messages import PAIR_KEYS, Messages, Row, number, role_of

# of the answers in such a list: the best has the highest number, or the lowest
RANKINGS = {"scores": 1, "rewards": 1, "ratings": 1, "ranks": -1}


def compared(row: Row, kind: str, answers: list[Messages]) -> list[dict[str, object]]:
    """Return what is compared of a row's answers, as fields of its records: all of them, pairs or labelled answers."""
    ranks = _ranks(row, len(answers))
    ranked = list(zip(ranks, answers))
    pairs = [[good, bad] for first, good in ranked for later, bad in ranked if first < later]
    if not pairs:
        raise DropRowError("no answer is ranked above another")
    if any(chosen == rejected for chosen, rejected in pairs):
        raise DropRowError("chosen and rejected are the same")
    if kind == "ranked":
        margin = number(row.get("margin", 0.0), "margin")
        return [{"columns": {"margin": margin}, "ranks": ranks}]
    if kind == "pair":
        return [{"answers": pair} for pair in pairs]
    return [
        {"answers": [answer], "columns": {"label": label}}
        for pair in pairs
        for answer, label in zip(pair, (1.0, 0.0))
    ]


def inner_prompt(
    prompt: Messages, keys: list[str], conversations: list[Messages]
) -> tuple[Messages, list[Messages]]:
    """Take the prompt out of whole conversations, which have it in common and end with their answers."""
    inner = conversations[0][:-1]
    for key, conversation in zip(keys, conversations):
        if role_of(conversation, -1) != "assistant":
            raise DropRowError(f"{key} does not end with an assistant message")
        if conversation[:-1] != inner:
            raise DropRowError("the prompts of chosen and rejected differ")
    said = [message.content for message in inner]
    system = [message for message in prompt if message.role == "system"]
    if any(m.content not in said and m not in system for m in prompt):
        raise DropRowError("the prompt differs from the one inside chosen and rejected")
    if role_of(inner, 0) != "system":
        inner = system + inner
    return inner, [conversation[-1:] for conversation in conversations]


def _ranks(row: Row, count: int) -> list[int]:
    """Rank the answers, from 0, by the numbers that the row gives them; chosen is above rejected."""
    if PAIR_KEYS <= row.keys():
        return [0, 1]
    orders = set()
    for name, sign in RANKINGS.items():
        if isinstance(given := row.get(name), list) and len(given) == count:
            scores = [sign * number(value, name) for value in given]
            orders.add(tuple(sorted({*scores}, reverse=True).index(score) for score in scores))
    if len(orders) != 1:
        raise BadRowError(
            f"has {count} answers but not one order of them; give as many numbers in 'scores' (the best has the "
            "highest) or 'ranks' (the lowest)"
        )
    return [*orders.pop()]
