"""Send JSON to servers over HTTP, to those that sample and to those that score."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import httpx

from ulysses.config.section import UserCodeError, visible
from ulysses.environment import api_headers

Json = Any  # None, numbers, texts, and lists and objects of these
# seconds before the second attempt of a request; before the third it is twice as long
PAUSE = 1.0
MOST_BYTES = 256 << 20  # of an answer
# read once, because reading the certificates takes 30 ms of the processor, and every answer is a request
tls_context = cache(httpx.create_ssl_context)


class LostError(UserCodeError):
    """A server takes no more requests, so that another one is asked."""


class RefusedError(OSError):
    """A server takes no requests: nothing listens at its address, or it answers that it is not available (503)."""


def call(url: str, body: Json = None, *, timeout: float, attempts: int = 3) -> Json:
    """POST a value as JSON or, without one, GET; return the answer's JSON, or None if it is empty.

    The key in ULYSSES_API_KEY goes along. The whole answer must come within `timeout` seconds: a request that takes
    longer is not sent again. After any other failure a POST is sent again, up to so many attempts, and a GET if the
    server takes no requests. A redirect is a failure: it would not carry the body along.

    Raises OSError if the server fails, and ValueError if its answer is not JSON or is nested too deeply.
    """
    for pause in (PAUSE, 2 * PAUSE, None)[-attempts:]:
        try:
            # httpx limits each read, and a thread all of them, headers included
            answer = in_thread(_read, url, body, timeout).result(timeout)
            return json.loads(answer or "null")
        except RecursionError:
            raise ValueError("it answered JSON that is nested too deeply") from None
        except (TimeoutError, httpx.TimeoutException):
            raise TimeoutError(f"timed out after {timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = RefusedError if isinstance(error, httpx.ConnectError) else OSError
            fault: Exception = kind(f"{type(error).__name__}: {error}")
        except (OSError, ValueError) as error:
            fault = error
        if pause is None or (body is None and not isinstance(fault, RefusedError)):
            raise fault from None
        time.sleep(pause)


def in_thread(function: Callable[..., Any], *args: object) -> Future[Any]:
    """Call a function in a thread of its own, for which nothing waits when the process ends."""
    result = Future[Any]()

    def call() -> None:
        try:
            result.set_result(function(*args))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, daemon=True, name="request").start()
    return result


def _read(url: str, body: Json, timeout: float) -> bytes:
    method, sent = "GET", b""
    if body is not None:
        method, sent = "POST", json.dumps(body, default=str).encode()
    answer = bytearray()
    # a compressed answer may become a thousand times as large
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        **api_headers(),
    }
    with httpx.stream(
        method, url, content=sent, headers=headers, timeout=timeout, verify=tls_context()
    ) as response:
        if "Content-Encoding" in response.headers:
            raise OSError("it packed its answer (Content-Encoding), which was not asked for")
        for part in response.iter_raw():
            answer += part
            if len(answer) > MOST_BYTES:
                raise OSError(f"it answered more than {MOST_BYTES >> 20} MiB")
    if response.status_code != 200:
        said = answer[:4096].decode(errors="replace")
        for header in api_headers().values():  # the server may have repeated the key
            said = said.replace(header.removeprefix("Bearer "), "***")
        kind = RefusedError if response.status_code == 503 else OSError
        status = f"HTTP {response.status_code} {response.reason_phrase}"
        raise kind(f"{status} {visible(said[:300])}".strip())
    return bytes(answer)
