"""Every setting of a run and every option of the command: strict schemas, read from TOML and from the command line.

The text below each field is what `--help` prints; it states units and the meaning of 0.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ulysses.config import stage_sections as stages
from ulysses.config.section import (
    LOCAL,
    Fraction,
    LocalPath,
    PathOrName,
    PathOrWord,
    Section,
    Share,
    TemplateName,
    Values,
)

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The projections of linear attention: models have separate or fused ones, and all have the last one.
SEPARATE_TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
FUSED_TARGETS = ("in_proj_qkvz", "in_proj_ba")
RULE_TARGETS = (*SEPARATE_TARGETS, *FUSED_TARGETS, "out_proj")
Sources = Annotated[str | Values | list[str | Values], LOCAL]


class LoraSection(Section):
    rank: NonNegativeInt = 0
    """Rank of the low-rank adapters (LoRA); 0 trains all weights instead."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: each adds alpha / rank * B A to its weight matrix."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps updates of one size at every rank (rsLoRA, 2312.03732)."""
    dropout: Share = 0.0
    """Probability of dropping an input of an adapter during training; adapters of one input drop the same of it."""
    targets: list[Literal[LORA_TARGETS + RULE_TARGETS]] = Field(
        list(LORA_TARGETS), min_length=1
    )
    """Names of the modules that get an adapter; by default all projections of attention, linear attention and MLPs."""
    train: list[Literal["embeddings"]] = []
    """What is trained whole beside the adapters: "embeddings", the vocabulary's matrices (PEFT's modules_to_save)."""
    merge: bool = False
    """Export the base weights with the adapters added to them, instead of the adapters alone."""


class RopeSection(Section):
    type: Literal["default", "linear", "llama3", "yarn"] | None = Field(
        None, serialization_alias="rope_type"
    )
    """How positions reach beyond the window that the model was first trained with; by default as config.json says."""
    factor: PositiveFloat | None = None
    """How many times longer than the original window the sequences may be."""
    original_max_position_embeddings: PositiveInt | None = None
    """Original window in tokens; by default the model's own before any scaling."""
    theta: PositiveFloat | None = Field(None, serialization_alias="rope_theta")
    """Base of the rotary frequencies."""
    beta_fast: PositiveFloat | None = None
    """yarn: a dimension that turns more often than this within the original window stays as it is (usually 32)."""
    beta_slow: PositiveFloat | None = None
    """yarn: a dimension that turns less often than this is stretched by the whole factor (usually 1)."""
    attention_factor: PositiveFloat | None = None
    """yarn: what queries and keys are multiplied by; by default 0.1 ln(factor) + 1."""
    mscale: PositiveFloat | None = None
    """yarn: weight of ln(factor) in that default, if mscale_all_dim is set too."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn: weight of ln(factor) in what that default is divided by."""
    truncate: bool | None = None
    """yarn: whether the two limits between dimensions are whole numbers (usually true)."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: a dimension that turns less often than this within the original window is stretched (usually 1)."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: a dimension that turns more often than this stays as it is (usually 4)."""
    extrapolate: bool = False
    """Train on sequences beyond the model's window all the same."""

    def changes(self) -> Values:
        """Return what is set, under the names of config.json."""
        return self.model_dump(by_alias=True, exclude={"extrapolate"}, exclude_none=True)


class ModelSection(Section):
    path: PathOrName | None = None
    """Folder or hub id of the model, which provides its configuration, weights and tokenizer."""
    arch: str | None = Field(
        None,
        description='Name of a published shape instead of a path; needs init = "random". One of: '
        "llama3-8b, llama3-70b, llama3.1-8b, llama3.1-70b, llama3.2-1b, llama3.2-3b, qwen2.5-0.5b, qwen2.5-1.5b, "
        "qwen2.5-3b, qwen2.5-7b, qwen2.5-14b, qwen2.5-32b, qwen2.5-72b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, "
        "qwen3-14b, qwen3-32b, olmo2-7b, olmo2-13b, olmo3-7b, smollm3-3b, granite3.1-8b, gemma3-1b, gemma3-4b, "
        "qwen3-30b-a3b, qwen3-235b-a22b, gpt-oss-20b, gpt-oss-120b, qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, "
        "qwen3.5-9b, qwen3.5-27b, qwen3.5-35b-a3b",
    )
    config: Values = {}
    """Keys of a Hugging Face config.json: a whole shape, or changes to that of path or arch; needs init = "random"."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Whether the weights are read from path or drawn at random, which needs no weight files."""
    revision: str | None = None
    """Branch, tag or commit, if path is a hub id."""
    tokenizer: PathOrName | None = None
    """Folder, hub id or tokenizer.json of the tokenizer; by default the one that comes with the model."""
    special_tokens: dict[str, str] = {}
    """Texts of the special tokens (bos_token, eos_token, pad_token), which a tokenizer.json alone does not name."""
    add_tokens: list[str] = []
    """New tokens for the vocabulary. Each starts as the mean of the tokens that its text was before."""
    pad_vocabulary: PositiveInt = 1
    """Rows of the vocabulary's matrices are a multiple of this where add_tokens makes them more."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and activations; master weights and optimizer state are always float32."""
    attention: Literal["auto", "flash4", "cudnn", "torch", "reference"] = "auto"
    """Attention kernel; "auto" takes the fastest one that is exact for this model on this device."""
    quantize: Literal["none", "nf4"] = "none"
    """With LoRA, how the frozen matrices of the layers are kept: as they are, or in 4 bits (QLoRA's NF4 with double
    quantisation)."""
    router_aux_loss_coefficient: NonNegativeFloat = 0.0
    """With experts: weight of the loss that spreads rows over them, as transformers defines it, over the whole step."""
    freeze_router: bool = False
    """With experts: the routers, which choose them, are not trained."""
    rope: RopeSection = RopeSection()
    lora: LoraSection = LoraSection()


class DataSection(Section):
    train: Sources = []
    """Training data: a path, a table {path, format, weight, columns, split, ...}, or a list of both."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """When an epoch over sources with probabilities ends: with the first source of which every example was taken, or
    with the last, until which those of the others are repeated."""
    eval: Sources = []
    """Held-out data in the same forms; an empty list means that nothing is evaluated."""
    eval_fraction: Share = 0.0
    """Share of the training data's rows that is held out instead; which rows these are follows from their places."""
    max_length: int = Field(4096, ge=8)
    """Longest sequence in tokens; of a pair, each side may be this long."""
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    """What happens to a longer sequence: cut at its end, cut at its start, left out, or an error that stops the run.
    Of answers to compare or label keep_end cuts the prompt's start, to no less than a quarter of max_length, and then
    their ends. Both sides of a pair are left out together, and a row of which nothing trained is left is counted and
    left out."""
    chat_template: TemplateName = "tokenizer"
    """How conversations become text: "tokenizer" (its own way), llama3, llama3.1, qwen2.5, qwen3, chatml, plain, a
    .jinja file or the text of one."""
    chat_template_kwargs: Values = {}
    """What the chat template reads besides the messages, such as enable_thinking or reasoning_effort; those of a source
    and of a row come first."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Which tokens of a conversation are trained: every assistant turn, everything, or the last turn only."""
    bad_rows: Literal["error", "drop"] = "error"
    """Whether a row that breaks its format stops the run, or is left out and counted."""
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Processes that tokenise data which the cache does not hold; "auto" is one for each core, at most 16."""
    cache: LocalPath = Field("~/.cache/ulysses", validate_default=True)
    """Folder that keeps tokenised data and reference log-probabilities; a DPO run needs the latter to resume."""


class ParallelSection(Section):
    sequence_parallel_size: PositiveInt | Literal["auto"] = 1
    """Number of processes that share each packed sequence; "auto" is the smallest whose memory plan fits."""


class BatchSection(Section):
    examples: PositiveInt = 8
    """Examples per optimizer step over all processes: sequences, pairs (DPO), pairs or lists (RM), or prompts (PPO)."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Longest packed sequence of a micro-batch in tokens; "auto" is the longest example, or as many more as
    recompute nothing more than that, up to a whole step. It changes no number."""
    share_prompts: bool = True
    """Compute a prompt once for all of its answers in a micro-batch, where that takes less time than CUDA graphs over
    whole sequences; losses and gradients are the same."""


class OptimizerSection(Section):
    lr: NonNegativeFloat = None
    """Highest learning rate of the schedule; by default the stage's, which --dry-run prints with its reason."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the matrices; norms and biases get none. 0 is off."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of AdamW's running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Term that AdamW adds to the denominator."""
    moments: Literal["32bit", "8bit"] = "32bit"
    """How AdamW's running means are kept: in float32, or in a byte each (bitsandbytes' blockwise quantisation)."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up; "wsd" stays at lr and decays linearly over the last steps."""
    warmup: NonNegativeFloat = 0.03
    """Length of the warm-up: a number of steps if at least 1, otherwise a fraction of all steps; 0 is none."""
    min_lr: Fraction = 0.0
    """Where linear, cosine and wsd arrive after the last step, as a fraction of lr."""
    decay_fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the steps over which schedule "wsd" decays."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradient sums travel between nodes; "bfloat16" halves the traffic on slow links."""


class GradientsSection(Section):
    preset: Literal["default", "ulysses-pro"] = "default"
    """Named chain of gradient policies; "default" stops on gradients that are not finite and clips their norm."""
    max_norm: NonNegativeFloat = 1.0
    """Global norm to which the preset clips the gradient; 0 does not clip."""
    policies: list[Values] = []
    """The chain written out, as tables {policy = name, ...settings}; it replaces preset and max_norm."""


class MemorySection(Section):
    recompute: Literal["auto", "none", "keep_attention", "block"] = "auto"
    """What the backward pass computes again: nothing, all but attention, or each layer."""
    weights: Literal["auto", "sharded", "resident"] = "auto"
    """Whether every process holds a share of the weights and gathers each layer for its use, or all of them, gathered
    once after an update; "auto" is what is faster and fits."""
    offload: Literal["auto", "none"] = "none"
    """Whether the layers' saved inputs wait in pinned host memory; "auto" moves only what the GPU cannot hold."""
    offload_optimizer: bool = False
    """Keep master weights and optimizer state in host memory, and update them on the CPU."""
    offload_parameters: bool = False
    """Keep each process's share of the weights in host memory."""
    host_memory: NonNegativeFloat = 0.0
    """Host memory of each node in GiB, for machines that report too little of it; 0 takes what the system reports."""


class RunSection(Section):
    output: LocalPath = Field("runs/run", validate_default=True)
    """Folder of the run, which receives its configuration, metrics, checkpoints and export."""
    steps: NonNegativeInt = 0
    """Length of the run in optimizer steps; 0 leaves it to epochs."""
    epochs: NonNegativeFloat = 0.0
    """Length of the run in passes over the training data; 0 leaves it to steps."""
    seed: NonNegativeInt = 42
    """Seed of the data order, random weights and all noise."""
    deterministic: bool = False
    """Repeat runs bit by bit on GPUs too, at some cost in speed; kernels that cannot are refused."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates once, at the end."""
    patience: NonNegativeInt = 0
    """End the run after so many evaluations in a row whose eval/loss is not below the best one; 0 never does."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; the best evaluation is saved too. 0 leaves it to save_minutes and save_last."""
    save_minutes: NonNegativeFloat = 30.0
    """Minutes after which a checkpoint is saved if there was none since; 0 saves none for that reason."""
    save_last: bool = True
    """Save a checkpoint after the last step; a run that a signal asks to stop saves one in any case."""
    keep: NonNegativeInt = 2
    """Number of newest checkpoints that are kept, in addition to the best one; 0 keeps all."""
    resume: PathOrWord = "never"
    """What to continue from: "never", "auto" (the newest complete checkpoint, if any) or the folder of a checkpoint."""
    resume_anyway: bool = False
    """Continue a checkpoint although the training data or their shares, the weights of frozen models (with LoRA, of the
    base), the file of a reward function, batch.examples, the steps of a rollout, ppo.advantage, run.seed or the stage
    have changed."""
    export: bool = True
    """Write the trained model in Hugging Face format at the end."""
    timeout: float = Field(600.0, ge=5, le=1e6)
    """Seconds without progress after which the run ends and names the process that it waits for."""
    stall_warning: NonNegativeFloat = 60.0
    """Seconds without progress after which a line names that process; 0 prints none."""
    samples: NonNegativeInt | list[str] = 0
    """So many held-out rows, or these prompts, are answered at every evaluation, beside the answers of the data and of
    the reference; PPO adds as many groups of each rollout. samples.jsonl, TensorBoard and the report show them. Answers
    have up to 256 tokens, PPO's ppo.max_new_tokens; 0 is off."""
    trackers: list[str] = ["tensorboard"]
    """What gets the metrics besides metrics.jsonl: tensorboard, wandb, mlflow, trackio, swanlab, or your own class as
    module:Class."""
    project: str = "ulysses"
    """Project, or experiment, under which the services among the trackers file the run."""
    wandb: str = ""
    """Name of a Weights & Biases project: short for wandb among the trackers and this project."""


class ExportSection(Section):
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Precision of exported weights: that of training (model.dtype), or float32, the master weights, or bfloat16."""
    shard_gib: PositiveFloat = 2.0
    """Largest size of an exported file of weights in GiB; this much host memory is taken meanwhile."""


class DeepSpeedSection(Section):
    zero_optimization: Values = {}
    """DeepSpeed's own keys of ZeRO, laid over those that the engine derives; keys that the engine owns are refused."""


class Options(Section):
    """What the command is asked besides the settings of the run."""

    config: str | None = None
    """TOML file with the settings of the run."""
    adjust_lr: NonNegativeFloat = 1.0
    """Multiply the learning rate by this factor; without a value, by 1."""
    dry_run: bool = False
    """Check everything, print the plan and exit; this needs no weights, no data and no GPU."""
    inspect: PositiveInt | None = None
    """Print this many training samples with the trained tokens highlighted, and exit."""
    gpus: int | None = Field(None, ge=1, le=1_000_000)
    """With --dry-run: plan for this many GPUs."""
    gpu_memory: PositiveFloat | None = None
    """With --dry-run: memory of each GPU in GiB."""
    host_memory: PositiveFloat | None = None
    """With --dry-run: host memory of each node in GiB."""
    debug: bool = False
    """Print more, on every process, with stack traces; the environment variable ULYSSES_DEBUG=1 does the same."""
    local_rank: int | None = None
    """Appended by the deepspeed launcher; the environment variable LOCAL_RANK says the same, and that is read."""


class Config(Section):
    """Settings of one training run."""

    stage: Literal[*stages.LEARNING_RATES]
    """How the model is trained: pre-training, fine-tuning, distillation, reward modelling, DPO, KTO or PPO."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    gradients: GradientsSection = GradientsSection()
    memory: MemorySection = MemorySection()
    pt: stages.PtSection = stages.PtSection()
    sft: stages.SftSection = stages.SftSection()
    distill: stages.DistillSection = stages.DistillSection()
    rm: stages.RmSection = stages.RmSection()
    dpo: stages.DpoSection = stages.DpoSection()
    kto: stages.KtoSection = stages.KtoSection()
    ppo: stages.PpoSection = stages.PpoSection()
    run: RunSection = RunSection()
    export: ExportSection = ExportSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()

    @model_validator(mode="after")
    def _with_learning_rate(self) -> "Config":
        if self.optimizer.lr is not None:
            return self
        optimizer = self.optimizer.model_copy(update={"lr": self.usual_lr[0]})
        return self.model_copy(update={"optimizer": optimizer})

    @property
    def usual_lr(self) -> tuple[float, str]:
        """The stage's learning rate and its reason; adapters, which start from zero, take ten times as much."""
        rate, reason = stages.LEARNING_RATES[self.stage]
        return round(rate * (10 if self.model.lora.rank else 1), 12), reason

    @property
    def export_dtype(self) -> str:
        """The precision of exported weights. As texts "float32" is more than "bfloat16", which comparisons use."""
        return self.model.dtype if self.export.dtype == "model" else self.export.dtype

    @property
    def output(self) -> Path:
        return Path(self.run.output)

    @property
    def sampler_folder(self) -> Path:
        return Path(self.ppo.sampler_folder or self.output / "sampler")
