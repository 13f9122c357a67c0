"""Send JSON to servers over HTTP, to those that sample and to those that score."""

import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import httpx

from ulysses.environment import api_headers

Json = Any  # None, numbers, texts, and lists and objects of these
PAUSE = (
    1.0  # seconds before the second attempt of a request; before the third it is twice as long
)
MOST_BYTES = 256 << 20  # of an answer


def post(url: str, body: Json, timeout: float) -> Json:
    """POST a value as JSON, with the key in ULYSSES_API_KEY, and return the answer's JSON, or None if it is empty.

    The whole answer must come within `timeout` seconds: a request that takes longer is not sent again. After any other
    failure it is sent again, at most twice. A redirect is a failure, because it would not carry the body along.

    Raises OSError if the server fails, and ValueError if its answer is not JSON or is nested too deeply.
    """
    data = json.dumps(body, default=str).encode()
    for pause in (PAUSE, 2 * PAUSE, None):
        try:
            return json.loads(_answer(url, data, timeout) or "null")
        except RecursionError:
            raise ValueError("it answered JSON that is nested too deeply") from None
        except (TimeoutError, httpx.TimeoutException):
            raise TimeoutError(f"timed out after {timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if pause is None:
                raise OSError(f"{type(error).__name__}: {error}") from None
        except (OSError, ValueError):
            if pause is None:
                raise
        time.sleep(pause)


def _answer(url: str, data: bytes, timeout: float) -> bytes:
    """Return the body of a server's answer; httpx limits each read, and a thread all of them, headers included."""
    answer: Future[bytes] = Future()

    def ask() -> None:
        try:
            answer.set_result(_read(url, data, timeout))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="request").start()
    return answer.result(timeout)


def _read(url: str, data: bytes, timeout: float) -> bytes:
    body = bytearray()
    # a compressed answer may become a thousand times as large
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        **api_headers(),
    }
    with httpx.stream("POST", url, content=data, headers=headers, timeout=timeout) as response:
        if "Content-Encoding" in response.headers:
            raise OSError("it packed its answer (Content-Encoding), which was not asked for")
        for part in response.iter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise OSError(f"it answered more than {MOST_BYTES >> 20} MiB")
    if response.status_code != 200:
        raise OSError(f"HTTP {response.status_code} {response.reason_phrase}")
    return bytes(body)
