"""A LoRA adapter's folder is read together with its base: slice by slice, as PEFT computes it, without PEFT."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import CausalLM, ModelConfig, init_weights
from models.hf_format import WeightFiles, WeightWriter, read_config, write_config
from ulysses import export

SHAPE = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
})  # fmt: skip


@pytest.fixture
def base(tmp_path):
    model = CausalLM(SHAPE, attention="reference").bfloat16()
    init_weights(model, seed=1)
    writer = WeightWriter(tmp_path / "base")
    for name, parameter in model.named_parameters():
        writer.add(name, parameter)
    writer.finish()
    write_config(tmp_path / "base", SHAPE, dtype=torch.bfloat16)
    return tmp_path / "base"


def adapter_by_peft(base: Path, folder: Path, task: str = "CAUSAL_LM", **options: Any) -> dict[str, torch.Tensor]:
    """Save an adapter of PEFT's own over the base; return the weights that PEFT merges, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    if task == "CAUSAL_LM":
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, task_type=task, **options))
    adapted.save_pretrained(folder)
    return dict(adapted.merge_and_unload().named_parameters())


@pytest.mark.parametrize(("task", "rslora"), [("CAUSAL_LM", False), ("CAUSAL_LM", True), ("SEQ_CLS", False)])
def test_an_adapter_is_read_as_peft_merges_it(base, tmp_path, task, rslora):
    merged = adapter_by_peft(base, tmp_path / "adapter", task, use_rslora=rslora)
    files = WeightFiles(tmp_path / "adapter")
    assert read_config(tmp_path / "adapter") == SHAPE
    files.check({name: p.shape for name, p in merged.items()})
    for name, expected in merged.items():
        whole = files.read(name)
        torch.testing.assert_close(whole.float(), expected, rtol=1e-6, atol=1e-7)
        flat = whole.view(-1)
        for start, stop in ((0, 3), (5, 40), (17, 18), (30, None), (4, 4)):
            torch.testing.assert_close(files.read(name, start, stop), flat[start:stop], rtol=1e-6, atol=1e-7)
    plain = WeightFiles(base)
    moved = [n for n in plain.names() if not torch.equal(plain.read(n), files.read(n).bfloat16())]
    assert len(moved) == 4 and all("q_proj" in n or "down_proj" in n for n in moved)
    code = "import sys, models.hf_format as h; h.WeightFiles(sys.argv[1]); assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, tmp_path / "adapter"], cwd=Path(__file__).parents[2], check=True)


def test_adapters_that_are_more_than_lora_are_refused(base, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "adapter"
    adapter_by_peft(base, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")

    def refusal(kind = ValueError, more = None, **changes):
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        save_file(weights | (more or {}), folder / "adapter_model.safetensors")
        with pytest.raises(kind) as error:
            WeightFiles(folder)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
        return str(error.value)

    for changes in ({"use_dora": True}, {"bias": "all"}, {"peft_type": "LOHA"}, {"alpha_pattern": {"q_proj": 1}},
                    {"init_lora_weights": "pissa"}):  # fmt: skip
        assert f"{next(iter(changes))} = " in refusal(**changes)
    assert "['embed_tokens']" in refusal(modules_to_save=["score", "embed_tokens"])
    assert "there is no folder" in refusal(FileNotFoundError, base_model_name_or_path=str(tmp_path / "absent"))
    assert "is missing" in refusal(base_model_name_or_path=None)
    assert "own folder" in refusal(base_model_name_or_path=str(folder))
    assert "does not fit" in refusal(r=4)
    assert "neither a LoRA matrix" in refusal(more={"base_model.model.model.norm.weight": torch.ones(16)})
    monkeypatch.setattr(sys, "argv", ["ulysses.export", "--merge", str(folder), str(tmp_path / "out")])
    absent = str(tmp_path / "absent")
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": absent}))
    assert export.main() == 2 and not (tmp_path / "out").exists()
    complaint = capsys.readouterr().err
    assert f"base_model_name_or_path in {folder / 'adapter_config.json'} is '{absent}'" in complaint
    assert "cannot be written" not in complaint
    (folder / "model.safetensors").touch()
    assert "an adapter and a whole model" in refusal()
    (folder / "model.safetensors").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        WeightFiles(folder)
