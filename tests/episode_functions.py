"""Functions of episodes for the tests."""

from typing import Any


async def two_turns(row: dict[str, Any], model: Any) -> float:
    """Answer a question, hear what it should have been, and answer again."""
    messages = [*row["messages"]]
    first = await model.chat(messages)
    messages += [first.message, {"role": "user", "content": f"It is {row['answer']}. Again?"}]
    second = await model.chat(messages)
    return float(len(first.text) > len(second.text))


async def branches(row: dict[str, Any], model: Any) -> None:
    """Answer a question, and a shorter one that does not continue it; ppo.reward scores."""
    first = await model.chat(row["messages"])
    messages = [first.message, {"role": "user", "content": "Thanks."}]
    if len(first.text) % 2:
        await model.chat(messages[1:])
    await model.chat([*row["messages"], *messages])


async def some_too_long(row: dict[str, Any], model: Any) -> float:
    """Answer a question after some words which, for two of the demo's answers, leave no room for a turn."""
    words = "word " * (400 if row["answer"] in ("wood", "stone") else 1)
    turn = await model.chat([{"role": "user", "content": words}, *row["messages"]])
    return float(len(turn.text))
