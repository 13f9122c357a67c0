"""Two turns with a calculator: the model calls it, or has the sums in its solution checked, and then answers.

--ppo.rollout examples.calculator:episode
"""

import re
import warnings
from typing import Any

SUM = re.compile(r"(\d[\d.+\-*/() ]*[\d)]) *=")
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression such as 3 * (4 + 5).",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def calculate(expression: object) -> str:
    """Return the value of an expression of numbers, + - * / and brackets, or what is wrong with it."""
    text = str(expression)
    if not re.fullmatch(r"[\d.+\-*/() ]+", text) or "**" in text:
        return "error: only numbers, + - * / and brackets are known"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for 2(3), which calls a number
            return f"{eval(text):.12g}"
    except Exception as error:
        return f"error: {error}"


async def episode(row: dict[str, Any], model: Any) -> None:
    """Return no score: ppo.reward reads the last number of the second turn."""
    messages = [{"role": "user", "content": row["question"]}]
    turn = await model.chat(messages, tools=[TOOL])
    messages.append(turn.message)
    for call in turn.tool_calls:
        result = calculate(call["arguments"].get("expression"))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not turn.tool_calls:
        sums = [f"{text} = {calculate(text)}" for text in SUM.findall(turn.text)]
        found = "The calculator says: " + ("; ".join(sums) or "nothing") + ". So the answer is?"
        messages.append({"role": "user", "content": found})
    await model.chat(messages, tools=[TOOL])
