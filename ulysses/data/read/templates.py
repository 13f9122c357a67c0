"""Find the text of a chat template, the tokenizer's own, a built-in one or a file, and run it within bounds.

A template that does not end is stopped: what it writes, its memory and its time are bounded.
"""

import faulthandler
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from os.path import expanduser
from pathlib import Path
from typing import Any

import psutil
from jinja2 import Environment, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ulysses.data import BadRowError, DataError, DropRowError
from ulysses.data.read.messages import Arguments

NAMED_TEMPLATES = ("llama3", "llama3.1", "qwen2.5", "qwen3", "chatml", "plain")
# Marks in rendered text. They are Unicode noncharacters, which no text meant for interchange holds.
OPEN, CLOSE, GUARD, BEGUN = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
THINK_TAG = re.compile(f"</?think{GUARD}?>")
# keys of what the assistant wrote
SAID = ("content", "reasoning_content", "reasoning", "thinking")
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
RENDER_SECONDS = 60.0  # the sandbox of jinja2 bounds one loop, but not loops in loops
RENDER_CHARACTERS = 1 << 30
TRIAL_SECONDS, TRIAL_BYTES = 20.0, 1 << 30  # for a few rows, and of memory


def template_text(tokenizer: Any, name: str) -> str:
    """Return the Jinja text, which may be the name itself; DataError if there is no such template."""
    if name == "tokenizer":
        try:
            return tokenizer.get_chat_template()
        except ValueError:
            raise DataError(
                "the tokenizer has no chat template; set data.chat_template to "
                f"{', '.join(NAMED_TEMPLATES)} or a .jinja file"
            ) from None
    if "{%" in name or "{{" in name:
        return name
    path = Path(expanduser(name))
    if name in NAMED_TEMPLATES:
        path = Path(__file__).with_name(f"{name}.jinja")
    if not path.is_file():
        raise DataError(
            f"chat template {name!r} is neither tokenizer, {', '.join(NAMED_TEMPLATES)} nor a file "
            f"({path.absolute()})"
        )
    return path.read_text(encoding="utf-8")


def template_environment() -> Environment:
    """Return the sandbox in which templates are compiled, with what Hugging Face's templates expect there."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # There is no strftime_now: templates then write their fixed date, and tokens do not change by the day.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def with_marks(text: str) -> str:
    """Let {% generation %} and {% endgeneration %} print marks around what the assistant wrote."""
    return GENERATION.sub(
        lambda tag: f'{tag[1]}print "{CLOSE if tag[2] else OPEN}"{tag[3]}', text
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raise BadRowError whenever the block has worked RENDER_SECONDS; render one row, or a few thousand, in it.

    The processor's time counts, so that a busy machine refuses no row. It works in the main thread of any process,
    worker processes included, and does nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, too_much)
    signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def ends(job: Callable[[], Any]) -> bool:
    """Call `job` in a forked process, and tell whether that ended without too much time, text and memory.

    No signal's handler and no other thread can stop one long operation. Other errors of the job are left to the
    caller, who calls it next.
    """
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # a library that gets no memory may abort, which is an answer
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)
            signal.alarm(math.ceil(10 * TRIAL_SECONDS))  # in case it waits for ever
            process = psutil.Process()
            most = process.memory_info().vms + TRIAL_BYTES
            process.rlimit(psutil.RLIMIT_AS, (most, most))
            job()
        except (MemoryError, BadRowError):
            os._exit(1)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def join_bounded(parts: Iterator[str]) -> str:
    """Return the parts as one text; BadRowError if it is longer than RENDER_CHARACTERS."""
    texts, size = [], 0
    for part in parts:
        texts.append(part)
        size += len(part)
        if size > RENDER_CHARACTERS:
            too_much()
    return "".join(texts)


def too_much(*_: Any) -> None:
    """Raise BadRowError: the template did not end."""
    raise BadRowError(
        "runs the chat template without end: it was stopped after too much time, text or memory; mend its loops"
    )


def is_lost(message: dict[str, Any], answer: str) -> bool:
    """Tell whether a part of what the assistant wrote, its thinking included, is not in its rendered answer."""
    said = [THINK_TAG.split(str(message.get(key) or "")) for key in SAID]
    said.append([call["function"]["name"] for call in message.get("tool_calls", ())])
    return any(part.strip() not in answer for part in chain.from_iterable(said))


def at_marks(text: str) -> list[str]:
    """Cut a rendered text where answers are marked; its odd parts are the answers."""
    return text.replace(CLOSE, OPEN).split(OPEN)


def content_of_calls(asked: list[Any], render: Callable[[list[Any]], str]) -> str | None:
    """Find what a template takes for no content beside calls: "" hides them from some, or becomes a further turn."""
    function = {"name": "call_1", "arguments": Arguments(key_1="value_1")}
    calls = [{"id": "call00001", "type": "function", "function": function}]

    def shortness(content: str | None) -> float:
        with suppress(DropRowError):
            calling = {"role": "assistant", "content": content, "tool_calls": calls}
            text = render([*asked, calling])
            return "call_1" in text and 1 / len(text)
        return 0

    return max(("", None), key=shortness)
