"""Configurations of LLaMA-Factory, TRL and axolotl, as people have them, become TOML that our own check accepts."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT
from ulysses.migrate import main
from ulysses.training.command_line import check
from ulysses.training.config import Config

LLAMAFACTORY_DPO = """
### model
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
trust_remote_code: true
### method
stage: dpo
do_train: true
finetuning_type: full
deepspeed: ds_z3_offload_config.json  # choices: [ds_z0_config.json, ds_z2_config.json, ds_z3_config.json]
pref_beta: 0.2
pref_loss: sigmoid  # choices: [sigmoid (dpo), orpo, simpo]
pref_ftx: 0.5
### dataset
dataset: dpo_en_demo, pairs
template: llama3
cutoff_len: 8192
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/llama3-8b/full/dpo
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""

LLAMAFACTORY_LORA = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
use_dora: true
dataset: identity
eval_dataset: chats
template: qwen
cutoff_len: 2048
mask_history: true
neat_packing: true
output_dir: saves/qwen/lora/sft
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
max_steps: 300
fp16: true
optim: paged_adamw_8bit
eval_steps: 50
save_strategy: epoch
"""

LLAMAFACTORY_KTO = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: kto
finetuning_type: lora
lora_target: all
pref_beta: 0.1
kto_chosen_weight: 1.5
dataset: kto_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/kto
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
"""

TRL_DPO = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
learning_rate: 5.0e-7
beta: 0.05
loss_type: [sigmoid]
max_length: 2048
truncation_mode: keep_end
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eval_strategy: steps
eval_steps: 50
lr_scheduler_type: cosine
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 20
adam_beta2: 0.95
output_dir: out
sync_ref_model: true
"""

TRL_SFT = """#!/bin/bash
export WANDB_PROJECT=x
accelerate launch --config_file zero3.yaml trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name trl-lib/Capybara \\
    --learning_rate 2e-5 --num_train_epochs 1 --packing --bf16 True \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 \\
    --use_peft --lora_r 32 --lora_target_modules q_proj k_proj v_proj --output_dir=out
"""

AXOLOTL_SFT = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    field_messages: messages
    message_property_mappings: {role: role, content: content}
  - path: data/own.jsonl
    field_messages: conversation
chat_template: llama3
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 8192
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
sequence_parallel_degree: 4
special_tokens:
  pad_token: <|end_of_text|>
"""

DATASETS = {
    "dpo_en_demo": {"file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "pairs": {"hf_hub_url": "own/pairs", "subset": "en", "columns": {"prompt": "question"}},
    "identity": {"file_name": "identity.json"},
    "chats": {"file_name": "chats.json", "formatting": "sharegpt",
        "columns": {"messages": "conversations", "images": "images"}},
    "kto_en_demo": {"file_name": "kto_en_demo.json", "columns": {"messages": "messages", "kto_tag": "label"}},
}  # fmt: skip


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function from a file's text to our configuration and all that was printed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASETS))
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": offload, "stage3_prefetch_bucket_size": "auto"}
    (tmp_path / "ds_z3_offload_config.json").write_text(
        json.dumps({"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": zero})
    )

    def migrated(text: str, *options: str, name: str = "run.yaml") -> tuple[Config, str]:
        path = tmp_path / name
        path.write_text(text)
        assert main([str(path), *options]) == 0
        shown = capsys.readouterr().out
        return check(tomllib.loads(shown)), shown

    return migrated


def test_llamafactory_dpo_on_all_weights(migrate: Any, tmp_path: Path) -> None:
    config, shown = migrate(LLAMAFACTORY_DPO, "--gpus", "8")
    assert config.stage == "dpo" and config.model.path == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.dpo.beta, config.dpo.loss_type, config.dpo.sft_weight) == (0.2, "sigmoid", 0.5)
    assert (
        config.batch.examples == 64
        and "per_device_train_batch_size 1 x gradient_accumulation_steps 8 x 8 GPU" in shown
    )
    assert config.data.train == [
        {
            "path": str(tmp_path / "data/dpo_en_demo.json"),
            "columns": {"messages": "conversations"},
            "max_examples": 1000,
        },
        {"path": "own/pairs", "subset": "en", "columns": {"instruction": "question"}, "max_examples": 1000},
    ]
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.betas) == (5e-6, 0.1, (0.9, 0.999))
    assert config.memory.offload_optimizer and not config.memory.offload_parameters
    assert config.model.lora.rank == 0 and config.data.chat_template == "llama3" and config.run.epochs == 3
    assert config.run.eval_every == 500 and config.data.eval_fraction == 0.1 and not config.run.overwrite
    assert "a mean over the tokens of the whole step" in shown


def test_llamafactory_lora(migrate: Any, tmp_path: Path) -> None:
    config, shown = migrate(LLAMAFACTORY_LORA)
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.targets) == (
        16,
        32,
        ["q_proj", "v_proj"],
    )
    assert config.data.train == str(tmp_path / "data/identity.json") and config.data.train_on == "last"
    assert config.run.steps == 300 and config.run.epochs == 0 and config.run.save_every == 0
    assert config.run.eval_every == 50 and config.optimizer.schedule == "linear" and config.optimizer.warmup == 0
    assert config.model.dtype == "bfloat16" and "fp16: float16 is not supported" in shown
    for remark in ("use_dora = True: use plain LoRA", "optim = paged_adamw_8bit: AdamW",
                   "save_strategy = epoch: set run.save_every",
                   "chats.json: formatting sharegpt, images images: formats follow"):  # fmt: skip
        assert remark in shown


def test_llamafactory_kto_has_the_betas_own_section(migrate: Any) -> None:
    config, _ = migrate(LLAMAFACTORY_KTO)
    assert (config.stage, config.kto.beta, config.kto.desirable_weight) == ("kto", 0.1, 1.5)
    assert config.model.lora.rank == 8 and len(config.model.lora.targets) == 7 and config.batch.examples == 8


def test_a_table_of_settings_and_data_that_nothing_describes(migrate: Any) -> None:
    rope = "rope_scaling: {rope_type: yarn, factor: 4.0}"
    config, shown = migrate(LLAMAFACTORY_LORA.replace("dataset: identity", f"dataset: nowhere\n{rope}"))
    assert (config.model.rope.type, config.model.rope.factor) == ("yarn", 4) and config.data.train == "nowhere"
    assert "nowhere: dataset_info.json does not describe it, so write its path" in shown


def test_trl_yaml_and_a_command_that_names_it(migrate: Any, tmp_path: Path) -> None:
    config, shown = migrate(TRL_DPO, "--stage", "dpo")
    source = {"path": "trl-lib/ultrafeedback_binarized", "split": "train"}
    assert config.data.train == source and config.data.eval == source | {"split": "test"}
    assert (config.dpo.beta, config.dpo.loss_type, config.data.truncation) == (0.05, "sigmoid", "keep_end")
    assert (config.optimizer.min_lr, config.optimizer.warmup, config.optimizer.betas[1]) == (0.1, 20, 0.95)
    assert config.run.eval_every == 50 and "sync_ref_model = True: the reference stays fixed" in shown
    more = "[sigmoid, bco_pair]\nloss_weights: [0.8, 0.2]\nearly_stopping_patience: 3\nuse_rslora: true"
    config, _ = migrate(TRL_DPO.replace("[sigmoid]", more), "--stage", "dpo", name="list.yaml")
    assert (config.dpo.loss_type, config.dpo.loss_weights) == (["sigmoid", "bco_pair"], [0.8, 0.2])
    assert config.run.patience == 3 and config.model.lora.rslora
    config, _ = migrate("trl dpo --config run.yaml --beta 0.3 --learning_rate=1e-6", name="go.sh")
    assert (config.dpo.beta, config.optimizer.lr, config.data.max_length) == (0.3, 1e-6, 2048)


def test_trl_command_line(migrate: Any) -> None:
    config, shown = migrate(TRL_SFT, name="sft.sh")
    assert config.stage == "sft" and config.optimizer.lr == 2e-5 and config.batch.examples == 8
    assert config.model.lora.rank == 32 and config.model.lora.targets == ["q_proj", "k_proj", "v_proj"]
    assert config.data.max_length == 1024 and config.run.epochs == 1
    assert 'data.train_on = "assistant"  # assistant_only_loss: without it TRL trains every token' in shown


def test_axolotl(migrate: Any) -> None:
    config, shown = migrate(AXOLOTL_SFT, "--gpus", "8")
    assert config.stage == "sft" and config.parallel.sequence_parallel_size == 4 and config.batch.examples == 16
    assert config.data.train == [
        "fozziethebeat/alpaca_messages_2k_test",
        {"path": "data/own.jsonl", "columns": {"messages": "conversation"}},
    ]
    assert config.model.special_tokens == {"pad_token": "<|end_of_text|>"} and config.optimizer.lr == 2e-4
    assert "load_in_4bit = True: use LoRA on bfloat16 weights" in shown and "load_in_8bit" not in shown
    assert "saves_per_epoch = 1: set run.save_every in steps" in shown
    config, _ = migrate(AXOLOTL_SFT.replace("chat_template: llama3", "rl: ipo"))
    assert (config.stage, config.dpo.loss_type) == ("dpo", "ipo")


def test_a_redirected_translation_holds_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(LLAMAFACTORY_KTO)
    loud = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    line = [sys.executable, "-m", "ulysses.cli", "migrate", "run.yaml"]
    shown = subprocess.check_output(line, cwd=tmp_path, env=loud | {"PYTHONPATH": str(ROOT)}, text=True)
    assert tomllib.loads(shown)["stage"] == "kto"


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, sentence in (
        ("a.yaml", TRL_DPO, "no stage is named; add --stage"),
        ("b.yaml", "- 1", "this file holds no settings"),
        ("c.sh", "ls -l", "no command here starts a trainer"),
    ):
        (tmp_path / name).write_text(text)
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.startswith("error: ") and error.count("\n") == 1


def test_what_is_still_wrong_and_choices_that_are_not_ours_are_listed(migrate: Any) -> None:
    text = LLAMAFACTORY_DPO.replace("template: llama3", "template: mistral").replace(
        "pref_beta: 0.2", "loss_type: exo_pair"
    )
    _, shown = migrate(text)
    assert "template = mistral: data.chat_template has no such choice, so its default stands" in shown
    shown = migrate(text.replace("pref_loss: sigmoid", ""))[1]
    assert "\n#   dpo: loss_type 'exo_pair' is infinite at label_smoothing 0" in shown
