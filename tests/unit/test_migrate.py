"""Configurations of LLaMA-Factory, TRL and axolotl, as people have them, become TOML that our own check accepts."""

import json
import os
import subprocess
import sys
import tomllib
from operator import attrgetter

import pytest
import yaml

from tests import ROOT, rows_of
from ulysses.config.command_line import check
from ulysses.migrate import main, read_settings, translate

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
"""


def yaml_of(options):
    """Options as TRL's documentation writes them, as the YAML that its commands read with --config."""
    words_of = [option.split() for option in f" {options}".split(" --")[1:]]
    return yaml.safe_dump({name: words or True for name, *words in words_of})


TRL_SFT = yaml_of(
    "--model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name trl-lib/Capybara --learning_rate 2e-5 --num_train_epochs 1 "
    "--packing --bf16 True --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --use_peft --lora_r 32 "
    "--lora_target_modules q_proj k_proj v_proj --output_dir out"
)
GRPO = yaml_of(
    "--model_name_or_path m --dataset_name trl-lib/DeepMath-103K --output_dir out --reward_funcs os.path.basename"
)

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

DATASETS = """{
    "dpo_en_demo": {"file_name": "dpo_en_demo.json", "ranking": true, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "pairs": {"hf_hub_url": "own/pairs", "subset": "en", "columns": {"prompt": "question"}},
    "identity": {"file_name": "identity.json"},
    "chats": {"file_name": "chats.json", "formatting": "sharegpt",
        "columns": {"messages": "conversations"}, "tags": {"role_tag": "from", "content_tag": "value"}},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "books": {"file_name": "books.jsonl", "columns": {"prompt": "content"}},
    "notes": {"file_name": "notes.txt"},
    "drawn": {"file_name": "drawn.json", "num_samples": 500},
    "pictures": {"file_name": "pictures.json", "columns": {"messages": "messages", "images": "images"}},
    "kto_en_demo": {"file_name": "kto_en_demo.json", "columns": {"messages": "messages", "kto_tag": "label"}}
}"""
DEEPSPEED = """{
    "train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {
        "stage": 3, "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": true}}
}"""
# the files that texts here name
FILES = {
    "data/dataset_info.json": DATASETS,
    "ds_z3_offload_config.json": DEEPSPEED,
}


@pytest.fixture
def run_migrate(tmp_path, capsys):
    """Translate a text beside the files that texts here name; return the exit code and what was printed."""
    (tmp_path / "data").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def run(text, options, name):
        path = tmp_path / (name or "run.yaml")
        path.write_text(text)
        return main([str(path), *options]), capsys.readouterr()

    return run


@pytest.fixture
def migrate(run_migrate, tmp_path):
    """Return a function from a text to our configuration and all that was printed."""

    def migrated(text, *options):
        code, shown = run_migrate(text, options, "")
        assert code == 0, shown.err
        shown = shown.out.replace(str(tmp_path), "FOLDER")
        return check(tomllib.loads(shown)), shown

    return migrated


@pytest.fixture
def refusal(run_migrate):
    """Return a function from a text to the one line of its refusal, with which nothing is translated."""

    def refused(text, *options, name="", lines=1):
        code, shown = run_migrate(text, options, name)
        assert code == 2 and not shown.out and shown.err.startswith("error: ")
        assert shown.err.count("\n") == lines
        return shown.err

    return refused


KNOWN = "not: Without a counterpart"
PRETRAINING = "model_name_or_path: m\nstage: pt\nfinetuning_type: full\noutput_dir: out\n"
SILENT = TRL_DPO.replace("eval_strategy: steps\n", "")
SMOOTHED = TRL_DPO.replace("beta: 0.05", "label_smoothing: 0.1")
GRPO_TABLE = """rl: grpo
trl: {beta: 0.0, num_generations: 4, max_completion_length: 64, reward_funcs: [os.path.basename]}"""
GRPO_YAML = "model_name_or_path: m\ndataset_name: d\noutput_dir: out\nreward_funcs: [os.path.basename]\n"
GRPO_SET = yaml_of(
    "--model_name_or_path m --dataset_name d --output_dir out --reward_model_name_or_path rm "
    "--reward_funcs os.path.basename --reward_weights 0.5 2 --beta 0.04 --use_bias_correction_kl false --epsilon 0.1 "
    "--epsilon_high 0.28 --loss_type dr_grpo --scale_rewards none --max_completion_length 1024 --temperature 0.9 "
    "--num_generations 4 --num_iterations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 3 "
    "--steps_per_generation 6 --use_vllm --vllm_mode colocate --log_completions"
)
ROLLOUT = yaml_of(
    "--beta 0.1 --generation_batch_size 32 --gradient_accumulation_steps 4 --scale_rewards batch --num_iterations 2"
)
RATIOS = yaml_of("--importance_sampling_level sequence --mask_truncated_completions --delta 4")
MIXTURE = """dataset_mixture:
  datasets:
    - id: own/pairs
      config: en
      split: train_prefs
      columns: [chosen, rejected]
      weight: 0.5
    - {path: other/pairs, name: de, fraction: 0.25}
  test_split_size: 0.1
  seed: 0
"""
MORE_LOSSES = "[sigmoid, bco_pair]\nloss_weights: [0.8, 0.2]\nearly_stopping_patience: 3\nuse_rslora: true"
WRONG = LLAMAFACTORY_DPO.replace("template: llama3", "flash_attn: fa9").replace(
    "pref_beta: 0.2", "loss_type: exo_pair"
)
GROWN = "resize_vocab: true\nadd_tokens: <think>,</think>\nadditional_target: lm_head,embed_tokens\n"
GPT_OSS = """
base_model: openai/gpt-oss-20b
model_quantization_config: Mxfp4Config
model_quantization_config_kwargs: {dequantize: true}
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin, axolotl.integrations.kernels.KernelsPlugin]
use_scattermoe: true
quantize_moe_experts: true
experts_implementation: scattermoe
datasets: [{path: a/b, type: chat_template, field_thinking: thinking, template_thinking_key: thinking}]
experimental_skip_move_to_device: true
eot_tokens: ["<|end|>", "<|return|>"]
chat_template: gpt_oss
adapter: lora
lora_r: 8
lora_target_linear: true
lora_target_modules: [q_proj]
sequence_len: 4096
micro_batch_size: 1
num_epochs: 1
learning_rate: 2e-4
output_dir: out
"""
MIXED = "interleave_probs: 0.7,0.3\nmix_strategy: interleave_over\n"
SIZES = "False: the sizes of blocks are always quantised too"
PACKED = "a packed sequence counts as one example there"

SHORT = {
    "base_model": "m",
    "datasets": [{"path": "a"}],
    "max_steps": 3,
    "sequence_len": 64,
}
INLINE = "{{ bos_token }}{% for m in messages %}\n{{ m.content }}</s>{% endfor %}.jinja"
KEPT = f'"data.chat_template" = {json.dumps(INLINE)}'

# What is given, with which options; the settings that come out of it; what is said beside them.
TRANSLATED = {
    "LLaMA-Factory's DPO of all weights": (LLAMAFACTORY_DPO, "--gpus 8", """
"stage" = "dpo"
"model.path" = "meta-llama/Llama-3.1-8B-Instruct"
"model.lora.rank" = 0
"dpo.beta" = 0.2
"dpo.loss_type" = "sigmoid"
"dpo.sft_weight" = 0.5
"batch.examples" = 64
"data.train" = [
    {path = "FOLDER/data/dpo_en_demo.json", columns = {messages = "conversations"}, max_examples = 1000},
    {path = "own/pairs", subset = "en", columns = {instruction = "question"}, max_examples = 1000},
]
"data.chat_template" = "llama3"
"data.eval_fraction" = 0.1
"optimizer.lr" = 5e-06
"optimizer.warmup" = 0.1
"optimizer.betas" = [0.9, 0.999]
"memory.offload_optimizer" = true
"memory.offload_parameters" = false
"run.epochs" = 3
"run.eval_every" = 500
"run.export" = true
""", "per_device_train_batch_size 1 x gradient_accumulation_steps 8 x 8 GPU",
        "a mean over the tokens of the whole step"),
    "LLaMA-Factory's LoRA": (LLAMAFACTORY_LORA, "", """
"model.lora.rank" = 16
"model.lora.alpha" = 32
"model.lora.targets" = ["q_proj", "v_proj"]
"model.dtype" = "bfloat16"
"data.train" = "FOLDER/data/identity.json"
"data.train_on" = "last"
"data.eval" = {path = "FOLDER/data/chats.json", columns = {messages = "conversations"}}
"run.steps" = 300
"run.epochs" = 0
"run.save_every" = 0
"run.eval_every" = 50
"optimizer.schedule" = "linear"
"optimizer.warmup" = 0
"optimizer.moments" = "8bit"
""", "embeddings keep 32 bits there", "save_strategy = epoch: set run.save_every",
        "fp16: float16 is not supported"),
    "LLaMA-Factory's KTO, whose beta has its own section": (LLAMAFACTORY_KTO, "", """
"stage" = "kto"
"kto.beta" = 0.1
"kto.desirable_weight" = 1.5
"batch.examples" = 8
"model.lora.rank" = 8
"model.lora.targets" = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""),
    "a table of settings, and data that nothing describes": (
        LLAMAFACTORY_LORA.replace("identity", "nowhere\nrope_scaling: {rope_type: yarn, factor: 4.0}"), "",
        """
"model.rope.type" = "yarn"
"model.rope.factor" = 4
"data.train" = "nowhere"
""",
        "nowhere: dataset_info.json does not describe it, so write its path"),
    "TRL's DPO": (TRL_DPO, "--stage dpo", """
"data.train" = {path = "trl-lib/ultrafeedback_binarized", split = "train"}
"data.eval" = {path = "trl-lib/ultrafeedback_binarized", split = "test"}
"data.truncation" = "keep_end"
"dpo.beta" = 0.05
"dpo.loss_type" = "sigmoid"
"run.eval_every" = 50
"optimizer.min_lr" = 0.1
"optimizer.warmup" = 20
"optimizer.betas" = [0.9, 0.95]
""", KNOWN, "not: balance loss"),
    "TRL's DPO of experts": (
        TRL_DPO.replace("Qwen2.5-0.5B-Instruct", "Qwen3-30B-A3B"), "--stage dpo", "",
        "balance loss of experts, by config.json's router_aux_loss_coef"),
    "several losses": (TRL_DPO.replace("[sigmoid]", MORE_LOSSES), "--stage dpo", """
"dpo.loss_type" = ["sigmoid", "bco_pair"]
"dpo.loss_weights" = [0.8, 0.2]
"run.patience" = 3
"model.lora.rslora" = true
"""),
    "a weight of one loss": (TRL_DPO.replace("[sigmoid]", "[ipo]\nloss_weights: [1.0]"), "--stage dpo",
                             '"dpo.loss_weights" = [1.0]'),
    "TRL's SFT": (TRL_SFT, "--stage sft", """
"stage" = "sft"
"optimizer.lr" = 2e-05
"batch.examples" = 8
"model.lora.rank" = 32
"model.lora.targets" = ["q_proj", "k_proj", "v_proj"]
"data.max_length" = 1024
"run.epochs" = 1
""", 'data.train_on = "all"  # assistant_only_loss: without it TRL trains every token'),
    "TRL's loss of completions": (f"{TRL_SFT}completion_only_loss: true\n", "--stage sft",
                                  '"data.train_on" = "assistant"'),
    "axolotl": (AXOLOTL_SFT, "--gpus 8", """
"stage" = "sft"
"parallel.sequence_parallel_size" = 4
"batch.examples" = 16
"model.quantize" = "nf4"
"data.train" = [
    "fozziethebeat/alpaca_messages_2k_test",
    {path = "data/own.jsonl", columns = {messages = "conversation"}},
]
"model.special_tokens" = {pad_token = "<|end_of_text|>"}
"optimizer.lr" = 0.0002
"data.truncation" = "drop"
""", "saves_per_epoch = 1: set run.save_every in steps", f"sample_packing = True: {PACKED}",
        "not: load_in_8bit"),
    "axolotl's IPO": (AXOLOTL_SFT.replace("chat_template: llama3", "rl: ipo"), "",
                      """
"stage" = "dpo"
"dpo.loss_type" = "ipo"
"""),
    "a choice that is not ours": (WRONG, "", "",
        "flash_attn = fa9: model.attention has no such choice, so its default stands"),
    "a setting that is wrong here": (WRONG.replace("pref_loss: sigmoid", ""), "", "",
        "# loss_type: infinite at label_smoothing 0, for which dpo.label_smoothing = 1e-3 stands there"),
    "settings that contradict each other": (
        LLAMAFACTORY_KTO + "early_stopping_steps: 3\n", "", "",
        "\n#   run.patience: only the end of the run is evaluated"),
    "what is dropped is said, without its value": (
        f"{TRL_DPO}push_to_hub: true\nrun_name: mine\nhub_token: hf_secret\nuse_peft: true\nlora_dropout: 0.1\n"
        "torch_compile: false\n", "--stage dpo", '"model.lora.dropout" = 0',
        "# left out: push_to_hub: run.output/export can be uploaded as it is\n",
        "# left out: run_name: run.output names the run\n",
        "# left out: lora_dropout: it does nothing beside disable_dropout\n",
        "left out: hub_token", "not: hf_secret", "not: torch_compile"),
    "what the settings of full training make void": (
        LLAMAFACTORY_KTO.replace(": lora", ": full"), "", "",
        "# left out: lora_target: it does nothing beside finetuning_type\n", "not: lora_rank"),
    "a tracker": (f"{TRL_SFT}report_to: trackio\nproject: mine\n", "--stage sft", """
"run.trackers" = ["tensorboard", "trackio"]
"run.project" = "mine"
"""),
    "axolotl's tracker": (f"{AXOLOTL_SFT}use_mlflow: true\n", "", '"run.trackers" = ["tensorboard", "mlflow"]'),
    "axolotl's gpt-oss": (
        GPT_OSS, "", """
"model.path" = "openai/gpt-oss-20b"
"model.lora.targets" = ["q_proj", "k_proj", "v_proj", "o_proj"]
"data.chat_template" = "tokenizer"
""", "eot_tokens = <|end|>: what ends a turn in the chat template is trained", "not: balance loss",
        "lora_target_linear: every Linear module, as there, and no matrices of experts",
        "left out: model_quantization_config_kwargs.dequantize: MXFP4 weights are read as bfloat16",
        "left out: quantize_moe_experts: NF4", "left out: use_scattermoe", "left out: plugins: the engine has"),
    "axolotl's reward model": (
        AXOLOTL_SFT.replace("type: chat_template", "type: bradley_terry.chat_template").replace(
            "chat_template: llama3", "reward_model: true\nnum_labels: 1\nchat_template: gemma3").replace(
            "NousResearch/Meta-Llama-3-8B", "google/gemma-3-4b-it"), "", """
"stage" = "rm"
"data.chat_template" = "tokenizer"
"data.train" = [
    {path = "fozziethebeat/alpaca_messages_2k_test", columns = {prompt = "input"}},
    {path = "data/own.jsonl", columns = {messages = "conversation"}},
]
""", "chat_template = gemma3: the model's own template is taken", "left out: num_labels"),
    "TRL's GRPO with its own defaults": (GRPO, "--stage grpo", """
"ppo.advantage" = "group"
"ppo.kl_coefficient" = 0
"ppo.epochs" = 1
"ppo.minibatches" = 1
"ppo.answers_per_prompt" = 8
"ppo.max_new_tokens" = 512
"ppo.temperature" = 1
"ppo.loss_aggregation" = "token"
"ppo.clip" = 0.2
"ppo.clip_high" = 0
"ppo.scale_by_std" = true
"ppo.reward" = {"os.path:basename" = 1}
"batch.examples" = 1
"optimizer.lr" = 1e-06
"data.truncation" = "error"
""", KNOWN, "not: kl_estimator", "not: data.max_length"),
    "TRL's GRPO with everything set": (GRPO_SET, "--stage grpo --gpus 8", """
"batch.examples" = 48
"ppo.minibatches" = 2
"ppo.epochs" = 2
"ppo.kl_coefficient" = 0.04
"ppo.kl_in" = "loss"
"ppo.kl_estimator" = "k3"
"ppo.loss_aggregation" = "constant"
"ppo.clip" = 0.1
"ppo.clip_high" = 0.28
"ppo.scale_by_std" = false
"ppo.answers_per_prompt" = 4
"ppo.max_new_tokens" = 1024
"ppo.temperature" = 0.9
"ppo.reward" = {rm = 0.5, "os.path:basename" = 2}
""", "a rollout of 192 answers / num_generations 4"),
    "a rollout by its size": (GRPO + ROLLOUT, "--stage grpo", """
"batch.examples" = 4
"ppo.minibatches" = 1
"ppo.epochs" = 2
"ppo.scale_by_std" = "batch"
"ppo.kl_in" = "loss_with_ratio"
"ppo.kl_estimator" = "k3"
"""),
    **{f"TRL's loss {theirs}": (f"{GRPO}loss_type: {theirs}\n", "--stage grpo", f'"ppo.loss_aggregation" = "{ours}"')
       for theirs, ours in {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}.items()},
    "TRL's ratios": (GRPO + RATIOS, "--stage grpo", """
"ppo.ratio" = "mean"
"ppo.mask_truncated" = true
"ppo.dual_clip" = 4
"ppo.policy_loss" = "clip"
"""),
    "TRL's RLOO": (GRPO, "--stage rloo --gpus 2", """
"ppo.advantage" = "leave_one_out"
"ppo.answers_per_prompt" = 2
"ppo.kl_coefficient" = 0.05
"ppo.kl_in" = "reward"
"ppo.kl_estimator" = "k1"
"ppo.epochs" = 1
"ppo.clip" = 0.2
"ppo.ratio" = "product"
"ppo.loss_aggregation" = "sequence"
"ppo.max_new_tokens" = 512
"batch.examples" = 8
"""),
    "axolotl's GRPO": (AXOLOTL_SFT.replace("chat_template: llama3", GRPO_TABLE), "", """
"stage" = "ppo"
"ppo.advantage" = "group"
"batch.examples" = 2
"ppo.max_new_tokens" = 64
"ppo.reward" = {"os.path:basename" = 1}
"""),
    "a file of GRPO": (GRPO_YAML, "--stage grpo", '"ppo.advantage" = "group"'),
    "a file of RLOO": (GRPO_YAML, "--stage rloo", '"ppo.advantage" = "leave_one_out"'),
    "a list of choices is the one that is not the default": (
        LLAMAFACTORY_KTO.replace("template: llama3", "report_to: [tensorboard, wandb]"), "",
        '"run.wandb" = "ulysses"'),
    "a list of defaults": (LLAMAFACTORY_KTO.replace("template: llama3", "report_to: [tensorboard]"), "",
                           '"run.wandb" = ""'),
    "documents are named by the column of their text": (
        f"{PRETRAINING}dataset: c4_demo, books\n", "",
        """
"stage" = "pt"
"data.train" = ["FOLDER/data/c4_demo.jsonl", {path = "FOLDER/data/books.jsonl", columns = {text = "content"}}]
""",
        f"packing = True: {PACKED}"),
    "the mixture of alignment-handbook": (
        TRL_DPO.replace("dataset_name: trl-lib/ultrafeedback_binarized\n", MIXTURE), "--stage dpo",
        """
"data.eval_fraction" = 0.1
"data.train" = [
    {path = "own/pairs", subset = "en", split = "train_prefs", weight = 0.5},
    {path = "other/pairs", subset = "de", weight = 0.25},
]
"""),
    # an empty norm does not clip; an empty length, which cuts nothing, is refused (below)
    "TRL's empty norm": (f"{TRL_DPO}max_grad_norm: null\n", "--stage dpo", '"gradients.max_norm" = 0'),
    "LLaMA-Factory's empty norm": (f"{LLAMAFACTORY_KTO}max_grad_norm: null\n", "", '"gradients.max_norm" = 0'),
    "axolotl's empty norm": (f"{AXOLOTL_SFT}max_grad_norm:\n", "", '"gradients.max_norm" = 1'),
    "TRL's constant schedule has no warm-up": (
        TRL_DPO.replace(": cosine", ": constant\nwarmup_ratio: 0.1"), "--stage dpo", '"optimizer.warmup" = 0'),
    "axolotl's constant schedule has no warm-up": (
        AXOLOTL_SFT.replace(": cosine", ": constant\nwarmup_ratio: 0.1"), "", '"optimizer.warmup" = 0'),
    "every line of a text is a row": (
        f"{PRETRAINING}packing: false\ndataset: notes,c4_demo\nmax_samples: 100\n", "",
        r"""
"data.train" = [
    {path = "FOLDER/data/notes.txt", separator = "\n", max_examples = 100},
    {path = "FOLDER/data/c4_demo.jsonl", max_examples = 100},
]
""",
        "packing = False: what a document has beyond cutoff_len is trained here"),
    "pairs that are too long are left out": (
        "model_name_or_path: m\ndataset_name: d\noutput_dir: out\npad_token: <pad>\n", "--stage rm",
        '"data.truncation" = "drop"'),
    "axolotl's corpus": ("base_model: m\nsequence_len: 64\nmax_steps: 1\npretraining_dataset: a.txt\n", "",
                         '"data.train" = {path = "a.txt", separator = "\\n"}', "there it is left out"),
    "not: a strategy TRL does not evaluate": (SILENT, "--stage dpo",
                                                 """
"run.eval_every" = 0
"data.eval" = []
""", KNOWN),
    "with one it does": (f"{SILENT}evaluation_strategy: steps\n", "--stage dpo",
                         """
"run.eval_every" = 50
"data.eval" = {path = "trl-lib/ultrafeedback_binarized", split = "test"}
"""),
    "a share of all steps": (
        f"{TRL_DPO}save_steps: 0.5\n", "--stage dpo", '"run.save_every" = 0',
        "save_steps = 0.5: a share of all steps there; set run.save_every in steps"),
    "label smoothing that TRL does not read": (SMOOTHED, "--stage dpo", '"dpo.label_smoothing" = 0'),
    "label smoothing that TRL reads": (SMOOTHED.replace("[sigmoid]", "[robust]"), "--stage dpo",
                                       '"dpo.label_smoothing" = 0.1'),
    "what a loss does not read there either": (
        LLAMAFACTORY_DPO.replace("sigmoid  #", "orpo  #") + "simpo_gamma: 0.7\nref_model: other\n", "", """
"dpo.loss_type" = "orpo"
"dpo.simpo_gamma" = 0.5
"dpo.reference" = "cached"
""", "# left out: simpo_gamma: it does nothing beside pref_loss\n",
        "# left out: ref_model: it does nothing beside pref_loss\n"),
    "what a divergence does not read there either": (
        f"{TRL_DPO}f_alpha_divergence_coef: 1.0\n", "--stage dpo", '"dpo.f_alpha" = 0.5',
        "# left out: f_alpha_divergence_coef: it does nothing beside f_divergence_type\n"),
    "what the losses do read": (
        LLAMAFACTORY_DPO.replace("sigmoid  #", "simpo  #") + "simpo_gamma: 0.7\n", "", '"dpo.simpo_gamma" = 0.7'),
    "what the divergence does read": (
        f"{TRL_DPO}f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.7\n", "--stage dpo",
        '"dpo.f_alpha" = 0.7'),
    "new tokens, and matrices that are trained whole": (LLAMAFACTORY_KTO + GROWN, "", """
"model.add_tokens" = ["<think>", "</think>"]
"model.lora.train" = ["embeddings"]
""", KNOWN),
    "new tokens without adapters": (
        LLAMAFACTORY_KTO.replace("type: lora", "type: full") + GROWN, "", '"model.lora.train" = []'),
    "sources by probability": (
        LLAMAFACTORY_KTO.replace(": kto_", ": one,kto_") + MIXED, "", """
"data.stopping_strategy" = "all_exhausted"
"data.train" = [
    {path = "one", probability = 0.7},
    {path = "FOLDER/data/kto_en_demo.json", probability = 0.3},
]
"""),
    "variables of the template": (
        f"{LLAMAFACTORY_KTO}chat_template_kwargs: {{reasoning_effort: low}}\nenable_thinking: false\n", "",
        '"data.chat_template_kwargs" = {reasoning_effort = "low", enable_thinking = false}'),
    "the text of a template": (json.dumps(SHORT | {"chat_template": INLINE}), "", KEPT),
    "the text of a template beside its name": (
        json.dumps(SHORT | {"chat_template": "jinja", "chat_template_jinja": INLINE}), "", KEPT),
    **{f"checkpoints that {system} keeps": (text, options, f'"run.keep" = {kept}', "run.keep = ")
       for system, text, options, kept in (
           ("LLaMA-Factory", LLAMAFACTORY_KTO, "", 0), ("TRL", TRL_SFT, "--stage sft", 0),
           ("axolotl", AXOLOTL_SFT, "", 4))},
    "checkpoints that a file keeps": (f"{TRL_SFT}save_total_limit: 3\n", "--stage sft", '"run.keep" = 3'),
    "a base of 4 bits as TRL quantises it": (
        f"{TRL_SFT}load_in_4bit: true\n", "--stage sft", '"model.quantize" = "nf4"', f"use_bnb_nested_quant = {SIZES}"),
    "TRL's base that is not quantised": (TRL_SFT, "--stage sft", '"model.quantize" = "none"', "not: nested_quant"),
    "TRL's sizes of blocks, quantised": (
        f"{TRL_SFT}load_in_4bit: true\nuse_bnb_nested_quant: true\n", "--stage sft", "", f"not: {SIZES}"),
    "LLaMA-Factory's sizes of blocks": (
        f"{LLAMAFACTORY_KTO}quantization_bit: 4\ndouble_quantization: false\n", "", '"model.quantize" = "nf4"',
        f"double_quantization = {SIZES}"),
    "axolotl's sizes of blocks": (
        f"{AXOLOTL_SFT}bnb_config_kwargs: {{bnb_4bit_use_double_quant: false, bnb_4bit_quant_type: nf4}}\n", "", "",
        f"bnb_config_kwargs.bnb_4bit_use_double_quant = {SIZES}"),
    "DeepSpeed's settings inside of the file": (
        f"{AXOLOTL_SFT}deepspeed: {{gradient_clipping: 0.3, zero_optimization: {{offload_param: {{device: cpu}}}}}}\n",
        "", """
"gradients.max_norm" = 0.3
"memory.offload_parameters" = true
""", "not: no such file"),
    "documents, which are cut into pieces": (
        f"{PRETRAINING}dataset: c4_demo\ncutoff_len: 64\n", "", '"data.max_length" = 64', "not: loses its end"),
    "the best weights, which the export does not hold": (
        f"{LLAMAFACTORY_KTO}load_best_model_at_end: true\n", "", "",
        "load_best_model_at_end = True: run.output/export holds the last weights"),
    "the head of a reward model, which is trained beside adapters": (
        "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_modules_to_save: [score]\n", "--stage rm",
        '''
"model.lora.rank" = 16
"model.lora.train" = []
'''),
    "KTO's reference, which is not computed before": (
        f"{LLAMAFACTORY_KTO}precompute_ref_log_probs: true\n", "", '"kto.reference" = "live"', KNOWN),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSLATED)
def test_translation(migrate, case):
    """A remark `not: X` says that X is not spoken of."""
    text, options, settings, *remarks = TRANSLATED[case]
    config, shown = migrate(text, *options.split())
    wanted = tomllib.loads(settings)
    found = {key: attrgetter(key)(config) for key in wanted}
    assert json.loads(json.dumps(found)) == wanted
    for remark in remarks:
        assert (remark.removeprefix("not: ") in shown) != remark.startswith("not: ")


# a model that its name tells, or a folder with the model_type of its config.json, and the matrices of its adapters
LINEAR = """
Qwen/Qwen3-8B => ATTENTION gate_proj up_proj down_proj
Qwen/Qwen3.5-9B => ATTENTION gate_proj up_proj down_proj
Qwen/Qwen2.5-7B-Instruct => ATTENTION gate_proj up_proj down_proj
Qwen/Qwen3-30B-A3B => ATTENTION
openai/gpt-oss-120b => ATTENTION
mistralai/Mixtral-8x7B-v0.1 => ATTENTION
Qwen/Qwen3-Next-80B-A3B-Instruct => ATTENTION in_proj_qkvz in_proj_ba out_proj
Qwen/Qwen3.5-35B-A3B => ATTENTION in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj
own:qwen3_5_moe => ATTENTION in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj
own:gpt_oss => ATTENTION
moe:llama => ATTENTION gate_proj up_proj down_proj
""".replace("ATTENTION", "q_proj k_proj v_proj o_proj")


@pytest.mark.parametrize("model, targets", rows_of(LINEAR))
@pytest.mark.parametrize(
    "text",
    [
        "base_model: M\nadapter: lora\nlora_r: 8\nlora_target_linear: true\ndatasets: [{path: d}]\n",
        "model_name_or_path: M\nstage: sft\nfinetuning_type: lora\nlora_target: all\ndataset: d\n",
        "model_name_or_path: M\nstage: sft\ndataset: d\ntemplate: chatml\n",
        "model_name_or_path: M\nstage: sft\nuse_peft: true\nlora_target_modules: all-linear\ndataset_name: d\n",
    ],
)  # fmt: skip
def test_all_linear_modules_are_no_matrices_of_experts(migrate, tmp_path, text, model, targets):
    """What a model is says its config.json, and otherwise its name."""
    folder, of, kind = model.partition(":")
    if of:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": kind}))
    config, _ = migrate(text.replace("M\n", f"{folder}\n") + "max_steps: 3\n")
    assert config.model.lora.rank and config.model.lora.targets == targets.split()


def test_aliases_that_save_writing_are_read(migrate):
    text = "defaults: &it {path: a/b, type: chat_template}\ndatasets: [*it, {<<: *it, split: test}]\n"
    with pytest.raises(AssertionError, match="defaults.path = a/b has no counterpart"):
        migrate(f"base_model: m\nmax_steps: 3\n{text}")
    one = "base_model: &m m\nhub_model_id: *m\nmax_steps: 3\ndatasets: [{path: a/b}]\n"
    assert migrate(one)[0].model.path == "m"


@pytest.mark.parametrize("gpus", ["0", "-8"])
def test_a_number_of_gpus_that_is_none_is_refused(run_migrate, capsys, gpus):
    with pytest.raises(SystemExit) as ended:
        run_migrate(TRL_SFT, ["--stage", "sft", "--gpus", gpus], "")
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert "--gpus must be at least 1" in said.err


def test_json_with_tabs_is_read(tmp_path):
    (tmp_path / "run.json").write_text('{\n\t"base_model": "m"\n}')
    assert read_settings(tmp_path / "run.json") == {"base_model": "m"}


LORA_OF = {
    "trl": "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nper_device_train_batch_size: 8\n",
    "llamafactory": "model_name_or_path: m\ndataset: d\ntemplate: llama3\nfinetuning_type: lora\ndo_train: true\n",
    "axolotl": "base_model: m\ndatasets: [{path: d, type: chat_template}]\nsequence_len: 512\nadapter: lora\n"
    "lora_r: 8\nmicro_batch_size: 1\nlearning_rate: 1e-6\n",
}


DROPOUT = """
trl => stage: dpo => 0
trl => stage: kto => 0
trl => stage: rm => 0
trl => stage: dpo; disable_dropout: true => 0
trl => stage: dpo; disable_dropout: false => 0.1
trl => stage: kto; disable_dropout: false => 0.1
trl => stage: rm; disable_dropout: false => 0.1
trl => stage: sft => 0.1
trl => stage: grpo; reward_funcs: a.b => 0.1
trl => stage: grpo; reward_funcs: a.b; disable_dropout: true => 0
llamafactory => stage: dpo => 0
llamafactory => stage: kto => 0
llamafactory => stage: sft => 0.1
llamafactory => stage: rm => 0.1
llamafactory => stage: pt => 0.1
axolotl => rl: dpo => 0
axolotl => rl: ipo => 0
axolotl => rl: orpo => 0
axolotl => rl: simpo => 0
axolotl => rl: kto => 0
"""


@pytest.mark.parametrize("system, method, dropout", rows_of(DROPOUT))
def test_dropout_is_off_where_their_trainer_switches_it_off(tmp_path, system, method, dropout):
    """TRL's preference trainers, and those made from them, unless the file says `disable_dropout: false`."""
    file, method = tmp_path / "run.yaml", method.replace("; ", "\n")
    file.write_text(f"{LORA_OF[system]}max_steps: 5\nlora_dropout: 0.1\n{method}\n")
    found = tomllib.loads(translate(read_settings(file), file, 1))
    assert found["model"]["lora"].get("dropout", 0.0) == float(dropout), found


def test_a_redirected_translation_holds_nothing_else(tmp_path):
    """Also where a library would warn; none of the large ones is imported."""
    (tmp_path / "run.yaml").write_text(LLAMAFACTORY_KTO)
    loud = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    code = (
        "import sys; from ulysses.cli import main; sys.argv[1:] = ['migrate', 'run.yaml']; main(); "
        "print({*sys.modules} & {'torch', 'numpy', 'transformers', 'deepspeed'}, file=sys.stderr)"
    )
    line, env = [sys.executable, "-c", code], loud | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert tomllib.loads(done.stdout)["stage"] == "kto" and done.stderr.endswith("set()\n")


def test_what_cannot_be_read_is_one_sentence(refusal):
    for name, text, sentence in (
        ("a.yaml", TRL_DPO, "no stage is named; add --stage"),
        ("b.yaml", "- 1", "this file holds no settings"),
        (
            "c.sh",
            "trl sft --beta 1",
            "of a command, write each --name value as a line name: value",
        ),
        ("run.toml", 'stage = "sft"', "give the YAML or JSON that the trainer reads"),
    ):
        assert sentence in refusal(text, name=name)
    assert "whose settings these are cannot be told" in refusal("seed: 3", "--stage", "sft")


REFUSED = {
    # the algorithm
    "rl: gdpo": "line 2: rl = gdpo has no counterpart here; stage has no such choice; see",
    "rl: ebft": "line 2: rl = ebft",
    "stage: gspo": "line 2: stage = gspo",
    "base_model: m\ndiffusion: {noise_schedule: cosine}": "line 3: diffusion.noise_schedule = cosine has no",
    "base_model: m\nprocess_reward_model: true": "line 3: process_reward_model = True",
    "kd_trainer: true": "line 2: kd_trainer",
    "stage: sft\ndo_predict: true": "line 3: do_predict = True has no counterpart here; this file predicts",
    "stage: sft\ndo_train: false": "line 3: do_train = False",
    "stage: ppo\ntemplate: llama3": "ppo_target = 6.0",
    "stage: ppo\nnum_generations: 8": "line 3: num_generations = 8 has no counterpart here; add --stage grpo",
    # which weights are trained
    "finetuning_type: oft": "line 2: finetuning_type = oft has no counterpart here; train all weights",
    "finetuning_type: freeze": "line 2: finetuning_type = freeze",
    "adapter: llama-adapter": "line 2: adapter = llama-adapter",
    "use_dora: true": "line 2: use_dora = True has no counterpart here; use plain LoRA",
    "freeze_trainable_layers: 2": "line 2: freeze_trainable_layers = 2",
    "unfrozen_parameters: [lm_head]": "line 2: unfrozen_parameters = lm_head",
    "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]": "line 2: plugins = ",
    # the optimizer and its rate
    "optim: adafactor": "line 2: optim = adafactor has no counterpart here; AdamW",
    "lr_scheduler_type: polynomial": "line 2: lr_scheduler_type = polynomial has no counterpart here; optimizer.",
    # the data and the loss
    "default_system: Be brief.": "line 2: default_system = Be brief.",
    "max_prompt_length: 512": "line 2: max_prompt_length = 512",
    "max_length: null": "line 2: max_length = None has no counterpart here; nothing is cut there",
    "stage: grpo\nnum_generations: 1\nshuffle_dataset: false": "line 4: shuffle_dataset = False",
    "stage: dpo\nsync_ref_model: true": "line 3: sync_ref_model = True has no counterpart here; the reference stays",
    "stage: dpo\npref_loss: kto_pair": "line 3: pref_loss = kto_pair",
    "stage: grpo\nloss_type: cispo": "line 3: loss_type = cispo has no counterpart here; ppo.loss_aggregation has no "
    "such choice; for cispo set ppo.policy_loss",
    "stage: grpo\ntop_entropy_quantile: 0.5": "line 3: top_entropy_quantile = 0.5",
    "stage: grpo\nnum_generations: 3": "num_generations 3; --gpus N says",
    "stage: rloo\nnormalize_advantages: true": "line 3: normalize_advantages = True",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_what_would_train_something_else_is_refused_with_its_line(lines, refusal):
    stage = [] if "stage:" in lines or "rl:" in lines else ["--stage", "sft"]
    text = f"# use_dora: true, max_prompt_length: 9\n{lines}\n"
    assert REFUSED[lines] in refusal(text, *stage)


def test_all_that_is_refused_is_named_at_once(refusal):
    error = refusal("stage: dpo\nuse_dora: true\nsync_ref_model: true\n", lines=4)
    for said in ("2 settings are wrong", "line 2: use_dora", "line 3: sync_ref_model"):
        assert said in error


def test_no_key_is_shown(migrate, refusal):
    key = "0123456789abcdef0123456789abcdef01234567"
    given = f"wandb_api_key: {key}\nheaders: 'Authorization: Bearer abc.def'\nother: wandb_v1_AbCdEf_0\n"
    error = refusal(f"stage: dpo\n{given}", lines=5)
    assert "line 2: wandb_api_key = ***" in error
    assert not any(secret in error for secret in (key, "abc.def", "AbCdEf"))
    given = yaml.safe_load(LLAMAFACTORY_KTO) | {
        "model_revision": key,
        "wandb_project": f"Bearer {key}",
    }
    config, shown = migrate(json.dumps(given))
    assert config.model.revision == key and shown.count(key) == 1  # which is no secret


def test_switches_that_are_off_and_values_that_change_nothing_are_not_refused(migrate):
    text = """finetuning_type: full\ndo_train: true\ndo_predict: true\nuse_dora: false\nuse_galore: false
roles_to_train: [assistant, gpt]\noptim: adamw_torch\nsync_ref_model: false\nnew_special_tokens: null
save_strategy: epoch"""
    config, shown = migrate(LLAMAFACTORY_KTO.replace("finetuning_type: lora", text))
    assert config.model.lora.rank == 0 and shown.count("\n#   ") == 1
    assert "save_strategy = epoch: set run.save_every" in shown


@pytest.mark.parametrize(
    "end", ["\n", "\r", "\v", "\f", "\x1b", "\x85", "\u2028", "\\", '"', '"""\n', "'''\n"]
)
def test_nothing_breaks_out_of_a_comment_or_a_string(migrate, end):
    evil = f"x{end}run.resume_anyway = true{end}#{end}"
    given = yaml.safe_load(LLAMAFACTORY_KTO) | {
        "save_strategy": evil, "wandb_project": evil,
        "special_tokens": {evil.replace(".", ""): "b"}, "flash_attn": evil,
    }  # fmt: skip
    config, shown = migrate(json.dumps(given))
    assert not config.run.resume_anyway and config.run.wandb == evil
    assert all(
        line.startswith("#   ") for line in shown[shown.index("# Without") :].splitlines()[1:]
    )


@pytest.mark.parametrize("end", ["\n", "\r", "\0", "\x1b", "\u2028", '"""\n'])
def test_what_would_break_out_is_refused_without_a_translation(end, refusal):
    evil, given = f"x{end}run.resume_anyway = true{end}#{end}", yaml.safe_load(LLAMAFACTORY_KTO)
    for more in {"unknown_to_all": evil}, {f"unknown{evil}": 1}, {"chat_template": evil}:
        refusal(json.dumps(given | more), name="run.json")
    if end == "\0":  # which no setting holds
        assert "holds a NUL character" in refusal(json.dumps(given | {"wandb_project": evil}))


@pytest.mark.parametrize("inside", [False, True])
def test_a_deepspeed_file_with_a_schedule_or_optimizer_of_its_own(refusal, tmp_path, inside):
    own = '{"optimizer": {"type": "Lamb"}, "scheduler": {"type": "WarmupLR", "params": {}}}'
    (tmp_path / "own.json").write_text(own)
    named = own if inside else "own.json"
    said = refusal(f"{TRL_DPO}deepspeed: {named}\n", "--stage", "dpo", lines=4)
    assert "optimizer.type = Lamb" in said and "it replaces lr_scheduler_type there" in said


UNKNOWN = {
    "unknown_to_all: 1": "unknown_to_all = 1 has no counterpart here; this setting is not",
    "unknown_to_all: false": "unknown_to_all = False",
    "dataset: pictures": "images = images has no counterpart here; only text",
    "dataset: drawn": "num_samples = 500 has no counterpart here; rows are drawn there",
    "template: mistral": "take it out to use the tokenizer's own",
    "chat_template: messages": "or name a .jinja file",
    "datasets: [{path: a, chat_template: llama3}, {path: b}]": "one template writes all data sets here",
    "stage: dpo\ngamma_beta_ratio: 0.5": "write loss_type = simpo and simpo_gamma",
    "dataset_mixer: {a: 1.0}": "write it as dataset_mixture, or as dataset_name",
    "train_dataset: a.yaml": "train_dataset is a setting of LLaMA-Factory's version 1, whose files are not translated",
    "new_special_tokens: <tool>": "none of which is special",
    "finetuning_type: lora\nadditional_target: [embed_tokens]": "lm_head are trained together",
    "interleave_probs: [1.0]": "mix_strategy is interleave_under or interleave_over beside it",
    "eot_tokens: ['<|im_end|>', '</mine>']": "eot_tokens = </mine> has no counterpart here; write it into a .jinja",
    "chat_template: llama3\neot_tokens: ['<|im_end|>']": "this template ends turns otherwise",
    "chat_template: metharme": "data.chat_template has no such choice; take it out",
    "model_quantization_config_kwargs: {dequantize: false}": "weights are trained in bfloat16; set it to true",
    "model_quantization_config: AwqConfig": "export a model with this configuration first",
    "mix_strategy: interleave_under": "give interleave_probs too",
    "optim: lion_8bit": 'optimizer.moments = "8bit" makes its state small',
    "disable_shuffling: true": "every epoch is shuffled here",
    "learning_rate: .nan": "optimizer.lr is nan, which is not a finite number",
    "train_type: lora": "train_type is a setting of ms-swift, whose files are not translated",
    "use_remove_padding: true\ntrainer: {}": "use_remove_padding is a setting of verl, whose files are not translated",
    "datasets: [{path: a/b, type: alpaca}]": "type = alpaca has no counterpart here; it writes",
    "datasets: [{path: a/b, split: 'train[:9%]'}]": "write max_examples for a part of a split",
    "dataset: []": "this file names no training data, so it does not train",
    "finetuning_type: lora\nlora_target: q_a_proj": "model.lora.targets is 'q_a_proj'",
    "reward_funcs: accuracy_reward": "it is TRL's own function, so write module.function",
    "per_device_train_batch_size: [1, 2]": "it cannot be read, or holds a value of a wrong kind: ",
    "datasets: 5": "it cannot be read, or holds a value of a wrong kind: ",
    "1: 2": "1 = 2",
    "- a: [": "expected",
    "loop: &loop [1, *loop]": "it cannot be read, or holds a value of a wrong kind: maximum recursion",
}  # fmt: skip


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_not_known_is_refused(text, refusal):
    base = "finetuning_type: full\nstage: sft\ndataset: identity\n"
    assert UNKNOWN[text] in refusal(f"{base}{text}\n")
