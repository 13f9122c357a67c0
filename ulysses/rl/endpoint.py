"""A loopback endpoint that speaks OpenAI's chat completions, for agents that are programs of their own.

    POST http://127.0.0.1:PORT/v1/chat/completions    ->    Model.chat of the episode that the key is of

A request has messages and, if it likes, tools and the most tokens of the answer, and may ask for a stream, which then
has one piece. How tokens are drawn is the run's business: a request that asks for something else is refused, because
the policy would be trained as if it had not.
"""

import asyncio
import json
import secrets
import socket
import sys
import time
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from ulysses.config.stage_sections import PpoSection
from ulysses.rl.model import EpisodeOverError, Model, Turn

Json = dict[str, Any]
PATH = "/v1/chat/completions"
MOST_BYTES = 64 << 20  # of a request
READ = {
    "model",
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
}


class Handler(BaseHTTPRequestHandler):
    server: "Endpoint"

    def do_POST(self) -> None:
        try:
            status, answer = self.server.answer(self)
        except Exception as error:  # the request may be wrong in any way
            status, answer = _refused(400, f"{type(error).__name__}: {error}")
        body, kind = json.dumps(answer), "application/json"
        if "chunk" in answer.get("object", ""):
            body, kind = f"data: {body}\n\ndata: [DONE]\n\n", "text/event-stream"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


class Endpoint(ThreadingHTTPServer):
    """Serve the models of running episodes on a free port of this machine, for all rollouts of a run.

    Args:
        loop: which runs the episodes.

    Attributes:
        request_queue_size: connections that wait to be taken; more are reset, and all programs may call at once.
        models: by their keys.
        fixed: what a request may name only with these values; anything else that is not read must be false.
    """

    request_queue_size = 1024

    def __init__(self, loop: asyncio.AbstractEventLoop, ppo: PpoSection) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, Model] = {}
        self.loop = loop
        self.fixed: Json = {
            "temperature": ppo.temperature,
            "top_p": ppo.top_p,
            "n": 1,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *client: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may go
            super().handle_error(*client)

    def answer(self, request: Handler) -> tuple[int, Json]:
        """Return the status and the JSON that answer a request."""
        key = str(request.headers["Authorization"]).removeprefix("Bearer ")
        if (model := self.models.get(key)) is None:
            return _refused(401, "the key is no running episode's; send model.api_key")
        if request.path != PATH:
            return _refused(404, f"{request.path} is not served; POST to {PATH}")
        length = int(request.headers["Content-Length"] or 0)
        if not 0 <= length <= MOST_BYTES:
            return _refused(413, f"a request has at most {MOST_BYTES} bytes")
        body = {
            name: value
            for name, value in json.loads(request.rfile.read(length)).items()
            if value is not None
        }
        for name in body.keys() - READ:
            wanted = self.fixed.get(name, False)
            if body[name] != wanted:
                given = f"{name} is {body[name]!r:.50}"
                return _refused(400, f"{given} but in this run it is {wanted!r}")
        limit = body.get("max_completion_tokens", body.get("max_tokens"))

        async def chat() -> Turn:
            client, task = request.connection, asyncio.current_task()

            def cancel_if_gone() -> None:
                try:
                    # a connection is for one request, and what a client sends after it is passed over
                    has_gone = not client.recv(4096, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    has_gone = False
                except OSError:
                    has_gone = True
                if has_gone:
                    task.cancel()

            # a client that gives up closes its connection, and an answer that nobody reads is not trained
            self.loop.add_reader(client, cancel_if_gone)
            try:
                return await model.chat(body["messages"], body.get("tools") or (), limit)
            finally:
                self.loop.remove_reader(client)

        try:
            turn = asyncio.run_coroutine_threadsafe(chat(), self.loop).result()
        except EpisodeOverError as error:
            model.was_refused = True
            return _refused(400, str(error), "context_length_exceeded")
        except CancelledError:
            return _refused(410, "the episode has ended")
        return 200, _completion(turn, body.get("model"), bool(body.get("stream")))


def _completion(turn: Turn, model: object, stream: bool) -> Json:
    """Return a turn in OpenAI's form; a stream of it has one chunk."""
    reason, message = "tool_calls" if turn.tool_calls else "stop", turn.message
    if stream and turn.tool_calls:
        numbered = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        message = {**message, "tool_calls": numbered}
    choice = {"index": 0, "delta" if stream else "message": message, "logprobs": None}
    told, said = len(turn.prompt), len(turn.tokens)
    usage = {"prompt_tokens": told, "completion_tokens": said, "total_tokens": told + said}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{**choice, "finish_reason": reason if turn.ended else "length"}],
        "usage": usage,
    }


def _refused(status: int, sentence: str, code: str | None = None) -> tuple[int, Json]:
    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": code}
    return status, {"error": error}
