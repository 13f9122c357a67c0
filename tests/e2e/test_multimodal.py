"""A multimodal folder: its text model trains, and what lies around it is in the export, bit for bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.folders import read_config
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


def folder_of(model_type, folder, **changes):
    """Save a tiny model with tensors of MTP."""
    text = TEXT | changes
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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Linear attention, experts and a shared one; the family without experts is a reward model below."""
    return folder_of("qwen3_5_moe", tmp_path_factory.mktemp("base") / "model", **EXPERTS)


TOKENS = torch.randint(3, 600, (90,), generator=torch.Generator().manual_seed(2))


def test_the_text_model_trains_and_the_rest_travels(base, tmp_path):
    from transformers import AutoModelForImageTextToText

    out = tmp_path / "run"
    line = f"--model.path {base} --model.init pretrained --model.dtype bfloat16 --run.steps 2"
    ranks(tiny("sft", out, line), 2)
    source, export = (
        json.loads((f / "config.json").read_text()) for f in (base, out / "export")
    )
    assert export["architectures"] == source["architectures"]
    assert export["vision_config"] == source["vision_config"]
    rope = export["text_config"]["rope_parameters"]
    assert rope.items() >= source["text_config"]["rope_parameters"].items()
    before, after = carried(base), carried(out / "export")
    assert before.keys() == after.keys() and len(before) > 10
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert side_files(out / "export") == SIDE_FILES
    twin, report = AutoModelForImageTextToText.from_pretrained(
        out / "export", output_loading_info=True
    )
    assert type(twin).__name__ == source["architectures"][0]
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    for name in ("mlp.experts.down_proj", "linear_attn.in_proj_qkv.weight"):
        name = f"model.layers.0.{name}"
        old, new = (WeightFiles(f).read(name) for f in (base, out / "export"))
        assert not torch.equal(old, new)  # it was trained
    decays = WeightFiles(out / "export").tensors["model.layers.0.linear_attn.A_log"]
    assert decays.dtype == torch.float32
    torch.testing.assert_close(
        logps_here(out / "export", TOKENS),
        logps_there(twin.float(), TOKENS),
        rtol=1e-5,
        atol=1e-5,
    )
    # the same from the checkpoint
    assert main([str(out / "checkpoints/step-2"), str(tmp_path / "again")]) == 0
    ours, theirs = (
        load_file(f / "model.safetensors") for f in (out / "export", tmp_path / "again")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert read_config(tmp_path / "again") == read_config(out / "export")


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
    stored = load_file(adapters / "adapter_model.safetensors")
    assert len(known) == len(stored)
    for name in known:
        file = name.replace(".modules_to_save", "").replace(".default", "")
        assert torch.equal(theirs[name], stored[file].float()), name
    return twin


def test_adapters_load_in_peft_by_its_auto_class(base, tmp_path):
    """Adapters of every kind of projection give the same logits there, and merged ones carry the rest."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    line = f"--model.path {base} --model.init pretrained --model.lora.rank 3 --run.steps 2 --optimizer.lr 0.01"
    ranks(tiny("sft", out, line), 2)
    adapted = load_file(out / "export/adapter_model.safetensors")
    names = "in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj q_proj"
    names += " shared_expert.gate_proj shared_expert.up_proj shared_expert.down_proj"
    for name in names.split():
        assert any(f".{name}.lora_A" in key for key in adapted), name
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = logps_there(whole, TOKENS)
    theirs = logps_there(in_peft(out / "export", base), TOKENS)
    assert not torch.allclose(plain, theirs, atol=1e-3)
    torch.testing.assert_close(logps_here(out / "export", TOKENS), theirs, rtol=1e-4, atol=1e-4)
    # a run on them goes on with them
    line = line.replace(str(base), str(out / "export")).replace("0.01", "0")
    ranks(tiny("sft", tmp_path / "more", line), 2)
    again = load_file(tmp_path / "more/export/adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in adapted.items())
    settings = json.loads((tmp_path / "more/export/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert main([str(out / "checkpoints/step-2"), str(tmp_path / "merged"), "--merge"]) == 0
    assert side_files(out / "export") == side_files(tmp_path / "merged") == SIDE_FILES
    before, after = carried(base), carried(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gemma3_trains_in_its_multimodal_folder(tmp_path) -> None:
    """Files keep their names, which are not those of the modules that adapters belong to."""
    from transformers import AutoModelForImageTextToText

    base = saved("gemma3", tmp_path / "base", GEMMA, SIGLIP)
    raw = json.loads((base / "config.json").read_text())
    assert read_config(base).max_position_embeddings == 2048
    line = f"--model.path {base} --model.init pretrained --run.steps 1 --optimizer.lr 0.01"
    ranks(tiny("sft", tmp_path / "whole", line), 2)
    ranks(tiny("sft", tmp_path / "run", f"{line} --model.lora.rank 3"), 1)
    checkpoint = str(tmp_path / "run/checkpoints/step-1")
    assert main([checkpoint, str(tmp_path / "merged"), "--merge"]) == 0
    adapters = tmp_path / "run/export"
    assert main(["--merge", str(adapters), str(tmp_path / "again")]) == 0
    before, plain = load_file(base / "model.safetensors"), None
    for out in (base, tmp_path / "whole/export", tmp_path / "merged", tmp_path / "again"):
        assert {*load_file(out / "model.safetensors")} == {*before}
        assert len(carried(out)) > 10
        assert all(torch.equal(before[name], tensor) for name, tensor in carried(out).items())
        written = json.loads((out / "config.json").read_text())
        assert written["architectures"] == raw["architectures"]
        assert written["text_config"]["max_position_embeddings"] == 2048
        twin, report = AutoModelForImageTextToText.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32
        )
        assert not any(report.values()), report
        theirs = logps_there(twin, TOKENS)
        torch.testing.assert_close(logps_here(out, TOKENS), theirs, rtol=1e-5, atol=1e-5)
        assert plain is None or not torch.allclose(plain, theirs, atol=1e-3)
        plain = theirs if plain is None else plain
    found = logps_there(in_peft(adapters, base), TOKENS)
    torch.testing.assert_close(logps_here(adapters, TOKENS), found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs, found, rtol=1e-4, atol=1e-4)


def test_a_folder_with_a_vision_config_and_no_vision_is_refused(tmp_path) -> None:
    base = folder_of("qwen3_5", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    text = {name: x for name, x in weights.items() if ".visual." not in name}
    assert any(name.startswith("mtp.") for name in text)
    save_file(text, base / "model.safetensors", {"format": "pt"})
    sentence = f"{base} has a config.json with a vision model but holds no tensors of one; complete the files, or write"
    with pytest.raises(ValueError, match=sentence):
        check_weights(read_config(base), base, reward=False)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3"])
def test_adapters_of_reward_models_load_in_peft(model_type, tmp_path) -> None:
    """Its class for them holds the whole model, of both families; qwen3_5_moe has none."""
    if model_type == "gemma3":
        base = saved("gemma3", tmp_path / "base", GEMMA, SIGLIP)
    else:
        base = folder_of(model_type, tmp_path / "base")
    line = f"--model.path {base} --model.init pretrained --run.steps 1 --optimizer.lr 0.01 --model.lora.rank 3"
    ranks(tiny("rm", tmp_path / "run", line), 1)
    assert in_peft(tmp_path / "run/export", base, "SequenceClassification", num_labels=1)


def test_tensors_of_mtp_travel_beside_a_text_model(tmp_path) -> None:
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
