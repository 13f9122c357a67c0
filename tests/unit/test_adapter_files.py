"""A LoRA adapter's folder is read together with its base: slice by slice, as PEFT computes it."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.folders import read_config, read_json
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.lora import add_adapters, is_adapter, save_adapters
from models.quantized import Packed, pack
from models.writing import whole_weights
from tests import rows_of
from tests.e2e.launch import python
from tests.family_case import FAMILIES
from tests.memory_case import packed
from tests.model_folder import logps_there, tiny_config, write_model
from ulysses import export
from ulysses.check.adapter_settings import choose_base
from ulysses.config.command_line import check
from ulysses.config.schema import LoraSection, ModelSection
from ulysses.disk import write_json
from ulysses.options import stage_of
from ulysses.zero.state import SavedSlices

SHAPE = ModelConfig.from_hf(tiny_config(vocab_size=64, hidden_size=16))


@pytest.fixture
def base(tmp_path):
    write_model(tmp_path / "base", SHAPE, torch.bfloat16)
    return tmp_path / "base"


def adapter_by_peft(base, folder, task="CAUSAL_LM", **options):
    """Save an adapter of PEFT's own over the base; return the weights that PEFT merges, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    kind = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    model = kind.from_pretrained(base, num_labels=1, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    adapted = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, task_type=task, **options)
    )
    adapted.save_pretrained(folder)
    return dict(adapted.merge_and_unload().named_parameters())


@torch.no_grad()
def write_adapters(folder, base, model, lora, fill):
    """Give a model adapters, filled by a function, and save them as a run does whose base is quantised."""
    adapters = {n: p for n, p in add_adapters(model, lora).named_parameters() if is_adapter(n)}
    for parameter in adapters.values():
        fill(parameter)
    folder.mkdir()
    save(folder, adapters, ModelSection(path=str(base), lora=lora, quantize="nf4"), model)
    return folder


def save(folder, adapters, section, model):
    """Save adapters as an export does."""
    by_parameter = model.config.family.mlp_by_parameter
    save_adapters(folder, adapters, section, reward=False, by_parameter=by_parameter)


@pytest.fixture
def merge(tmp_path, capsys):
    """A function that merges an adapter's folder into `out`, or is refused; it returns what was said."""

    def merge(folder, code, *more):
        capsys.readouterr()
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert export.main(["--merge", str(folder), str(tmp_path / "out"), *more]) == code
        assert (tmp_path / "out").exists() == (code == 0)
        said = capsys.readouterr()
        return said.err or said.out

    return merge


@pytest.mark.parametrize("task, rslora", [("CAUSAL_LM", True), ("SEQ_CLS", False)])
def test_an_adapter_is_read_as_peft_merges_it(base, tmp_path, task, rslora):
    whole = adapter_by_peft(base, tmp_path / "adapter", task, use_rslora=rslora)
    files = WeightFiles(tmp_path / "adapter")
    assert read_config(tmp_path / "adapter") == SHAPE
    files.check({name: p.shape for name, p in whole.items()})
    for name, expected in whole.items():
        found = files.read(name)
        assert_close(found.float(), expected.view(-1), rtol=1e-6, atol=1e-7)
        for start, stop in ((0, 3), (5, 40), (17, 18), (30, None), (4, 4)):
            part = files.read(name, start, stop)
            assert_close(part, found[start:stop], rtol=1e-6, atol=1e-7)


UNFIT = json.loads("""{
    "use_dora": true, "peft_type": "LOHA", "alpha_pattern": {"q_proj": 1}, "init_lora_weights": "pissa",
    "alora_invocation_tokens": [5, 6], "layer_replication": [[0, 2], [1, 3]], "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2}, "kasa_config": {}, "monteclora_config": {}
}""")


def test_adapters_that_are_more_than_lora_are_refused(base, tmp_path, merge):
    folder, absent = tmp_path / "adapter", str(tmp_path / "absent")
    adapter_by_peft(base, folder)
    config = read_json(folder / "adapter_config.json")
    weights = load_file(folder / "adapter_model.safetensors")

    def refused(part, kind=ValueError, more=None, **changes):
        write_json(folder / "adapter_config.json", config | changes)
        save_file(weights | (more or {}), folder / "adapter_model.safetensors")
        with pytest.raises(kind, match=part) as error:
            WeightFiles(folder)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)

    for name, value in UNFIT.items():
        refused(f"{name} = ", **{name: value})
    refused("there is no folder", FileNotFoundError, base_model_name_or_path=absent)
    said = f"base_model_name_or_path in {folder / 'adapter_config.json'} is '{absent}'"
    assert said in merge(folder, 2)
    refused("is missing", base_model_name_or_path=None)
    refused("does not fit", r=4)
    norm = {"base_model.model.model.norm.weight": torch.ones(16)}
    refused("neither a LoRA matrix", more=norm)
    [key, *_] = weights
    inner = key.replace("model.model.", "model.model.language_model.")
    name = re.escape(key.removeprefix("base_model.model."))
    refused(f"holds {name} more than once", more={inner: weights[key].clone()})
    flat = {f"base_model.model.model.norm.lora_{x}.weight": torch.ones(3, 3) for x in "AB"}
    refused("adapts model.norm.weight by matrices of shapes", more=flat)
    (folder / "model.safetensors").touch()
    refused("an adapter and a whole model")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    advice = r"adapter_model\.safetensors; convert the adapter to safetensors"
    with pytest.raises(FileNotFoundError, match=advice):
        WeightFiles(folder)


def test_a_model_without_adapters_is_not_merged(base, merge):
    assert "is a model without adapters; nothing is to be merged" in merge(base, 2)


def test_an_adapter_that_is_not_finite_is_not_merged(base, tmp_path, merge):
    adapter_by_peft(base, folder := tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] = torch.nan
    save_file(weights, folder / "adapter_model.safetensors")
    said = merge(folder, 2)
    assert said.count("\n") == 1 and "lora_A.weight in " in said
    assert "holds infinite weights, or some" in said


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
def test_merging_keeps_the_precision_of_the_adapters_and_says_what_rounding_takes(
    base, tmp_path, trained, merge
):
    """By default a float32 adapter loses nothing; in bfloat16 the sentence tells the share that is gone."""
    whole = adapter_by_peft(base, folder := tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file({n: (t / 30).to(trained) for n, t in load_file(path).items()}, path)
    (folder / "README.md").write_text("eval_loss 0.123")
    before, files = WeightFiles(base), WeightFiles(folder)
    exact = {name: files.read(name).float() for name in whole}
    for size in ("-1", "nan", "inf"):
        assert f"--shard-gib is {float(size)} but must be" in merge(
            folder, 2, "--shard-gib", size
        )
    said, out = merge(folder, 0), WeightFiles(tmp_path / "out")
    assert {t.dtype for t in out.tensors.values()} == {trained}
    assert read_config(tmp_path / "out") == SHAPE
    assert read_json(tmp_path / "out/config.json")["torch_dtype"] == str(trained)[6:]
    if trained == torch.float32:
        assert said == f"exported {tmp_path / 'out'}\n"
        assert all(torch.equal(out.read(name), exact[name]) for name in whole)
        said = merge(folder, 0, "--dtype", "bfloat16")
    out = WeightFiles(tmp_path / "out")
    assert {t.dtype for t in out.tensors.values()} == {torch.bfloat16}
    lost = sum((out.read(n).float() - w).square().sum() for n, w in exact.items())
    change = sum((w - before.read(n).float()).square().sum() for n, w in exact.items())
    [share] = re.findall(r"written in bfloat16 differ from the trained ones by (\d+)% of", said)
    assert float(share) == pytest.approx(100 * float(lost / change) ** 0.5, abs=0.6) and lost
    card = (tmp_path / "out/README.md").read_text()
    assert "0.123" not in card and f"{share}% of what training changed" in card
    assert str(tmp_path) not in card
    assert merge(folder, 0, "--dtype", "float32").startswith("exported")


def test_merging_onto_the_original_weights_says_how_far_they_are(base, tmp_path, merge):
    """Adapters of a run on NF4 know it."""
    lora = LoraSection(rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
    draw = partial(torch.nn.init.normal_, std=0.03)
    folder = write_adapters(tmp_path / "adapter", base, CausalLM(SHAPE), lora, draw)
    said = merge(folder, 0)
    originals, files = WeightFiles(base), WeightFiles(folder)
    lost = change = 0.0
    for name, stored in originals.tensors.items():
        whole = originals.read(name).float()
        update = files.read(name).float() - whole
        if name.endswith("_proj.weight"):
            data = pack(originals.read(name).view(stored.shape))
            lost += float(
                (Packed(stored.shape).unpack(data, torch.float32).view(-1) - whole)
                .square()
                .sum()
            )
        change += float(update.square().sum())
    told = float(re.search(r"differ from the trained ones by (\d+)% of", said)[1])
    assert told == pytest.approx(100 * (lost / change) ** 0.5, abs=0.6) and told > 1
    assert "quantised in training" in said and "does not round" not in said


def test_the_same_adapters_give_the_same_bytes(base, tmp_path):
    """Each table has an order of its own, and sets have one in each process."""
    code = f"""
import torch
from pathlib import Path
from models.lora import save_adapters
from ulysses.config.schema import LoraSection, ModelSection
section = ModelSection(path={str(base)!r}, lora=LoraSection(rank=2), quantize="nf4")
adapters = {{"model.q_proj.lora_A": torch.ones(2, 3)}}
for name in names:
    (Path({str(tmp_path)!r}) / name).mkdir()
    save_adapters(Path({str(tmp_path)!r}) / name, adapters, section, reward=True)
"""
    exec(code, {"names": "0123"})
    python("-c", f"names = '4'\n{code}", PYTHONHASHSEED="1").check()
    first, *others = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in "01234"
    )
    assert len(first) == 2 and all(found == first for found in others)
    assert load_file(tmp_path / "0/adapter_model.safetensors")


MOE = ModelConfig.from_hf(
    tiny_config(
        model_type="qwen3_moe", vocab_size=64, hidden_size=16, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True,
    )
)  # fmt: skip
GPT_OSS = ModelConfig.from_hf(
    FAMILIES["gpt-oss"]
    | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
)
# with a shared expert, and dense layers beside those of experts
WIDE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "moe_intermediate_size": 32,
}
WIDE |= {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN3_5_MOE, QWEN3_NEXT, PARTLY_DENSE = (
    ModelConfig.from_hf(FAMILIES[name] | WIDE | {"mlp_only_layers": dense})
    for name, dense in (("qwen3_5_moe", []), ("qwen3_next", [1]), ("qwen3_moe", [1]))
)
SHAPES = {
    "qwen3_moe": MOE, "gpt_oss": GPT_OSS, "qwen3_5_moe": QWEN3_5_MOE, "qwen3_next": QWEN3_NEXT,
    "partly dense": PARTLY_DENSE,
}  # fmt: skip
EXPERTS = "gate_proj", "up_proj", "down_proj"
# the model, how its base is quantised, and the targets of its adapters: every model and every set of targets with both
OF_EXPERTS = """
qwen3_moe => none => gate_proj up_proj down_proj
qwen3_moe => nf4 => down_proj
gpt_oss => nf4 => gate_proj up_proj down_proj
gpt_oss => none => gate_proj up_proj
qwen3_5_moe => nf4 => gate_proj up_proj
qwen3_5_moe => none => down_proj
qwen3_next => none => gate_proj up_proj down_proj
qwen3_next => nf4 => gate_proj up_proj
partly dense => nf4 => gate_proj up_proj down_proj
partly dense => none => down_proj
"""


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_continued_adapter_is_the_start_and_its_base_stays_apart(model_type, tmp_path):
    """Also one of experts, and slice by slice; what the adapter lacks starts as it does without one."""
    shape = SHAPES.get(model_type, SHAPE)
    write_model(tmp_path / "base", shape, torch.bfloat16)
    lora, model = LoraSection(rank=4, targets=["q_proj", *EXPERTS]), CausalLM(shape)
    folder = write_adapters(
        tmp_path / "adapter", tmp_path / "base", model, lora, torch.nn.init.normal_
    )
    path = folder / "adapter_model.safetensors"
    stored = {n: x for n, x in load_file(path).items() if "layers.1.self_attn" not in n}
    save_file(stored, path)
    fresh = InitialWeights(shape, 0, tmp_path / "base")
    weights = InitialWeights(shape, 0, folder, continues=True)
    continued = 0
    for name, parameter in model.named_parameters():
        found, plain = torch.empty(parameter.numel()), torch.empty(parameter.numel())
        for part, start in zip(found.split(50), range(0, len(found), 50)):
            weights.fill(name, parameter.shape, start, part)
        fresh.fill(name, parameter.shape, 0, plain)
        is_continued = ".lora_" in name and "layers.1.self_attn" not in name
        assert torch.equal(found, parameter.view(-1) if is_continued else plain), name
        continued += is_continued
    assert continued == len(stored)


OTHERS = """
=>
{"lora": {"rank": 2}} => merged
{"lora": {"alpha": 8.0}} => merged
{"lora": {"rslora": true}} => merged
{"lora": {"targets": ["q_proj", "up_proj"]}} => merged
{"lora": {"targets": ["q_proj", "gate_proj", "up_proj", "down_proj", "v_proj"]}} => merged
{"lora": {"train": ["embeddings"]}} => merged
{"lora": {"dropout": 0.1}} =>
"""


@pytest.mark.parametrize("changes, becomes", rows_of(OTHERS))
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_an_adapter_is_continued_with_its_own_settings_alone(
    model_type, changes, becomes, tmp_path
):
    shape = SHAPES.get(model_type, SHAPE)
    write_model(tmp_path / "base", shape, torch.bfloat16)
    lora = {"rank": 4, "targets": ["q_proj", *EXPERTS]}
    args = tmp_path / "base", CausalLM(shape), LoraSection(**lora), torch.nn.init.ones_
    folder = write_adapters(tmp_path / "adapter", *args)
    changes = json.loads(changes or "{}")
    model = {"path": str(folder)} | changes | {"lora": lora | changes.get("lora", {})}
    for stage, whole in (("sft", False), ("dpo", True)):
        config = check({"stage": stage, "data": {"train": ["x"]}, "model": model})
        found = choose_base(stage_of(config), folder).model
        is_merged = becomes == "merged" or (whole and not becomes)
        assert found.lora.merge == is_merged
        is_continued = not becomes and not is_merged
        assert found.path == str(tmp_path / "base" if is_continued else folder)


@pytest.mark.parametrize("name, kind, targets", rows_of(OF_EXPERTS))
def test_adapters_of_experts_are_pefts(tmp_path, name, kind, targets, merge):
    """Logits and gradients equal those of PEFT on the same base, and PEFT loads what is exported."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, shape, targets = tmp_path / "base", SHAPES[name], targets.split()
    write_model(base, shape)
    kinds = [layer.feed_forward for layer in shape.layers]
    sparse, dense = kinds.count("experts"), kinds.count("mlp")
    lora = LoraSection(rank=4, alpha=8.0, targets=["q_proj", *targets])
    model, draw = CausalLM(shape, quantize=kind), torch.Generator().manual_seed(0)
    # of the size of the weights: far larger adapters would let float32's rounding decide, on each processor otherwise
    folder = write_adapters(
        tmp_path / "adapter",
        base,
        model,
        lora,
        partial(torch.nn.init.normal_, std=0.1, generator=draw),
    )
    weights = InitialWeights(shape, 0, base, kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" not in name:
                weights.fill(name, p.shape, 0, p.view(-1))
    row = torch.randint(64, (40,), generator=draw)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole = whole_weights(shape, model.named_parameters(), {}, ModelSection(dtype="float32"))
    theirs.load_state_dict({name: weight for name, weight, _ in whole})
    theirs = PeftModel.from_pretrained(theirs, folder, is_trainable=True)
    logps, own = logps_there(theirs, row), model(packed(row)).logps[:-1]
    assert_close(own, logps, rtol=1e-5, atol=1e-5)
    own.square().sum().backward()
    logps.square().sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if is_adapter(n)}
    (gradients := tmp_path / "gradients").mkdir()
    save(gradients, found, ModelSection(path=str(base), lora=lora), model)
    found = load_file(gradients / "adapter_model.safetensors")
    shared = sum(".shared_expert." in name for name in found)
    assert shared == 2 * len(targets) * sparse * shape.family.shared_expert
    assert sum(".mlp.down_proj." in name for name in found) == 2 * dense * (
        "down_proj" in targets
    )
    wanted = {
        n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if "lora_" in n
    }
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() < 1e-5 * wanted[name].norm(), name
    merge(folder, 0)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    if kind == "none":
        assert_close(merged(row[None]).logits, theirs(row[None]).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_over_a_base_in_fp8_is_refused(base, tmp_path):
    adapter_by_peft(base, folder := tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"quantize": "fp8"})
    with pytest.raises(
        ValueError, match="was trained on a base of fp8 numbers, which is read no more; merge"
    ):
        WeightFiles(folder)


def test_checkpoints_with_earlier_names_of_adapters_are_read(tmp_path):
    stem, values = "model.layers.0.self_attn.q_proj", torch.arange(6.0)
    pieces = [[f"{stem}.lora_A.default.weight", 0, 4, 0], [f"{stem}.base_layer.bias", 0, 2, 4]]
    (tmp_path / "rank-00000.json").write_text(json.dumps({"updates": 3, "pieces": pieces}))
    save_file({"data": values}, tmp_path / "rank-00000.master.safetensors")
    saved, found = SavedSlices(tmp_path), torch.zeros(3)
    saved.read_into(found, f"{stem}.lora_A", "master", start=1)
    assert found.tolist() == [1, 2, 3] and saved.numel(f"{stem}.bias") == 2
