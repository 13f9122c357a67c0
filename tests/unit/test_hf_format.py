"""Weight files: flat slices touch only their bytes, shards are as transformers writes them, the hub is honoured."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import ARCHITECTURES, CausalLM, ModelConfig, init_parameter, init_weights
from models.hf_format import (
    WeightFiles,
    WeightWriter,
    copy_side_files,
    read_config,
    resolve_model,
    write_config,
)

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5, generator=generator),
        "b.weight": torch.randn(3, 4, 2, generator=generator).bfloat16(),
        "c.count": torch.arange(6),
        "d.scalar": torch.tensor(2.5, dtype=torch.float64),
        "e.empty": torch.empty(0, 4),
    }


@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path, limit):
    writer = WeightWriter(tmp_path, max_shard_bytes=limit)
    for name, tensor in tensors().items():
        writer.add(name, tensor)
    writer.finish()
    shards = sorted(path.name for path in tmp_path.glob("*"))
    if limit == 100:
        assert shards == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
    else:
        assert shards == ["model.safetensors"]
    stored = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    files = WeightFiles(tmp_path)
    assert sorted(files.names()) == sorted(stored) == sorted(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(stored[name], tensor) and torch.equal(files.read(name), tensor)
        assert files.shape(name) == tensor.shape and files.dtype(name) == tensor.dtype
        flat = tensor.reshape(-1)
        for start, stop in ((0, 3), (2, 100), (5, 5), (None, 4), (1, None)):
            assert torch.equal(files.read(name, start, stop), flat[start:stop])


def test_a_slice_reads_only_its_bytes(tmp_path, monkeypatch):
    save_file({"big": torch.arange(100_000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *where: read.append(real(*where)) or read[-1])
    assert torch.equal(files.read("big", 50_000, 50_010), torch.arange(50_000, 50_010, dtype=torch.float32))
    assert sum(read) == 40


def test_model_survives_both_directions_bit_by_bit(tmp_path):
    from transformers import AutoModelForCausalLM

    for kind in ("llama", "qwen2"):
        config = ModelConfig.from_hf({**TINY, "model_type": kind, "tie_word_embeddings": kind == "qwen2"})
        model = CausalLM(config, attention="reference").bfloat16()
        init_weights(model, seed=1)
        ours, theirs = tmp_path / f"{kind}-ours", tmp_path / f"{kind}-theirs"
        writer = WeightWriter(ours, max_shard_bytes=4000)
        for name, parameter in model.named_parameters():
            writer.add(name, parameter)
        writer.finish()
        write_config(ours, config, dtype=torch.bfloat16)
        hf = AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
        assert hf.dtype == torch.bfloat16
        for name, parameter in hf.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
        hf.save_pretrained(theirs)
        assert read_config(theirs) == config
        files = WeightFiles(theirs)
        assert files.check({name: p.shape for name, p in model.named_parameters()}) == []
        for name, parameter in model.named_parameters():
            assert torch.equal(files.read(name), parameter), name


def test_wrong_folders_are_refused_by_one_sentence(tmp_path):
    def refusal(kind, call):
        with pytest.raises(kind) as error:
            call()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert str(tmp_path) in refusal(FileNotFoundError, lambda: WeightFiles(tmp_path))
    assert "config.json" in refusal(FileNotFoundError, lambda: read_config(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refusal(FileNotFoundError, lambda: WeightFiles(tmp_path))
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    for broken in (raw[:-8], raw[:20], b"\xff" * 100, b""):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert "model.safetensors" in refusal(ValueError, lambda: WeightFiles(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(raw)
    files = WeightFiles(tmp_path)
    assert "lacks 1 of 2" in refusal(ValueError, lambda: files.check({"a": torch.Size([100]), "b": torch.Size([1])}))
    assert "[100]" in refusal(ValueError, lambda: files.check({"a": torch.Size([101])}))
    assert files.check({"a": torch.Size([100]), "score.weight": torch.Size([1])}, may_lack=("score.weight",)) == [
        "score.weight"
    ]
    assert "first a" in refusal(ValueError, lambda: files.check({}))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refusal(FileNotFoundError, lambda: WeightFiles(tmp_path))
    assert "there is no folder" in refusal(FileNotFoundError, lambda: resolve_model(str(tmp_path / "absent")))
    assert "must be a folder" in refusal(ValueError, lambda: resolve_model(str(tmp_path / "model.safetensors")))
    assert resolve_model(str(tmp_path)) == tmp_path


def test_side_files_are_copied_as_they_are(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (source / name).write_text(name)
    copy_side_files(source, target)
    copied = {path.name for path in target.iterdir()}
    assert copied == {"chat_template.jinja", "generation_config.json", "tokenizer.json"}


def test_random_start_depends_on_seed_and_name_only():
    config = ARCHITECTURES["qwen2.5-0.5b"]
    name = "model.layers.0.mlp.up_proj.weight"
    a = init_parameter(name, (200, 896), config, 1)
    assert torch.equal(a, init_parameter(name, (200, 896), config, 1))
    assert not torch.equal(a, init_parameter(name, (200, 896), config, 2))
    assert not torch.equal(a, init_parameter(name.replace("0", "1"), (200, 896), config, 1))
    assert abs(float(a.std()) - 0.02) < 1e-3 and abs(float(a.mean())) < 1e-3
    assert torch.equal(init_parameter("model.norm.weight", (5,), config, 1), torch.ones(5))
    assert torch.equal(init_parameter("model.layers.0.self_attn.q_proj.bias", (5,), config, 1), torch.zeros(5))
    score = init_parameter("score.weight", (1, 896), config, 1, dtype=torch.bfloat16)
    assert score.dtype == torch.bfloat16 and 0.5 < float(score.float().std()) * 897 < 1.5


class _Hub(BaseHTTPRequestHandler):
    """Stand in for a model hub: small repositories, each at one commit."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]
    delay = 0.0
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models")
        files = self.repositories.get("/".join(path.split("/")[1:3]), {})
        name = path.rsplit("/", 1)[1]
        if self.path.startswith("/api/models") and files:
            if "/tree/" in path:
                content = json.dumps(
                    [{"type": "file", "path": n, "oid": n, "size": len(c)} for n, c in files.items()]
                ).encode()
            else:
                content = json.dumps(
                    {"id": "x/y", "sha": self.commit, "siblings": [{"rfilename": n} for n in files]}
                ).encode()
        elif "/resolve/" in path and name in files:
            content = files[name]
            self.asked.append(f"{self.command} {name}")
            if body:
                time.sleep(self.delay)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


RESOLVE = """
import sys
from models.hf_format import resolve_model
for model_id in sys.argv[1:]:
    try:
        print(resolve_model(model_id))
    except (ValueError, FileNotFoundError) as error:
        print(type(error).__name__, error)
"""


def _resolve(*model_ids: str, **environment: str) -> list[str]:
    """Resolve in a fresh process: the hub client reads its environment once."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *model_ids],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env=inherited | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hub_id_is_fetched_once_for_all_processes_and_then_found_offline(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    common = {"config.json": json.dumps(TINY).encode(), "pytorch_model.bin": b"never", "modeling.py": b"never"}
    kept = {"model.safetensors": (tmp_path / "model.safetensors").read_bytes(), "chat_template.jinja": b"x"}
    repositories = {"owner/tiny": common | kept, "owner/bin": common}
    handler = type("Handler", (_Hub,), {"asked": [], "repositories": repositories, "delay": 2.0})  # the processes meet
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    try:
        with ThreadPoolExecutor(3) as pool:
            found = {folder for [folder] in pool.map(lambda _: _resolve("owner/tiny", **home), range(3))}
        absent, only_bin = _resolve("owner/absent", "owner/bin", **home)
    finally:
        server.shutdown()
    folder = Path(found.pop())
    assert not found and str(folder).startswith(str(tmp_path / "home"))
    assert {p.name for p in folder.iterdir()} == {"config.json", *kept}
    assert sorted(line for line in handler.asked if line.startswith("GET"))[:3] == [
        "GET chat_template.jinja", "GET config.json", "GET config.json"  # config.json of both repositories, once each
    ]  # fmt: skip
    assert handler.asked.count("GET model.safetensors") == 1
    assert not {"pytorch_model.bin", "modeling.py"} & {line.split()[1] for line in handler.asked}
    assert torch.equal(WeightFiles(folder).read("a"), torch.ones(3)) and read_config(folder).vocab_size == 64
    assert absent.startswith("FileNotFoundError") and "owner/absent" in absent and home["HF_ENDPOINT"] in absent
    assert only_bin.startswith("ValueError") and "owner/bin has no .safetensors weights" in only_bin
    again, missing = _resolve("owner/tiny", "owner/absent", **home, HF_HUB_OFFLINE="1")
    assert again == str(folder) and "HF_HUB_OFFLINE is set" in missing
