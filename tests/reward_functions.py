"""Reward functions for the tests, in a module that a worker process imports quickly."""

import os
import signal
import sys
import time
from typing import Any


def half(prompt: str, completion: str, row: dict[str, Any]) -> float:
    assert prompt == "a"
    time.sleep(row.get("sleep", 0))
    return len(completion) / row["scale"]


def letters(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return len(completion) % 7


def all_at_once(
    prompts: list[str], completions: list[str], rows: list[dict[str, Any]]
) -> list[float]:
    assert len(prompts) == len(completions) == len(rows)
    return [len(completion) + row["scale"] for completion, row in zip(completions, rows)]


def answers_with(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> Any:
    """Return what the first row asks for."""
    import numpy
    import pandas
    import torch

    return eval(rows[0]["returns"], {"np": numpy, "pd": pandas, "torch": torch})


def spoils_all(prompts: list[str], completions: list[str], rows: list[Any]) -> list[float]:
    """Change everything that it is given."""
    count = len(rows)
    for row in rows:
        spoils("", "", row)
    for given in (prompts, completions, rows):
        given.clear()
    return [0.0] * count


def spoils(prompt: str, completion: str, row: dict[str, Any]) -> float:
    row["tests"].append("more")
    row["seen"] = True
    return float(len(row["tests"]) + len(row))


class UnpicklableError(Exception):
    """It can be pickled, but not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class RudeError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


def fails(prompt: str, completion: str, row: dict[str, Any]) -> Any:
    """Go wrong in the way that the row asks for."""
    match row.get("way"):
        case "leaves":
            sys.exit("enough")
        case "exits":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupts":
            raise KeyboardInterrupt
        case "unpicklable":
            raise UnpicklableError("this", "that")
        case "rude":
            raise RudeError
        case "lambda":
            return lambda: 1.0
        case "text":
            return "1.0"
    return 1.0
