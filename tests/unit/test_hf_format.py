"""Weight files: flat slices touch only their bytes, shards are as transformers writes them, the hub is honoured."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.arch import ARCHITECTURES, ModelConfig
from models.decoder import init_parameter
from models.folders import read_config, resolve_model
from models.hf_format import WeightFiles
from models.writing import write_weights
from tests import ROOT, rows_of
from tests.harness import memory_of
from tests.model_folder import tiny_config, write_model
from ulysses.disk import write_json

TINY = tiny_config(
    vocab_size=64,
    hidden_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


def write(folder, tensors, **options):
    write_weights(folder, tensors.items(), **options)
    return WeightFiles(folder)


@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path, limit):
    tensors = {
        "a": torch.randn(7, 5), "b": torch.randn(3, 4, 2).bfloat16(), "d": torch.empty(0, 4),
        "c": torch.tensor(2.5, dtype=torch.float64)
    }  # fmt: skip
    files = write(tmp_path, tensors, max_shard_bytes=limit)
    shards = sorted(path.name for path in tmp_path.glob("*"))
    parts = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json".split()
    assert shards == (parts if limit == 100 else ["model.safetensors"])
    stored = {
        k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()
    }
    assert files.tensors.keys() == stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor) and torch.equal(
            files.read(name), tensor.reshape(-1)
        )
        for start, stop in ((0, 3), (2, 100), (5, 5), (1, None)):
            assert torch.equal(files.read(name, start, stop), tensor.reshape(-1)[start:stop])


def test_an_index_that_an_earlier_save_left_is_not_read(tmp_path):
    """transformers leaves it, with or without the files that it names, and reads the whole file."""
    write(tmp_path, {"a": torch.zeros(100), "b": torch.zeros(100)}, max_shard_bytes=500)
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "model.safetensors")
    for shards in ([], tmp_path.glob("model-*.safetensors")):
        for shard in shards:
            shard.unlink()
        files = WeightFiles(tmp_path)
        assert (tmp_path / "model.safetensors.index.json").exists()
        assert files.read("a").sum() + files.read("b").sum() == 200


def test_a_slice_reads_only_its_bytes(tmp_path):
    files = write(tmp_path, {"big": torch.arange(10_000_000, dtype=torch.float32)})
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of("VmHWM")
    assert files.read("big", 50_000, 50_010).tolist() == [*range(50_000, 50_010)]
    assert memory_of("VmHWM") - before < 10_000_000


def test_experts_are_read_as_the_model_holds_them_and_one_by_one(tmp_path):
    """Whole and in slices; tests/parity has every family, read from and written for transformers."""
    config = ModelConfig.from_hf(TINY | {"model_type": "qwen3_moe"})
    model = write_model(tmp_path / "apart", config, torch.bfloat16, max_shard_bytes=4000)
    (tmp_path / "fused").mkdir()
    save_file(dict(model.named_parameters()), tmp_path / "fused/model.safetensors")
    for kind in ("apart", "fused"):
        files = WeightFiles(tmp_path / kind)
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            assert torch.equal(files.read(name), flat), name
            assert torch.equal(files.read(name, 5, len(flat) - 7), flat[5:-7])


# entries of a header that point out of the file or say what cannot be
HEADERS = """
"shape": [4], "data_offsets": [-8, 8]
"shape": [-4], "data_offsets": [0, 16]
"shape": [4], "data_offsets": [8, 24]
"shape": [1099511627776, 1099511627776], "data_offsets": [0, 16]
"""


def with_header(entry):
    """The bytes of a weight file of four numbers."""
    header = f'{{"a": {{"dtype": "F32", {entry}}}}}'.encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def test_wrong_folders_are_refused_by_one_sentence(tmp_path):
    def refused(kind, part, call, *arguments):
        with pytest.raises(kind) as error:
            call(*arguments)
        assert part in str(error.value) and "\n" not in str(error.value)

    whole = tmp_path / "model.safetensors"
    refused(FileNotFoundError, "config.json", read_config, tmp_path)
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    sentence = "/config.json is not a JSON object (maximum recursion depth"
    refused(ValueError, sentence, read_config, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    absent = f"no model.safetensors in {tmp_path}; download it again, or"
    refused(FileNotFoundError, absent, WeightFiles, tmp_path)
    files = write(tmp_path, {"a": torch.ones(100)})
    raw, hurtful = whole.read_bytes(), map(with_header, HEADERS.strip().splitlines())
    for broken in (raw[:-8], raw[:20], b"\xff" * 100, b"", *hurtful):
        whole.write_bytes(broken)
        sentence = "/model.safetensors is not a whole safetensors file ("
        refused(ValueError, sentence, WeightFiles, tmp_path)
    size, one = torch.Size([100]), torch.Size([1])
    lacking = ": b is missing, the first of 1 differences"
    refused(ValueError, lacking, files.check, {"a": size, "b": one})
    refused(ValueError, ": a has the shape [100] instead of [1], the", files.check, {"a": one})
    refused(ValueError, ": a has no place in the model, the first of 1", files.check, {})
    files.check({"a": size, "score.weight": one}, may_lack=("score.weight",))
    refused(FileNotFoundError, "there is no folder", resolve_model, str(tmp_path / "absent"))
    assert resolve_model(str(tmp_path)) == tmp_path


# what a folder holds beside a norm and two experts, which it has one by one, and what it has twice then
TWICE = """
model.language_model.norm.weight => model.norm.weight
language_model.model.norm.weight => model.norm.weight
a/model.norm.weight => model.norm.weight
a/mtp.norm.weight mtp.norm.weight => mtp.norm.weight
model.layers.0.mlp.experts.gate_up_proj => model.layers.0.mlp.experts.gate_up_proj
model.layers.0.mlp.experts.down_proj => model.layers.0.mlp.experts.down_proj
model.layers.0.mlp.experts.down_proj_blocks model.layers.0.mlp.experts.down_proj_scales => \
    model.layers.0.mlp.experts.down_proj
"""


@pytest.mark.parametrize("more, name", rows_of(TWICE))
def test_weights_that_a_folder_holds_twice_are_refused(tmp_path, more, name):
    """In two files, under two names, or whole and in parts: which one counts nobody could say."""
    experts = [
        f"model.layers.0.mlp.experts.{n}.{p}_proj.weight"
        for n in (0, 1)
        for p in ("gate", "up", "down")
    ]
    shards = {"a": {}, "b": {n: torch.ones(2, 2) for n in ["model.norm.weight", *experts]}}
    save_file(shards["b"], tmp_path / "model.safetensors")
    assert len(WeightFiles(tmp_path).tensors) == 3
    (tmp_path / "model.safetensors").unlink()
    for place in more.split():
        shard, _, own = place.rpartition("/")
        packed = {
            "blocks": torch.ones(2, 2, 1, 16).byte(),
            "scales": torch.ones(2, 2, 1).byte(),
        }
        shards[shard or "b"][own] = packed.get(own.rpartition("_")[2], torch.ones(2, 2, 2))
    for shard, tensors in shards.items():
        save_file(tensors, tmp_path / shard)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"x": "a", "y": "b"}})
    with pytest.raises(
        ValueError,
        match=f"^{tmp_path} holds {re.escape(name)} more than once: in two files, under",
    ):
        WeightFiles(tmp_path)


# experts beside number 0, and what is said
NUMBERED = """
9999999 => hold model.layers.0.mlp.experts.9999999 but only 2 of these experts, which are numbered from 0; download
2 => hold model.layers.0.mlp.experts.2 but only 2 of these experts
00 => model.layers.0.mlp.experts.0.down_proj.weight has no place in the model
99999999999999999999 => model.layers.0.mlp.experts.99999999999999999999.down_proj.weight has no place in the model
"""


@pytest.mark.parametrize("number, sentence", rows_of(NUMBERED))
def test_experts_that_are_not_numbered_through_are_refused(tmp_path, number, sentence):
    stem = "model.layers.0.mlp.experts"
    names = [f"{stem}.{n}.down_proj.weight" for n in ("0", number)]
    with pytest.raises(ValueError, match=sentence):
        files = write(tmp_path, {name: torch.ones(2, 2) for name in names})
        files.check({f"{stem}.down_proj": torch.Size([1, 2, 2])})


@pytest.mark.parametrize("shape", [(), (2,), (2, 2, 2)])
def test_experts_of_another_shape_are_refused_by_their_names(tmp_path, shape):
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    with pytest.raises(ValueError, match=f"{name} has no place in the model"):
        write(tmp_path, {name: torch.ones(shape)}).check({})


def test_a_head_beside_tied_embeddings_is_their_copy_or_refused(tmp_path):
    """transformers unties two that differ, so a run would train another model than the one that was saved."""
    matrix, norm = torch.randn(4, 3), {"model.norm.weight": torch.ones(3)}
    expected = {"model.embed_tokens.weight": matrix.shape, "model.norm.weight": torch.Size([3])}
    for head, said in (
        (matrix, ""),
        (matrix + 1, "another lm_head"),
        (matrix[:3], "another lm"),
    ):
        pair = {"model.embed_tokens.weight": matrix, "lm_head.weight": head.clone()}
        files = write(tmp_path, norm | pair)
        # a reward model has no use for either, and an untied model has both
        score = expected | {"score.weight": torch.Size([1, 3])}
        files.check(score, may_lack=("score.weight",))
        files.check(expected | {"lm_head.weight": head.shape})
        if said:
            with pytest.raises(ValueError, match=f"{said}.*set tie_word_embeddings to false"):
                files.check(expected)
        else:
            files.check(expected)


def test_random_start_depends_on_seed_and_name_only():
    def start(name="model.layers.0.mlp.up_proj.weight", shape=(200, 896), seed=1, **options):
        return init_parameter(name, shape, ARCHITECTURES["qwen2.5-0.5b"], seed, **options)

    drawn = start(), start(), start(seed=2), start("model.layers.1.mlp.up_proj.weight")
    assert [torch.equal(drawn[0], other) for other in drawn[1:]] == [True, False, False]
    assert abs(float(start().std()) - 0.02) < 1e-3 and abs(float(start().mean())) < 1e-3
    assert torch.equal(start("model.norm.weight", (5,)), torch.ones(5))
    assert torch.equal(start("model.layers.0.self_attn.q_proj.bias", (5,)), torch.zeros(5))
    score = start("score.weight", (1, 896), dtype=torch.bfloat16)
    assert score.dtype == torch.bfloat16 and 0.5 < float(score.float().std()) * 897 < 1.5


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(SimpleHTTPRequestHandler):
    """A model hub: a folder laid out like the hub's addresses."""

    def end_headers(self):
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(self.path))}"')
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """The address of a hub with the model owner/tiny."""
    save_file({"a": torch.ones(3)}, tmp_path / "a")
    files = {"config.json": json.dumps(TINY).encode(), "chat_template.jinja": b"x", "modeling.py": b"never",
             "pytorch_model.bin": b"never", "model.safetensors": (tmp_path / "a").read_bytes()}  # fmt: skip
    siblings = [{"rfilename": name} for name in files]
    about = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
    tree = [{"type": "file", "path": n, "oid": n, "size": len(c)} for n, c in files.items()]
    pages = {f"owner/tiny/resolve/{COMMIT}/{name}": content for name, content in files.items()}
    pages["api/models/owner/tiny/revision/main"] = json.dumps(about).encode()
    pages[f"api/models/owner/tiny/tree/{COMMIT}"] = json.dumps(tree).encode()
    for page, content in pages.items():
        (tmp_path / "hub" / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / page).write_bytes(content)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args: Hub(*args, directory=tmp_path / "hub")
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


# Resolves each model in a fork of one process, with an environment of its own: the hub client reads it once.
RESOLVE = """
import json, os, sys
os.environ |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "600")
from models import folders
from models.folders import resolve_model
for model, environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ |= environment
        folders.HUB_SECONDS = 1 if "HF_ENDPOINT" in environment else 600  # only a silent one is not waited for
        try:
            print(resolve_model(model), flush=True)
        except Exception as error:
            print(repr(error), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_hub_id_is_fetched_and_then_found_offline(tmp_path, hub):
    offline = {"HF_HUB_OFFLINE": "1"}
    # a hub that takes the question and never answers: what the cache has is found, the rest is refused
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
        asked = list(product(({}, offline, silent), ("owner/tiny", "owner/absent")))
        line = [sys.executable, "-c", RESOLVE, json.dumps([case[::-1] for case in asked])]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub}
        shown = subprocess.check_output(line, cwd=ROOT, env=inherited | home, text=True)
    found, absent, again, not_asked, kept, unanswered = shown.splitlines()
    folder = Path(found)
    assert found == again == kept and folder.is_relative_to(tmp_path / "home")
    there = {path.name for path in folder.iterdir()}
    assert there == {"config.json", "chat_template.jinja", "model.safetensors"}
    assert torch.equal(WeightFiles(folder).read("a"), torch.ones(3))
    assert read_config(folder).vocab_size == 64
    assert absent.startswith("FileNotFoundError") and "owner/absent" in absent and hub in absent
    assert "HF_HUB_OFFLINE is set" in not_asked and "timed out" in unanswered
