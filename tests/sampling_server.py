"""A server that speaks the APIs of vLLM and SGLang, and scores answers; the tokens it draws follow from the prompt.

The fields are those that vLLM 0.11 and SGLang 0.5 publish, as far as they are read.
"""

import gzip
import json
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# answers that are packed although nobody asked for it
PACKINGS = {
    "gzip": gzip.compress,
    "gzip, gzip": lambda content: gzip.compress(gzip.compress(content)),
    "deflate": zlib.compress,
}


class QuietServer(ThreadingHTTPServer):
    """A server that does not print that its client has left."""

    def handle_error(self, *_: Any) -> None:
        pass


class SamplingServer:
    """Serve on a free port of this machine.

    Attributes:
        asked: (path, body) of all requests.
        keys, encodings: what they had in the headers of keys and of packings.
        fault: "" for none, "hang", "drip", "slow head", "endless", "redirect", "cut", "no HTTP", "refuse", "garbage",
            "no fields", "nan", "no stop token", "deep", one of PACKINGS or "reload".
        scores: what a reward answers; if empty, it counts the letters of each answer.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.fault, self.scores = "", []
        self.keys: set[str | None] = set()
        self.encodings: set[str | None] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                outer.keys.add(self.headers["Authorization"])
                if outer.fault == "hang":
                    time.sleep(5)
                found = outer.reply(self.path, body)
                text = b"not JSON" if outer.fault == "garbage" else json.dumps(found).encode()
                if outer.fault == "deep":
                    text = b"[" * 200_000 + b"]" * 200_000
                if outer.fault in PACKINGS:
                    text = PACKINGS[outer.fault](bytes(1 << 24))
                if outer.fault == "slow head":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                    for _ in range(300):
                        self.wfile.write(b"a")
                        time.sleep(0.1)
                if outer.fault == "no HTTP":
                    self.wfile.write(b"what?\r\n\r\n")
                    return
                codes = {"refuse": 503, "redirect": 307}
                self.send_response(codes.get(outer.fault, 200))
                more = {"cut": 1, "endless": 1 << 40, "drip": 1 << 20}.get(outer.fault, 0)
                self.send_header("Content-Length", str(len(text) + more))
                self.send_header("Location", f"{outer.address}/elsewhere")
                outer.encodings.add(self.headers["Accept-Encoding"])
                if outer.fault in PACKINGS:
                    self.send_header("Content-Encoding", outer.fault)
                self.end_headers()
                self.wfile.write(text)
                while outer.fault in ("endless", "drip"):
                    self.wfile.write(bytes(1 << 16 if outer.fault == "endless" else 1))
                    time.sleep(0.1 * (outer.fault == "drip"))

            def log_message(self, *_: Any) -> None:
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path: str, body: Any) -> Any:
        if self.fault == "no fields":
            return {"error": "busy"}
        if path == "/score":
            return {
                "scores": self.scores
                or [len(r["completion"]) / r["row"].get("scale", 1) for r in body["rows"]]
            }
        if path == "/update_weights_from_disk":
            assert (Path(body["model_path"]) / "config.json").exists()
            return {"success": self.fault != "reload", "message": "no such file"}
        if path in ("/collective_rpc", "/reset_prefix_cache"):
            return {}
        prompt = body.get("prompt") or body["input_ids"]
        most = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        tokens = [(sum(prompt) + i) % 90 + 5 for i in range(min(most, 1 + len(prompt)))]
        ended = len(tokens) < most
        if ended and self.fault != "no stop token":
            tokens[-1] = body.get("sampling_params", body)["stop_token_ids"][0]
        logps = [
            float("nan") if self.fault == "nan" else -1.0 - 0.1 * i for i in range(len(tokens))
        ]
        reason = "stop" if ended else "length"
        if path == "/v1/completions":
            found = {"token_ids": tokens, "finish_reason": reason}
            return {"choices": [found | {"logprobs": {"token_logprobs": logps}}]}
        triples = [[p, t, None] for p, t in zip(logps, tokens)]
        found = {"finish_reason": {"type": reason}, "output_token_logprobs": triples}
        return {"meta_info": found}

    def close(self) -> None:
        """Stop serving; nothing listens on the port from now on."""
        self.server.shutdown()
        self.server.server_close()
