"""A multimodal folder: its text model trains, and what lies around it is in the export, bit for bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.folders import ADAPTER_WEIGHTS, read_config, read_json
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.multimodal import CARRIED
from tests.e2e.launch import ROOT, ranks, tiny
from tests.family_case import EXPERTS, FAMILIES, LINEAR
from tests.memory_case import packed
from tests.model_folder import logps_there, write_model
from tests.zero_case import filled
from ulysses.check.input_files import check_weights
from ulysses.export import main

SIDE_FILES = {
    "preprocessor_config.json": '{"size": 5}',
    "video_preprocessor_config.json": '{"fps": 2}',
    "LICENSE": "Do what you like.",
}
VISION = json.loads("""{
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16
}""")
TEXT = LINEAR | json.loads("""{
    "vocab_size": 704, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 656, "eos_token_id": 657,
    "pad_token_id": 658
}""")


SHARED = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"
IDS = "num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id"
# Gemma-3's folders say little of the text model, whose window counts the scaling
GEMMA = {name: TEXT[name] for name in (*SHARED, *IDS)} | json.loads("""{
    "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 20,
    "max_position_embeddings": 2048, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
}""")
SIGLIP = json.loads("""{
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14
}""")


def saved(model_type, folder, text, vision):
    """Save transformers' own tiny model in bfloat16, with a processor, as on the hub."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    for name, text_of_file in SIDE_FILES.items():
        (folder / name).write_text(text_of_file)
    return shutil.copytree(ROOT / "configs/demo/data/tokenizer", folder, dirs_exist_ok=True)


def folder_of(model_type, folder):
    """Save a tiny model; those of Qwen have tensors of MTP."""
    if model_type == "gemma3":
        return saved("gemma3", folder, GEMMA, SIGLIP)
    text = TEXT | (EXPERTS if model_type == "qwen3_5_moe" else {})
    text["rope_parameters"] = LINEAR["rope_parameters"] | {
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
    saved(model_type, folder, text, VISION)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.layers.0.mlp.gate_proj.weight"] = torch.randn(3, 5).bfloat16()
    weights["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(3, 5).bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def carried(folder):
    found = load_file(folder / "model.safetensors")
    return {n: x for n, x in found.items() if n.startswith(CARRIED)}


def side_files(folder):
    return {name: (folder / name).read_text() for name in SIDE_FILES}


def logps_here(folder, tokens):
    """The log-probabilities of a row's tokens by the model as the engine reads it."""
    config = read_config(folder)
    model = filled(CausalLM(config), InitialWeights(config, 0, folder))
    return model(packed(tokens)).logps[:-1].detach()


@pytest.fixture(scope="module", params=["qwen3_5_moe", "gemma3"])
def base(request, tmp_path_factory):
    """Linear attention and experts, or files whose names are not those of the modules that adapters belong to."""
    return folder_of(request.param, tmp_path_factory.mktemp("base") / "model")


TOKENS = torch.randint(3, 600, (90,), generator=torch.Generator().manual_seed(2))


def in_peft(adapters, base, kind="CausalLM", **options):
    """The model that PEFT makes of adapters by its own Auto class and on transformers', which the card names."""
    import peft
    import transformers

    options["dtype"] = torch.float32
    auto = getattr(peft, f"AutoPeftModelFor{kind}").from_pretrained(adapters, **options)
    whole = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(base, **options)
    named = type(whole).__name__
    card = (adapters / "README.md").read_text()
    assert f"{named}." in card and f"AutoPeftModelFor{kind}.from_pretrained(" in card
    twin = peft.PeftModel.from_pretrained(whole, adapters)
    ours, theirs = auto.state_dict(), twin.state_dict()
    known = [n for n in ours if ".lora_" in n or ".modules_to_save." in n]
    assert all(torch.equal(ours[name], theirs[name]) for name in known)  # none is drawn
    stored = load_file(adapters / ADAPTER_WEIGHTS)
    assert len(known) == len(stored)
    for name in known:
        file = name.replace(".modules_to_save", "").replace(".default", "")
        assert torch.equal(theirs[name], stored[file].float()), name
    return twin


def test_the_text_model_trains_and_the_rest_travels(base, tmp_path):
    """With all weights in bfloat16, and with adapters, which PEFT reads and which are merged in two ways."""
    from transformers import AutoModelForImageTextToText

    line = f"--model.path {base} --model.init pretrained --run.steps 1 --optimizer.lr 0.01"
    ranks(tiny("sft", tmp_path / "run", f"{line} --model.dtype bfloat16"), 2)
    ranks(tiny("sft", tmp_path / "adapted", f"{line} --model.lora.rank 3"), 2)
    whole, adapters = tmp_path / "run/export", tmp_path / "adapted/export"
    merged, again = tmp_path / "merged", tmp_path / "again"
    assert main([str(tmp_path / "adapted/checkpoints/step-1"), str(merged), "--merge"]) == 0
    assert main(["--merge", str(adapters), str(again)]) == 0
    source, found = read_json(base / "config.json"), []
    for out in (base, whole, merged, again):
        before, after = carried(base), carried(out)
        assert before.keys() == after.keys() and len(before) > 10
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert side_files(out) == SIDE_FILES
        written = read_json(out / "config.json")
        for name in ("architectures", "vision_config"):
            assert written[name] == source[name]
        window = read_config(base).max_position_embeddings
        assert written["text_config"]["max_position_embeddings"] == window == 2048
        twin, report = AutoModelForImageTextToText.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32
        )
        assert not report["missing_keys"] and not report["mismatched_keys"], report
        found.append(logps_there(twin, TOKENS))
        torch.testing.assert_close(logps_here(out, TOKENS), found[-1], rtol=1e-5, atol=1e-5)
    plain, *_, theirs = found
    assert not any(torch.allclose(plain, other, atol=1e-3) for other in found[1:])
    exact = {t.dtype for name, t in WeightFiles(whole).tensors.items() if "A_log" in name}
    assert exact <= {torch.float32}
    adapted = logps_there(in_peft(adapters, base), TOKENS)
    torch.testing.assert_close(logps_here(adapters, TOKENS), adapted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs, adapted, rtol=1e-4, atol=1e-4)
    # a run on the adapters goes on with them
    more = f"--model.path {adapters} --model.init pretrained --run.steps 1 --optimizer.lr 0"
    ranks(tiny("sft", tmp_path / "more", f"{more} --model.lora.rank 3"), 1)
    folders = adapters, tmp_path / "more/export"
    first, last = (load_file(folder / ADAPTER_WEIGHTS) for folder in folders)
    assert first.keys() == last.keys() and all(torch.equal(first[n], last[n]) for n in first)


def test_a_folder_with_a_vision_config_and_no_vision_is_refused(tmp_path):
    base = folder_of("qwen3_5", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    text = {name: x for name, x in weights.items() if ".visual." not in name}
    assert any(name.startswith("mtp.") for name in text)
    save_file(text, base / "model.safetensors", {"format": "pt"})
    sentence = f"{base} has a config.json with a vision model but holds no tensors of one; complete the files, or write"
    with pytest.raises(ValueError, match=sentence):
        check_weights(read_config(base), base, reward=False)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3"])
def test_adapters_of_reward_models_load_in_peft(model_type, tmp_path):
    """Its class for them holds the whole model, of both families; qwen3_5_moe has none."""
    base = folder_of(model_type, tmp_path / "base")
    line = f"--model.path {base} --model.init pretrained --run.steps 1 --optimizer.lr 0.01 --model.lora.rank 3"
    ranks(tiny("rm", tmp_path / "run", line), 1)
    assert in_peft(tmp_path / "run/export", base, "SequenceClassification", num_labels=1)


def test_tensors_of_mtp_travel_beside_a_text_model(tmp_path):
    """Qwen3-Next's folders have them and no vision."""
    shape = FAMILIES["qwen3_next"] | {
        "vocab_size": 704,
        "bos_token_id": 656,
        "eos_token_id": 657,
    }
    write_model(tmp_path / "base", ModelConfig.from_hf(shape), torch.bfloat16)
    shutil.copytree(ROOT / "configs/demo/data/tokenizer", tmp_path / "base", dirs_exist_ok=True)
    weights = load_file(tmp_path / "base/model.safetensors")
    weights["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(3, 5).bfloat16()
    save_file(weights, tmp_path / "base/model.safetensors", {"format": "pt"})
    line = f"--model.path {tmp_path}/base --model.init pretrained --run.steps 1"
    ranks(tiny("sft", tmp_path / "run", line), 1)
    before, after = carried(tmp_path / "base"), carried(tmp_path / "run/export")
    assert before.keys() == after.keys() and len(before) == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
