"""Talk to servers over HTTP: those that sample and those that score."""

import json
import time
import urllib.request
from typing import Any

PAUSE = 1.0  # seconds before a request that failed is sent again, twice as long before the last attempt


def post(url: str, body: Any, timeout: float) -> Any:
    """POST a value as JSON and return the JSON that the server answers, None for an empty answer.

    A request that fails is sent again, twice at most; one that takes longer than `timeout` seconds is not.
    Raises OSError if the server fails, ValueError if it answers something else than JSON.
    """
    data = json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    for pause in (PAUSE, 2 * PAUSE, None):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.loads(response.read() or "null")
        except (OSError, ValueError) as error:
            # urllib wraps the error of a connection that cannot be made
            if pause is None or isinstance(getattr(error, "reason", error), TimeoutError):
                raise
            time.sleep(pause)
