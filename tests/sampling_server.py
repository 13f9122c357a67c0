"""A server that speaks the APIs of vLLM and SGLang, and scores answers; the tokens it draws follow from the prompt.

The fields are those that vLLM 0.32 and SGLang 0.5 publish, as far as they are read.
"""

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from tests.harness import STUCK
from tests.weight_receiver import GET, POST

# answers that are packed although nobody asked for it
PACKINGS = {
    "gzip": gzip.compress,
    "gzip, gzip": lambda content: gzip.compress(gzip.compress(content)),
    "deflate": zlib.compress,
}


LogProbabilities = Callable[[list[int], list[int]], list[float]]


class QuietServer(ThreadingHTTPServer):
    """A server that does not print that its client has left."""

    def handle_error(self, *_: Any) -> None:
        pass


def load(
    folder: Path | str, weights: bytes = b"", temperature: float = 1.0
) -> LogProbabilities:
    """Return what computes the log-probabilities of answers by the model in a folder, as servers do.

    `weights` is a file whose tensors take the place of those of their names.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    if weights:
        model.load_state_dict(safetensors.torch.load(weights), strict=False)

    @torch.no_grad()
    def logps(prompt: list[int], tokens: list[int]) -> list[float]:
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)[range(len(tokens)), tokens].tolist()

    return logps


def invented(prompt: list[int], tokens: list[int]) -> list[float]:
    return [-1.0 - 0.1 * i for i in range(len(tokens))]


class SamplingServer:
    """Serve on a free port of this machine.

    Attributes:
        asked: (path, body) of all POST requests.
        keys, encodings: what they had in the headers of keys and of packings.
        fault: "" for none, "hang", "drip", "slow head", "endless", "redirect", "cut", "no HTTP", "refuse", "garbage",
            "no fields", "deep", one of PACKINGS, "reload" or "broken" (HTTP 500 that says why); of answers "nan",
            "no stop token", "abort", "short", "unknown tokens", "tokens as text", "numbers as text" or "goes on", and
            "late stop" where a stop token is the last that was asked for, which is no fault; of a server that was told
            to end and keeps the requests that it has "ended" (nothing listens any more) or "ending" (it says that it is
            not available); "starting", which answers all but /health; "busy", which is late and knows no /health, which
            is no fault either; and the path of a call that it refuses.
        released: ends the requests that a server keeps.
        length, model: what it tells of itself, the tokens of the longest sequence and the model's configuration.
        receiver: takes weights that come over the network (tests/weight_receiver.py), or None.
        folder, starts: whose weights it has read, and how often it was started.
        load: folder, or the receiver's weights as a file -> a function of prompt and tokens, which returns their
            log-probabilities; without it, they are invented.
        scores: what a reward answers; if empty, it counts the letters of each answer.
    """

    def __init__(self) -> None:
        self.length: object = 4096
        self.model = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
        self.folder, self.starts = "", 1
        self.receiver: Any = None
        self.load: Callable[[Any], LogProbabilities] = lambda _: invented
        self.logps: LogProbabilities = invented
        self.released = threading.Event()
        self.asked: list[tuple[str, Any]] = []
        self.fault, self.scores = "", []
        self.keys: set[str | None] = set()
        self.encodings: set[str | None] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = {
                    "/health": None,
                    "/v1/models": {"data": [{"id": "policy", "max_model_len": outer.length}]},
                    "/server_info?config_format=json": {
                        "vllm_config": {
                            "model_config": outer.model,
                            "instance_id": outer.starts,
                        }
                    },
                    "/model_info": {"model_path": outer.folder},
                }
                if outer.receiver and self.path in GET:
                    found[self.path] = outer.receiver.get()
                text = json.dumps(found.get(self.path)).encode()
                codes = {"busy": 404, "ending": 503, self.path: 404}
                codes["starting"] = 503 if self.path == "/health" else 200
                self.send_response(codes.get(outer.fault, 200 if self.path in found else 404))
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                outer.keys.add(self.headers["Authorization"])
                if outer.fault == "hang":
                    time.sleep(5)
                if outer.fault == "busy":
                    time.sleep(0.5)
                if outer.fault in ("ended", "ending"):
                    if outer.fault == "ended":
                        outer.close()
                    outer.released.wait(STUCK)
                    return
                is_refused = self.path.partition("?")[0] == outer.fault
                found = "no weights fit" if is_refused else outer.reply(self.path, body)
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
                codes = {"refuse": 503, "redirect": 307, "broken": 500}
                if is_refused:
                    codes[outer.fault] = 400
                if outer.fault in ("refuse", "broken"):
                    key = str(self.headers["Authorization"]).removeprefix("Bearer ")
                    text = f"{key} is right, but\nno weights fit: {'x' * 400}".encode()
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
        path, _, query = path.partition("?")
        if path == "/reset_prefix_cache":
            return {}
        if path in POST:
            found = self.receiver.post(path, query, body)
            if path in ("/resume", "/continue_generation"):
                self.logps = self.load(self.receiver.held()[-1])
            return found
        if path in ("/collective_rpc", "/update_weights_from_disk"):
            given = body.get("kwargs", {}).get("weights_path") or body["model_path"]
            assert (Path(given) / "config.json").exists()
            self.folder, self.logps = given, self.load(given)
            return {"success": self.fault != "reload", "message": "no such file"}
        prompt = body.get("prompt") or body["input_ids"]
        most = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        tokens = [(sum(prompt) + i) % 90 + 5 for i in range(min(most, 1 + len(prompt)))]
        ended = len(tokens) < most
        if ended and self.fault != "no stop token":
            tokens[-1] = body.get("sampling_params", body)["stop_token_ids"][0]
        reason = "stop" if ended else "length"
        if self.fault == "short":
            tokens, reason = tokens[:-1], "length"
        if self.fault in ("goes on", "late stop"):
            place = 0 if self.fault == "goes on" else -1
            tokens[place] = body.get("sampling_params", body)["stop_token_ids"][0]
        logps = self.logps(prompt, tokens)
        if self.fault == "nan":
            logps[0] = float("nan")
        if self.fault == "unknown tokens":
            tokens[0] = 100
        if self.fault == "tokens as text":
            tokens = [*map(str, tokens)]
        if self.fault == "numbers as text":
            logps = [*map(str, logps)]
        if self.fault == "abort":
            reason = "abort"
        if path == "/v1/completions":
            found = {"token_ids": tokens, "finish_reason": reason}
            return {"choices": [found | {"logprobs": {"token_logprobs": logps}}]}
        triples = [[p, t, None] for p, t in zip(logps, tokens)]
        found = {"finish_reason": {"type": reason}, "output_token_logprobs": triples}
        return {"meta_info": found}

    def start_again(self) -> None:
        """Have the first weights."""
        self.folder, self.starts = "", self.starts + 1

    def close(self) -> None:
        """Stop serving; nothing listens on the port from now on, but requests that have come go on."""
        self.server.shutdown()
        self.server.server_close()
