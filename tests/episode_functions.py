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
