"""Mistakes of real users: each is answered by one sentence that says what to change, before processes meet."""

import pytest

from tests import ROOT, rows_of
from tests.e2e.launch import EXPERTS, tiny
from tests.stage_case import STAGE_CASES
from tests.tiny_tokenizer import write_rows
from ulysses.check.preflight import prepare
from ulysses.config.command_line import check, parse_command_line
from ulysses.config.section import ConfigError
from ulysses.run.build import open_data
from ulysses.run.dry_run import dry_run, inspect

BASE = "--stage dpo --model.path m --run.steps 3"

# What is typed and what the sentence holds. BASE stands for the line above; DEMO is a run of DPO that could start, KTO,
# SFT and PPO are others; PLACE is a folder of wrong files.
MISTAKES = r"""
 => there is no configuration; give one with --config FILE.toml
base.toml => write --config base.toml
recipe.yaml => `ulysses migrate recipe.yaml` translates
--config llama3_lora_dpo.yaml => `ulysses migrate llama3_lora_dpo.yaml` translates
--config PLACE/none.toml => --config: there is no PLACE/none.toml; correct the path
--config PLACE => Is a directory
--config PLACE/empty.toml => empty.toml is empty; give one with --config FILE.toml
--config PLACE/quotes.toml => quotes.toml cannot be read as one table of settings:
--config PLACE/latin1.toml => latin1.toml cannot be read as one table of settings: 'utf-8' codec
--config PLACE/sections.toml => optimiser.lr: unknown; did you mean optimizer.lr?
--config PLACE/optimizer.lr.toml => optimizer.lr is True: this is a number or a text, not true
--config PLACE/run.steps.toml => run.steps is True: this is a number or a text, not true
--config PLACE/model.path.toml => model.path is True: this is a number or a text, not true
BASE --learning_rate 1e-5 => learning_rate: unknown; here it is optimizer.lr
BASE --optimizer.learning_rate 1e-5 => optimizer.learning_rate: unknown; here it is optimizer.lr
BASE --pref_beta 0.1 => pref_beta: unknown; here it is dpo.beta
--stage kto --model.path m --run.steps 3 --pref_beta 0.1 => pref_beta: unknown; here it is dpo.beta or kto.beta
--stage ppo --model.path m --run.steps 3 --ppo.beta 0.1 => ppo.beta: unknown; here it is ppo.kl_coefficient
--stage ppo --model.path m --run.steps 3 --ppo.max_completion_length 9 => here it is ppo.max_new_tokens
BASE --use_dora true => use_dora: not supported; use plain LoRA
BASE --load_in_4bit => load_in_4bit: unknown; here it is model.quantize
BASE --overwrite_cache => overwrite_cache: not needed here
BASE --data.turns separate => data.turns: not needed here (turns are trained in one sequence, and those that
BASE --lr 1e-5 => lr: unknown; did you mean optimizer.lr?
BASE --run.save_evry 5 => run.save_evry: unknown; did you mean run.save_every?
BASE --quux 5 => quux: unknown; ulysses train --help lists the settings
BASE --per_device_train_batch_size 2 \
=> unknown; here it is batch.examples (the whole step: examples per GPU x accumulation steps x GPUs / GPUs that
BASE --batch.micro_batch_size auto => here it is batch.examples (the whole step
BASE --optimizer adamw \
=> optimizer is 'adamw': input should be a valid dictionary or instance of OptimizerSection (a table
BASE --run.seed -1 => run.seed is '-1': input should be greater than or equal to 0
BASE --run.epochs 3 => exactly one of them must be above 0
--stage dpo --model.path m => run.steps is 0 and run.epochs is 0
--model.path m --run.steps 3 => stage is missing: field required (How the model is trained
--stage dpo --run.steps 3 => the model is missing; set model.path
--stage grpo --model.path m --run.steps 3 => stage is 'grpo': input should be 'pt', 'sft'
BASE --model.dtype float16 => model.dtype is 'float16': input should be 'bfloat16' or 'float32'
BASE --model.attention flash_attention_2 => model.attention is 'flash_attention_2': input should be 'auto'
BASE --batch.tokens_per_microbatch 16k => as an integer, or input should be 'auto' (Longest packed
BASE --dpo.beta 0 => dpo.beta is '0': input should be greater than 0
BASE --optimizer.betas [0.9] => optimizer.betas is [0.9], too short: field required (Decay of AdamW's running
BASE --dry-run --gpus 1000000000 => gpus is '1000000000': input should be less than or equal to 1000000 (With
--stage sft --run.steps 3 --data.train PLACE/chats.jsonl --model.path /no/such/model \
=> model.path is '/no/such/model': there is no folder /no/such/model, and no id of the hub is like that; correct
SFT --data.train PLACE/empty.jsonl => l: read 2 rows, kept 0 examples, dropped 2 rows; dropped, empty answer: 2
SFT --data.eval PLACE/chats.jsonl --data.max_length 9 --model.config.max_position_embeddings 9 \
    --run.samples ["abcdefghijklmnop"] => run.samples: the model's window of 9 tokens is too short for 'abc
BASE --memory.offload checkpoints => it has gone, because "auto" moves as much as is needed; use "auto"
BASE --run.steps many => run.steps is 'many'
BASE --model.arch llama3-8b => model.path and model.arch are both set; set only one of them
--stage sft --run.steps 3 --model.init random --model.arch llama9 --data.train PLACE/chats.jsonl \
=> model.arch is 'llama9' but must be one of
BASE --optimizer.betas [0.9,1.5] => optimizer.betas is
BASE --optimizer.weight_decay inf => optimizer.weight_decay is 'inf': input should be a finite number
BASE --inspect 0 => inspect is '0': input should be greater than 0
BASE --adjust-lr half => adjust_lr is 'half': input should be a valid number
BASE --adjust-lr inf => adjust_lr is 'inf': input should be a finite number
BASE --data.eval_fraction 0.1 --data.eval x.jsonl => data.eval names held-out data; remove one of them
BASE --data.eval_fraction 1 => data.eval_fraction is '1': input should be less than 1
BASE --run.patience 2 => run.patience: only the end of the run is evaluated
BASE --gpus 8 => describe a machine to plan for; add --dry-run or leave them out
BASE --run.overwrite true => run.overwrite: not supported; a run deletes nothing that it finds; choose another
BASE --data.train --run.save_last => --data.train needs a value
BASE --deepspeed zero3.json => deepspeed is 'zero3.json': input should be a valid dictionary
BASE --deepspeed.train_batch_size 8 => deepspeed.train_batch_size: unknown; here it is batch.examples
DEMO --deepspeed.zero_optimization.zero_hpz_partition_size 2 \
=> zero_optimization.zero_hpz_partition_size is owned by the engine and cannot be set there; use nothing:
BASE --deepspeed.comms_loger.enabled true => deepspeed.comms_loger.enabled: unknown; ulysses train --help lists
BASE --deepspeed.zero_optimization 3 => deepspeed.zero_optimization is '3': input should be a valid dictionary
DEMO --deepspeed.zero_optimization.overlap_com true => overlap_com: Extra inputs are not permitted
DEMO --deepspeed.zero_optimization.sub_group_size -1 => sub_group_size: Input should be greater than or equal
DEMO --parallel.sequence_parallel_size 3 => is 3 but must divide the 8 processes; set it to one of [1, 2, 4, 8]
DEMO --dpo.loss_type kto_pair => discopop; use kto_loss, or stage kto
DEMO --dpo.loss_type rpo => here it is 'sigmoid' and the negative log-likelihood of the chosen answers, dpo.sft_weight
DEMO --dpo.loss_type cdpo => here it is 'sigmoid' with label_smoothing > 0
DEMO --dpo.loss_type exo_pair => infinite at label_smoothing 0
DEMO --dpo.loss_type ipo --dpo.f_divergence js => f_divergence is 'js' but loss_type 'ipo' has none
DEMO --dpo.f_divergence alpha --dpo.f_alpha 1 => f_alpha is 1
KTO --batch.examples 1 => batch.examples is 1 but kto's baseline pairs each example with another
DEMO --dpo.reference sometimes => dpo.reference is 'sometimes' but must be "cached", "live" or a model
KTO --kto.reference cached => kto.reference is 'cached' but must be "live" or a model's folder or hub id
KTO --kto.desirable_weight 0 --kto.undesirable_weight 0 => nothing would be trained
SFT --sft.loss_type dft --sft.label_smoothing 0.1 => sft.loss_type "dft" has none
SFT --kto.beta 0.2 => kto.beta: stage 'sft' reads no settings of kto; remove them, or set stage = 'kto'
SFT --run.eval_every 5 => run.eval_every: there is nothing to evaluate; set data.eval
SFT --stage rm --run.samples 2 => run.samples: stage 'rm' answers no prompts; remove it
DEMO --dpo.simpo_gamma 2 => dpo.simpo_gamma: dpo.loss_type and dpo.f_divergence ask for nothing that reads it
DEMO --dpo.loss_type ["hinge","aot"] --dpo.discopop_tau 0.1 => dpo.discopop_tau: dpo.loss_type and dpo.f_div
DEMO --dpo.loss_type orpo --dpo.reference live => dpo.reference: dpo.loss_type and dpo.f_divergence ask for
DEMO --dpo.f_divergence js --dpo.f_alpha 0.3 => dpo.f_alpha: dpo.loss_type and dpo.f_divergence ask for
DEMO --data.train_on all => data.train_on: stage 'dpo' trains the last answer only
--stage pt --model.path m --run.steps 3 --data.truncation drop => data.truncation: stage 'pt' trains every
--stage sft --run.steps 3 --model.init random --data.train PLACE/chats.jsonl --model.arch llama-3-8b \
=> nearest: llama3-8b
SFT --model.config.model_type mixtral => model_type 'mixtral'
SFT --model.config.mlp_bias true => mlp_bias
SFT --model.config.num_hiden_layers 2 \
=> model.config: num_hiden_layers is no field of a llama model here, did you mean num_hidden_layers; correct or remove
SFT --model.config.num_experts 4 => num_experts is no field of a llama model here
SFT --model.lora.alpha 8 --model.lora.merge true \
=> model.lora.alpha, model.lora.merge: model.lora.rank is 0, which trains all weights
SFT --model.lora.rank 65536 => model.lora.rank: is 65536 but the model's matrices are
SFT --optimizer.lr 1e5 => optimizer.lr is 100000, after which nothing of a model is left
SFT --model.config.model_type mistral --model.config.sliding_window null --model.config.attention_bias true \
=> attention_bias
SFT --model.config.model_type qwen3 --model.config.use_sliding_window true => use_sliding_window
RM --model.config.model_type granite => no class for reward models of model_type 'granite'
SFT --model.config.model_type olmo3 --model.config.layer_types ["linear","linear","full_attention"] \
=> layer_types of linear but olmo3 has layers of
SFT --model.config.model_type olmo3 --model.config.sliding_window 0 => sliding_window = 0 but it must be a whole
SFT --model.config.model_type olmo3 --model.config.layer_types ["full_attention"] \
=> layer_types = ['full_attention'] but it must be a list of str with an entry for each of num_hidden_layers
SFT --model.config.model_type smollm3 --model.config.no_rope_layers [1] => no_rope_layers = [1] but it must be
SFT --model.config.model_type smollm3 --model.config.no_rope_layers yes => no_rope_layers = 'yes' but it must be
SFT --model.config.model_type olmo3 --model.config.rope_parameters {"full_attention":3} \
=> where each kind of layers must have a table
SFT --model.config.model_type gemma3_text => hidden_act = 'silu'
SFT --model.config.model_type gemma3_text --model.config.hidden_act null --model.config.final_logit_softcapping 30 \
=> final_logit_softcapping = 30
SFT --model.config.model_type granite --model.config.residual_multiplier x => residual_multiplier = 'x' but it
SFT --model.config.model_type gemma2 => model_type 'gemma2' but only
SFT --model.config.model_type gemma3_text --model.config.rope_parameters \
{"full_attention":{"rope_theta":1e4},"sliding_attention":{"rope_type":"yarn","rope_theta":1e4}} \
=> local_rope_type = 'yarn'
SFT --model.config.hidden_act gelu => hidden_act = 'gelu'
SFT --model.config.quantization_config {"bits":4} => quantization_config
SFT --model.config.auto_map {"AutoModel":"x.Y"} => auto_map
SFT --model.config.rope_parameters {"rope_theta":1e4,"partial_rotary_factor":0.5} => partial_rotary_factor = 0.5
SFT --model.config.rope_scaling {"rope_type":"llama3","factor":4} => low_freq_factor = None but it must be
SFT --model.router_aux_loss_coefficient 0.01 \
=> model.router_aux_loss_coefficient is 0.01 but a llama model has no experts; remove it
SFT --model.freeze_router true => model.freeze_router is True but a llama model has no experts; remove it
MOE --model.router_aux_loss_coefficient 0.01 --model.freeze_router true \
=> is 0.01 but model.freeze_router is set, which trains no router; set it to 0
MOE --model.router_aux_loss_coefficient 0.01 --model.lora.rank 4 => but model.lora.rank is set, which trains no
MOE --model.lora.rank 4 --model.lora.targets ["q_proj","gate_proj"] \
=> has gate_proj, but experts hold gate_proj and up_proj in one matrix; name both or none
MOE --model.lora.rank 4 --model.lora.dropout 0.1 => model.lora.dropout is 0.1 but adapters of experts have none
MOE --model.lora.rank 4 --model.lora.targets ["q_proj"] --model.quantize nf4 --model.config.hidden_size 36 \
--model.config.moe_intermediate_size 7 \
=> model.quantize is "nf4" but a matrix 56 x 36 is no whole number of blocks of 64; set it to "none"
MOE --model.config.decoder_sparse_step 0 => decoder_sparse_step = 0 but it must be a whole number above 0
MOE --model.config.mlp_only_layers 1 => mlp_only_layers = 1 but it must be a list of the numbers of layers
MOE --model.config.norm_topk_prob 7 => norm_topk_prob = 7 but it must be true or false
MOE --model.config.num_experts_per_tok 9 => num_experts_per_tok is 9 but there are only num_experts = 4
SFT --sft.neftune_alpha 5 => sft.neftune_alpha: not supported; NEFTune's noise is not drawn here; leave it out
SFT --model.config.layer_types ["full_attention","full_attention","sliding_attention"] \
=> layer_types of sliding_attention but llama has layers of full_attention here
SFT --model.config.attention_dropout 0.1 => attention_dropout = 0.1
SFT --model.config.num_key_value_heads 3 => num_key_value_heads = 3
SFT --model.config.vocab_size null => vocab_size = None but it must be a whole number
SFT --model.config.hidden_size wide => hidden_size = 'wide'
SFT --model.config.num_attention_heads 0 => num_attention_heads = 0 but it must be a whole number above 0
SFT --model.config.max_position_embeddings Infinity => max_position_embeddings = inf but it must be a whole
SFT --model.config.max_position_embeddings 8k --model.config.rope_scaling {"type":"yarn","factor":2} \
=> embeddings = '8k'
SFT --model.config.rms_norm_eps [] => rms_norm_eps = [] but it must be a number above 0
SFT --model.rope.factor 2 => rope type 'default' does not use it; remove it, or set model.rope.type
SFT --model.rope.type yarn => rope type 'yarn' needs model.rope.factor; set it
SFT --model.rope.type llama3 --model.rope.factor 2 => rope type 'llama3' needs model.rope.low_freq_factor; set it
SFT --model.rope.type linear --model.rope.factor 2 --model.rope.mscale 1 \
=> model.rope.mscale is set but rope type 'linear'
SFT --model.rope.type yarn --model.rope.factor 0.5 => needs a factor of at least 1
SFT --model.rope.type yarn --model.rope.factor 2 --model.rope.beta_fast 1 => beta_fast above beta_slow
SFT --model.config.rope_scaling {"type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":1} \
=> high_freq_factor above low_freq_factor
SFT --model.config.rope_scaling {"rope_type":"longrope","long_factor":[2]} \
=> rope type 'longrope' but only default, linear, llama3, yarn are computed; set model.rope.type = "yarn"
SFT --model.rope.type longrope => is 'longrope': input should be 'default', 'linear', 'llama3' or 'yarn'
SFT --model.lora.rank 4 --model.lora.targets [] => model.lora.targets is []: list should have at least 1 item
SFT --model.lora.rank 4 --model.lora.targets lm_head => model.lora.targets
SFT --model.lora.rank 4 --model.quantize fp8 => model.quantize is 'fp8': input should be 'none' or 'nf4'
SFT --data.train {"path":""} => data source : path: String should have at least 1 character
SFT --data.train {"path":"x","weight":Infinity} => data source x: weight: Input should be a finite number
DEMO --dpo.loss_type ["sigmoid","sft"] => or set dpo.sft_weight
DEMO --dpo.loss_type ["sigmoid","hinge"] --dpo.loss_weights [1] => names 2 losses and loss_weights has 1
DEMO --gradients.preset pro => is 'pro': input should be 'default' or 'ulysses-pro'
DEMO --gradients.preset steady => no better than clipping; use "default"
DEMO --memory.recompute pair => it has gone, because host memory reaches further; use "block" with memory.offload
DEMO --gradients.policies {"policy":"clip"} => gradients.policies
DEMO --gradients.policies [{"max_norm":1.0}] => policies[0]: policy is None but must be one of stop_on_non_
DEMO --gradients.policies [{"policy":"clip_global_norm","max_nrom":1}] \
=> has no setting 'max_nrom'; it has max_norm, together
DEMO --gradients.policies [{"policy":"skip_spike"},{"policy":"skip_spike","recent":[]}] \
=> gradients.policies[1]: skip_spike has no setting 'recent'; it has sigma, window, warmup
DEMO --gradients.policies [{"policy":"zclip"}] => policy is 'zclip' but must be one of stop_on_non_finite, clip_
DEMO --gradients.policies [{"policy":"clip_global_norm","max_norm":-1}] => max_norm is -1 but must be
DEMO --gradients.policies [{"policy":"skip_spike","window":4,"warmup":8}] => 2 <= warmup <= window
DEMO --gradients.policies [{"policy":"skip_spike","sigma":"much"}] => not supported between
DEMO --gradients.policies [{"policy":"gradient_noise"}] => exactly one of them must be set
DEMO --gradients.policies [{"policy":"gradient_noise","sigma":1,"ratio":1}] => exactly one of them must
DEMO --data.train PLACE/none.jsonl => none.jsonl does not exist
DEMO --data.train {path="PLACE/none.jsonl"} => none.jsonl does not exist
DEMO --data.train {path:"PLACE/none.jsonl"} => which is neither JSON nor TOML; write a table as {path =
DEMO --data.train {"path":"PLACE/chats.jsonl","col":{}} => its keys are path, format, weight, columns
DEMO --data.train PLACE/chats.jsonl => chats.jsonl row 1 has no chosen and rejected answers
DEMO --data.train {"path":"PLACE/chats.jsonl","columns":{"chosen":"conv.best"}} \
=> has no column 'conv.best', which columns names (it has conv, messages)
DEMO --data.train {"format":"text"} => path: Field required
DEMO --data.train {"path":"PLACE/chats.jsonl","subset":"en"} => /chats.jsonl: subset and revision are read of a
DEMO --data.eval {"path":"PLACE/chats.jsonl","revision":"v1"} => chats.jsonl: subset and revision are read of a
DEMO --data.train PLACE/gsm8k => its README.md names the subsets main, socratic; name the folder or the files of one
DEMO --data.train PLACE/notes => chats.jsonl row 1 has no chosen and rejected answers
DEMO --data.stopping_strategy all_exhausted => data.stopping_strategy: no data source has a probability
DEMO --dpo.loss_weights [0] => dpo.loss_weights are all 0; nothing would be trained
DEMO --dpo.loss_type ["ipo","hinge"] --dpo.loss_weights [0,0] => dpo.loss_weights are all 0; nothing would be trained
--config PLACE/model.toml --model.path m => model is 'm' but must be a table, as model.path is set too
--config PLACE/model.toml --model.lora.rank 4 => model is 'm' but must be a table, as model.lora.rank is set too
--model m BASE => model is 'm' but must be a table
DEMO --data.train {"path":"a","format":"csvish"} => a: format: Input should be 'auto', 'messages'
DEMO --data.train {"path":"a","weight":"2"} => a: weight: Input should be a valid number
DEMO --data.chat_template llama-3 => llama-3
PPO --ppo.reward= => ppo.reward is missing
PPO --ppo.reward ["math:sqrt",""] => ppo.reward is missing
PPO --ppo.reward {"math:sqrt":"much"} => ppo.reward is 'much': input should be a valid number
PPO --ppo.reward ["runs/a","runs/b"] => names several reward models
PPO --ppo.reward math:nothing => ppo.reward is 'math:nothing' but
PPO --ppo.reward no_such_module_x:f => ppo.reward is 'no_such_module_x:f' but
PPO --ppo.reward math:pi => ppo.reward is 'math:pi' but
PPO --ppo.sampler http://host:8000 => 'http://host:8000': this is of none of these forms (Servers that sample instead \
of this engine: vllm+http://host:port or sglang+http://host:port, or a list; or "rows"
PPO --ppo.sampler row => ppo.sampler is 'row': this is of none of these forms (
PPO --ppo.sampler ["vllm+http://h:1","tgi+http://h"] => ppo.sampler is 'tgi+http://h':
PPO --ppo.sampler sglang+http://h/v1 => ppo.sampler is
PPO --ppo.sampler vllm+http://h:1 --ppo.importance_cap 2 --ppo.top_p 0.9 => ppo.importance_cap needs the servers'
PPO --ppo.sampler vllm+http://h:1 --ppo.importance_cap 2 --ppo.top_k 5 => leave ppo.importance_cap out, or top_p and
PPO --ppo.kl_in loss => the gradient of ppo.kl_estimator = "k1" in a loss is zero on average; set ppo.kl_estimator =
PPO --ppo.sampler rows --data.eval [] --run.eval_every 0 \
=> ppo.reward: not read, because ppo.sampler is "rows", which are drawn and scored elsewhere; change that, or leave this
PPO --ppo.sampler rows --ppo.reward {} --data.eval [] --run.samples 4 --run.eval_every 2 --run.patience 1 \
    --ppo.rollouts_ahead 1 --ppo.importance_cap 2 --ppo.sampler_timeout 9 --ppo.reward_workers 2 \
    --data.truncation drop \
=> data.truncation, ppo.reward_workers, ppo.rollouts_ahead, ppo.sampler_timeout, run.eval_every, run.patience, \
run.samples: not read
PPO --ppo.sampler rows --ppo.reward {} --data.eval [] --run.eval_every 0 --run.samples 4 \
=> run.samples: not read, because ppo.sampler is "rows"
PPO --ppo.sampler ["rows","vllm+http://h:1"] --ppo.reward {} --data.eval [] --run.eval_every 0 \
=> name servers, or "rows" alone
PPO --ppo.sampler_sync_every 2 --ppo.sampler_timeout 9 --ppo.sampler_folder a --ppo.sampler_sync gloo \
    --ppo.sampler_reload {"/a":{}} --ppo.rollouts_ahead 1 --ppo.importance_cap 2 \
=> ppo.rollouts_ahead, ppo.sampler_folder, ppo.sampler_reload, ppo.sampler_sync, ppo.sampler_sync_every, \
ppo.sampler_timeout: not read, because ppo.sampler names no servers; change that, or leave this out
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_sync gloo --ppo.sampler_folder a --ppo.sampler_reload {"/a":{}} \
=> ppo.sampler_folder, ppo.sampler_reload: not read, because ppo.sampler_sync is "gloo", which needs no disk; change
PPO --ppo.scale_by_std false => ppo.scale_by_std: not read, because ppo.advantage is "gae"; change that, or leave
PPO --ppo.advantage group --ppo.answers_per_prompt 2 --ppo.gamma 0.9 --ppo.lam 0.5 => ppo.gamma, ppo.lam: not read
PPO --ppo.advantage leave_one_out --ppo.answers_per_prompt 2 --ppo.scale_by_std batch => ppo.scale_by_std: not read
PPO --ppo.advantage reinforce++ --ppo.lam 0.5 => ppo.lam: not read, because ppo.advantage is "reinforce++"
PPO --ppo.rollouts_ahead 1 --ppo.sampler vllm+http://h:1 => ppo.rollouts_ahead trains on answers of earlier weights; set
PPO --ppo.rollouts_ahead 2 => ppo.rollouts_ahead is '2'
PPO --ppo.sampler vllm+http://me:secret@host:8000 => ppo.sampler holds a key, a name or parameters beside host
PPO --ppo.reward http://secret@host/score => the environment variable ULYSSES_API_KEY, which servers get as their key
PPO --ppo.reward http://host/score?api_key=secret => ppo.reward holds a key
PPO --ppo.reward http://host/score#secret => ppo.reward holds a key
PPO --ppo.reward http://host/score;key=secret/x => ppo.reward holds a key
PPO --ppo.reward http://host/hook/sk-secretsecretsecretsecret/x => ppo.reward holds a key
PPO --ppo.reward {"https://host/score?key=secret":0.5,"math:sqrt":1} => ppo.reward holds a key
PPO --ppo.reward HTTPS://host/?secret => ppo.reward holds a key
PPO --ppo.reward http://host/score&api_key=secret => ppo.reward holds a key
PPO --ppo.reward http://host/score?key=a,secret => ppo.reward holds a key
PPO --ppo.reward host:8000/score?api_key=secret => ppo.reward holds a key
PPO --ppo.reward user:secret@host => ppo.reward holds a key
PPO --ppo.reward //user:secret@host/score => ppo.reward holds a key
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_reload {"/reload":{"X-API-Key":"secret"}}\
=> ppo.sampler_reload holds a key
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_reload {"/reload":{"auth":"secret"}}\
=> ppo.sampler_reload holds a key
PPO --ppo.rewrad http://host/score?key=secret => ppo.rewrad: unknown; did you mean ppo.reward?
PPO --ppo.sampler vllm+http://h:1?api_key=secret => ppo.sampler holds a key
PPO --ppo.sampler ["vllm+http://h:1/","sglang+http://h/?secret"] => ppo.sampler holds a key
PPO --ppo.sampler vllm+http://h/v1?key=secret => ppo.sampler is 'vllm+http***': this is of none
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_reload {"/update?api_key=secret":{}}\
=> ppo.sampler_reload holds a key
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_reload {"/update":{"load":{"api_key":"secret"}}}\
=> ppo.sampler_reload holds a key
PPO --ppo.sampler vllm+http://h:1 --ppo.sampler_reload {"/update":{"url":"http://u:secret@h"}}\
=> ppo.sampler_reload holds a key
PPO --ppo.reward_timeout http://u:secret@h => ppo.reward_timeout is 'http***'
PPO --ppo.reference https://u:secret@hub/model => ppo.reference holds a key
SFT --model.tokenizer https://hub/m?token=secret => take them out, and set the environment variable HF_TOKEN
SFT --data.train {"path":"s3://key:secret@bucket/a"} => data.train holds a key, a name or parameters
SFT --data.eval ["https://h/a.jsonl?token=secret"] => data.eval holds a key, a name or parameters
SFT --model.revision hf_secretsecretsecretsecret => model.revision holds a key
SFT --run.output s3://user:secret@bucket/x => is an address, but a path on this machine is needed
SFT --run.seed https://user:secret@wandb.host => run.seed is 'https***'
https://user:secret@host => has no key before it
PPO --ppo.dual_clip 1.2 => ppo: dual_clip is 1.2 but must be above 1 + clip_high, 1.2
PPO --ppo.policy_loss cispo --ppo.dual_clip 3.0 => only the kind clip has it
PPO --ppo.advantage group => ppo.answers_per_prompt is 1
PPO --ppo.minibatches 9 => ppo.minibatches is 9 but a rollout has 8 prompts
PPO --ppo.max_new_tokens 300 => is 512 but data.max_length (prompts) + ppo.max_new_tokens is 556
PPO --ppo.rollout agent => ppo.rollout is 'agent': this is of none of these forms (module:function, an async
PPO --ppo.rollout no_such_module_x:f => ppo.rollout is 'no_such_module_x:f' but
PPO --ppo.rollout math:sqrt => 'math:sqrt' but it cannot be imported (it is not written as async def); name
PPO --ppo.max_episode_tokens 500 => ppo.max_episode_tokens: not read, because there is no ppo.rollout; change
PPO --ppo.max_episode_tokens 256 --ppo.rollout tests.episode_functions:two_turns => 256 but data.max_length
PPO --ppo.max_episode_tokens 600 --ppo.rollout tests.episode_functions:two_turns => 512 but ppo.max_episode_tokens is
PPO --ppo.reference cached => ppo.reference is 'cached' but must be "live" or a model
DEMO --model.tokenizer PLACE/nowhere => model.tokenizer is
SFT --model.tokenizer PLACE => model.tokenizer: PLACE holds no tokenizer (tokenizer.json,
SFT --data.chat_template absent.jinja => absent.jinja' is neither
SFT --run.trackers wanbd => run.trackers has 'wanbd', which cannot be imported (
SFT --run.trackers tests.own_tracker:Gone => has 'tests.own_tracker:Gone', which cannot be imported (module
SFT --run.trackers= => run.trackers has ''
SFT --run.trackers broken_exit:Own => 'broken_exit:Own', which cannot be imported (set MY_KEY); name
SFT --run.trackers broken_syntax:Own => 'broken_syntax:Own', which cannot be imported (
SFT --run.trackers broken_value:Own => which cannot be imported (first\nsecond); name
PPO --ppo.reward broken_exit:own => 'broken_exit:own' but it cannot be imported (set MY_KEY); name
PPO --ppo.reward broken_syntax:own => 'broken_syntax:own' but it cannot be imported (
PPO --ppo.reward broken_value:own => but it cannot be imported (first\nsecond); name
PPO --run.timeout 1e300 => run.timeout is '1e300': input should be less than or equal to 1000000
PPO --run.stall_warning 1e300 => run.stall_warning is '1e300': no number can be meant that is beyond 2^53
PPO --ppo.reward_timeout 1e7 => ppo.reward_timeout is '1e7': input should be less than or equal to 1000000
PPO --run.seed 1000000000000000000000000000000 => 0': no number can be meant that is beyond 2^53
PPO --data.workers 5000 => data.workers is '5000': input should be less than or equal to 1024
DISTILL --ppo.max_new_tokens 9 => ppo.max_new_tokens: stage 'distill' reads no settings of ppo
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --distill.nll_weight 1 => nll_weight is 1 but answers that
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --data.train_on all => train_on is "all" but the student
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --ppo.max_new_tokens 9 --batch.tokens_per_microbatch 260 \
=> is 260 but data.max_length (prompts) + ppo.max_new_tokens is 265
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --ppo.sampler_sync gloo => ppo.sampler names no servers
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --ppo.gamma 0.5 => ppo.gamma: stage 'distill' reads
SFT --model.quantize nf4 => model.quantize is "nf4" but all weights are trained
DEMO --run.resume PLACE => is not a complete checkpoint; give a folder RUN/checkpoints/step-N
DEMO --model.init pretrained --model.path PLACE/nowhere --model.config {} => there is no folder PLACE/nowhere
"""


WRONG_FILES = {
    "empty": "",
    "quotes": "stage = dpo",
    "latin1": 'stage = "dpo"  # f\xfcr',
    "model": 'stage = "sft"\nmodel = "m"\nrun.steps = 3',
    "sections": 'stage = "sft"\n[model]\npath = "m"\n[run]\nsteps = 3\n[optimiser]\nlr = 1e-5',
    **{
        key: f'stage = "sft"\n{key} = true'
        for key in ("optimizer.lr", "run.steps", "model.path")
    },
}


# modules of the user's own
BROKEN = {
    "broken_exit": "raise SystemExit('set MY_KEY')",
    "broken_syntax": "def own(",
    "broken_value": "raise ValueError('first\\nsecond')",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in WRONG_FILES.items():
        (folder / f"{name}.toml").write_text(text, encoding="latin-1")
    for name, text in BROKEN.items():
        (folder / f"{name}.py").write_text(text)
    turns = [{"role": role, "content": "hello"} for role in ("user", "assistant")]
    write_rows(folder / "empty.jsonl", [{"prompt": "q", "completion": ""}] * 2)
    for name in ("main", "socratic"):  # a clone of a dataset with two subsets
        (folder / "gsm8k" / name).mkdir(parents=True)
        write_rows(folder / f"gsm8k/{name}/train.jsonl", [{"question": "q", "answer": "a"}])
    names = "- config_name: main\n- config_name: socratic\n"
    (folder / "gsm8k/README.md").write_text(
        f"---\ndataset_info:\n{names}configs:\n{names}---\n"
    )
    for path in (folder, folder / "notes"):
        path.mkdir(exist_ok=True)
        write_rows(path / "chats.jsonl", [{"conv": {"messages": turns}, "messages": turns}])
    # one subset, in two places, before notes that name others
    (folder / "notes/README.md").write_text(
        "---\nconfigs:\n- config_name: 'a'\ndataset_info:\n  config_name: a # all\n---\nconfig_name: b\n"
    )
    return folder


def typed(line, place):
    stages = {
        "DEMO": "dpo",
        "KTO": "kto",
        "SFT": "sft",
        "PPO": "ppo",
        "RM": "rm",
        "DISTILL": "distill",
    }
    words = line.replace("PLACE", str(place)).replace("BASE", BASE).split()
    if words and words[0] in stages:
        words[:1] = tiny(stages[words[0]], place / "run")
    if line.startswith("MOE"):
        words[:1] = tiny("sft", place / "run", EXPERTS)
    return words


@pytest.mark.parametrize("line, wanted", rows_of(MISTAKES))
def test_one_sentence(line, wanted, place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError) as caught:
        open_data(prepare(parse_command_line(typed(line, place)).config))
    sentence = str(caught.value)
    assert wanted.replace("PLACE", str(place)) in sentence
    assert "\n" not in sentence and len(sentence) < 600 and "secret" not in sentence


# what is typed, and how the sentences begin: unknown settings and wrong values, settings that do not fit each other,
# what they name, and settings that are not read
ALL_AT_ONCE = """
BASE --max_grad_norm 1 --run.seed -1 --run.stps 3 --dpo.beta x --use_dora --template llama3 \
=> run.stps: |max_grad_norm: |use_dora: |template: |dpo.beta is 'x'|run.seed is
DEMO --parallel.sequence_parallel_size 3 --deepspeed.zero_optimization.stage 2 --dpo.loss_type cdpo \
=> parallel.sequence_parallel_size is 3|dpo: loss_type is|deepspeed.zero_optimization.stage is owned
DEMO --data.train PLACE/none.jsonl --model.tokenizer PLACE/nowhere --run.resume PLACE --model.attention flash4 \
=> data: |model.tokenizer is|model.attention: |run.resume:
DISTILL --distill.on_policy 0.5 --distill.jsd_beta 1 --ppo.max_episode_tokens 200 --ppo.gamma 0.5 \
--ppo.rollouts_ahead 1 --ppo.sampler_sync gloo \
=> ppo.gamma, ppo.max_episode_tokens, ppo.rollouts_ahead: stage 'distill' reads only|ppo.sampler_sync: not read
"""


@pytest.mark.parametrize("line, starts", rows_of(ALL_AT_ONCE))
def test_all_mistakes_at_once(line, starts, place):
    with pytest.raises(ConfigError) as caught:
        prepare(parse_command_line(typed(line, place)).config, 8)
    first, *found, last = str(caught.value).splitlines()
    starts = starts.split("|")
    assert first == f"{len(starts)} settings are wrong:"
    assert last.startswith("change all of them; ulysses train --help")
    for text, start in zip(found, starts, strict=True):
        assert text.startswith(f"  {start}")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_as_other_systems_write_them(encoding, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('stage = "sft"\r\nmodel.path = "für"\r\nrun.steps = 5\r\n', encoding)
    assert parse_command_line(["--config", str(path)]).config.model.path == "für"


def test_deep_columns(place, tmp_path):
    train = {"path": str(place / "chats.jsonl"), "columns": {"messages": "conv.messages"}}
    line = tiny("sft", tmp_path / "run", data__train=train)
    train, _ = open_data(prepare(parse_command_line(line).config, 1))
    assert len(train) == 1


@pytest.mark.parametrize("stage", STAGE_CASES)
def test_learning_rate_suits_the_stage(stage, capsys):
    lr, required = STAGE_CASES[stage].rate, STAGE_CASES[stage].required
    values = {"stage": stage, "run": {"steps": 1}, stage: required}
    values["model"] = {"arch": "llama3-8b", "init": "random"}
    assert check(values).optimizer.lr == lr
    values["model"]["lora"] = {"rank": 8}
    config = check(values)
    assert config.optimizer.lr == pytest.approx(10 * lr, rel=1e-12)
    assert check(config.model_dump(exclude_unset=True)).optimizer.lr == config.optimizer.lr
    dry_run(config, parse_command_line([*BASE.split(), "--dry-run", "--gpus", "8"]).options)
    shown = capsys.readouterr().out
    assert f"optimizer.lr {10 * lr:g} is the default of {stage}: " in shown
    assert "ten times as much" in shown


def test_a_taken_folder_can_be_planned_and_inspected(place, tmp_path, capsys):
    (folder := tmp_path / "run/checkpoints/step-3").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    line = f"""--config {ROOT}/configs/demo/dpo.toml --dry-run --gpus 2 --run.output {tmp_path}/run --run.resume never
        --data.cache {place}/cache"""
    config, options = parse_command_line(line.split())
    assert dry_run(config, options) == 0
    shown = capsys.readouterr().out
    assert "already holds checkpoints" in shown.splitlines()[-1] and '"stage"' not in shown
    assert inspect(config, 1) == 0
