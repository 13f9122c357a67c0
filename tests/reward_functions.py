"""Reward functions for the tests, in a module that a worker process imports quickly."""

import time
from typing import Any


def half(prompt: str, completion: str, row: dict[str, Any]) -> float:
    assert prompt == "a"
    time.sleep(row.get("sleep", 0))
    return len(completion) / row["scale"]


def all_at_once(
    prompts: list[str], completions: list[str], rows: list[dict[str, Any]]
) -> list[float]:
    assert len(prompts) == len(completions) == len(rows)
    return [len(completion) + row["scale"] for completion, row in zip(completions, rows)][
        : rows[0].get("most")
    ]
