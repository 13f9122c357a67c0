"""Every setting of a run and every option of train.py: strict schemas, read from TOML and from the command line.

The text below each field is what `--help` prints; it states units and the meaning of 0.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from ulysses.gradients.chain import GradientPolicyChain, Preset, build_chain
from ulysses.training.section import Section
from ulysses.training.stages import STAGES
from ulysses.training.stages.base import Stage
from ulysses.training.stages.dpo import DpoSection
from ulysses.training.stages.kto import KtoSection
from ulysses.training.stages.ppo import PpoSection
from ulysses.training.stages.pt import PtSection
from ulysses.training.stages.rm import RmSection
from ulysses.training.stages.sft import SftSection

StageName = Literal["pt", "sft", "rm", "dpo", "kto", "ppo"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # of model.dtype


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """LoRA rank r; 0 trains all weights."""
    alpha: float = Field(16.0, gt=0)
    """Scale: the update is alpha / rank * B A."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    targets: list[LoraTarget] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Module names that get an adapter."""
    merge: bool = False
    """Export the base weights with the adapters added in, instead of the adapters alone."""


class ModelConfig(Section):
    path: str | None = None
    """Folder or hub id that gives config, weights and tokenizer."""
    arch: str | None = None
    """Shape by name instead of a path ("llama3-8b", "qwen2.5-7b", ...); needs init = "random"."""
    config: dict[str, Any] = {}
    """A config.json written here (Hugging Face keys), or keys that change the one from path or arch; needs init = "random"."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Where the weights come from; "random" needs no weight files."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: str | None = None
    """Tokenizer folder, hub id or bare tokenizer.json; without it the model's own."""
    special_tokens: dict[str, str] = {}
    """For a bare tokenizer.json: bos_token, eos_token, pad_token by name."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and activations; master weights and optimizer state are always float32."""
    attention: Literal["auto", "flash4", "flash3", "flash2", "cudnn", "torch", "reference"] = "auto"
    """Attention kernel; "auto" takes the fastest that is exact for the case and logs it."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""

    @model_validator(mode="after")
    def _source(self) -> "ModelConfig":
        if self.path and self.arch:
            raise ValueError("give model.path or model.arch, not both")
        if not (self.path or self.arch or self.config):
            raise ValueError(
                'the model is missing: set model.path to a folder or hub id, or model.arch with model.init = "random"'
            )
        if self.init == "pretrained" and not self.path:
            raise ValueError(
                'model.init is "pretrained" but there is no model.path to read weights from; set model.path or '
                'model.init = "random"'
            )
        if self.init == "pretrained" and self.config:
            raise ValueError(
                "model.config changes the shape, which pretrained weights do not fit; remove it or set model.init "
                '= "random"'
            )
        return self


class DataConfig(Section):
    train: str | dict[str, Any] | list[str | dict[str, Any]] = []
    """Training data: a path, a list of paths, or tables {path, format, weight, columns, split}."""
    eval: str | dict[str, Any] | list[str | dict[str, Any]] = []
    """Held-out data, same forms; empty means no evaluation."""
    max_length: int = Field(4096, ge=8)
    """Longest sequence in tokens (for pairs: of each side)."""
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    """What happens to longer sequences."""
    chat_template: str = "tokenizer"
    """"tokenizer", "llama3", "qwen2.5", "chatml" or a .jinja file."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Which tokens are trained in conversations: every assistant turn, everything, or the last turn."""
    bad_rows: Literal["error", "drop"] = "error"
    """A row that breaks its format stops the run, or is dropped and counted."""
    cache: str = "~/.cache/ulysses"
    """Folder of the tokenised, memory-mapped data, keyed by content."""


class ParallelConfig(Section):
    sequence_parallel_size: int = Field(1, ge=1)
    """Ulysses degree: so many processes share each packed sequence; data degree = world size / it."""


class BatchConfig(Section):
    examples: int = Field(8, ge=1)
    """Examples (pairs for DPO and RM) per optimizer step over all processes; for PPO prompts per rollout."""
    tokens_per_microbatch: int | Literal["auto"] = "auto"
    """Longest packed sequence per micro-batch in tokens; "auto" = data.max_length, twice that for pairs."""

    @field_validator("tokens_per_microbatch")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError('must be at least 1 token, or "auto"')
        return value


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases get none."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "cosine"
    """Shape after warm-up; "wsd" is warmup-stable-decay with the last decay_fraction of the steps decaying linearly."""
    warmup: float = Field(0.03, ge=0)
    """Warm-up: steps if >= 1, else a fraction of all steps; 0 means none."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    decay_fraction: float = Field(0.1, gt=0, le=1)
    """Share of the steps that decay under "wsd"."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which sums of gradients travel between nodes; inside a node gradients travel as computed and add up in float32."""


class GradientsConfig(Section):
    preset: Preset = "default"
    """A named chain of gradient policies: "default" (stop on non-finite, clip), "steady" or "ulysses-pro"."""
    max_norm: float = Field(1.0, ge=0)
    """Global norm to which a preset clips the gradient; 0 does not clip."""
    policies: list[dict[str, Any]] = []
    """The chain written out as tables {policy = name, ...settings}; replaces preset and max_norm."""
    table_every: int = Field(50, ge=1)
    """With --debug: steps between tables of the largest and smallest gradients by parameter."""

    def chain(self) -> GradientPolicyChain:
        """Build the gradient policies; ValueError names the table and the key that cannot be honoured."""
        return build_chain(self.policies or self.preset, self.max_norm)


class MemoryConfig(Section):
    recompute: Literal["auto", "none", "keep_attention", "block", "pair"] = "auto"
    """What backward computes again: nothing, all but the attention kernel, each layer, or each pair of layers, which keeps least."""
    offload: Literal["auto", "none", "checkpoints"] = "none"
    """Layer checkpoints in pinned host memory."""
    offload_optimizer: bool = False
    """Optimizer state and master weights in host memory; the update runs on the CPU."""
    offload_parameters: bool = False
    """Parameter shards in host memory."""
    host_memory: float = Field(0.0, ge=0)
    """GiB of each node that training may take, where the kernel reports too little because more comes on demand; 0 asks it."""
    mlp_tile: int | Literal["auto"] = "auto"
    """Rows per MLP tile; 0 never tiles. Layers that recompute nothing run their MLP whole."""
    logits_tile: int | Literal["auto"] = "auto"
    """Rows per tile of the vocabulary projection."""


class RunConfig(Section):
    output: str = "runs/run"
    """Run folder: config, metrics, checkpoints and export."""
    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 means use epochs."""
    epochs: float = Field(0.0, ge=0)
    """Passes over the training data; 0 means use steps."""
    seed: int = 42
    """Seed of data order, initial weights and noise."""
    deterministic: bool = False
    """Bit-identical repeats on GPUs too, at some cost in speed; kernels that cannot are refused."""
    log_every: int = Field(1, ge=1)
    """Steps between metric lines."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates at the end only."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints (the best evaluation so far is saved too); 0 saves at the end only."""
    save_last: bool = True
    """Save a checkpoint after the last step; false where the export is all that is wanted. A stop by SIGTERM always saves."""
    keep: int = Field(2, ge=0)
    """How many checkpoints stay besides the best one; 0 keeps all."""
    resume: str = "never"
    """"never", "auto" (the newest complete checkpoint, if any) or a checkpoint folder."""
    overwrite: bool = False
    """Delete what an earlier run left in the output folder; with run.resume = a folder, the checkpoints after that one."""
    export: bool = True
    """Write the trained model in Hugging Face format at the end."""
    profile: int = Field(0, ge=0)
    """Write a torch profiler trace of this step; 0 writes none."""
    wandb: str = ""
    """Weights & Biases project; empty sends nothing."""

    @model_validator(mode="after")
    def _length(self) -> "RunConfig":
        if bool(self.steps) == bool(self.epochs):
            raise ValueError(
                f"run.steps is {self.steps} and run.epochs is {self.epochs:g}, but one of them must be above 0 and the "
                "other 0; set the one that you mean"
            )
        return self


class Options(Section):
    """What train.py is asked besides the settings of the run."""

    config: str | None = None
    """TOML file with the settings of the run."""
    deepspeed: str | None = None
    """JSON file with raw DeepSpeed keys, merged into the table [deepspeed]."""
    adjust_lr: float = Field(1.0, ge=0)
    """Multiply the learning rate by this factor; without a value, by 1."""
    dry_run: bool = False
    """Check everything, print the plan and exit; this needs no weights, no data and no GPU."""
    inspect: int | None = Field(None, ge=1)
    """Print this many training samples with the trained tokens highlighted, and exit."""
    gpus: int | None = Field(None, ge=1)
    """With --dry-run: plan for this many GPUs."""
    gpu_memory: float | None = Field(None, gt=0)
    """With --dry-run: memory of each GPU in GiB."""
    host_memory: float | None = Field(None, gt=0)
    """With --dry-run: host memory of each node in GiB."""
    debug: bool = False
    """Print more, on every process, and stack traces; the environment variable ULYSSES_DEBUG=1 does the same."""
    local_rank: int | None = None
    """Appended by the deepspeed launcher; it must agree with the environment variable LOCAL_RANK."""

    @property
    def planner(self) -> dict[str, float]:
        """The machine to plan for, as far as it was described."""
        return self.model_dump(include={"gpus", "gpu_memory", "host_memory"}, exclude_none=True)


class Config(Section):
    """Settings of one training run."""

    stage: StageName
    """What is trained: pt, sft, rm, dpo, kto or ppo."""
    model: ModelConfig = Field({}, validate_default=True)
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    parallel: ParallelConfig = ParallelConfig()
    """How processes share the work."""
    batch: BatchConfig = BatchConfig()
    """What one optimizer step sees."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    gradients: GradientsConfig = GradientsConfig()
    """What happens to the reduced gradient before the update."""
    memory: MemoryConfig = MemoryConfig()
    """What is kept, recomputed and offloaded."""
    pt: PtSection = PtSection()
    """Pre-training."""
    sft: SftSection = SftSection()
    """Supervised fine-tuning."""
    rm: RmSection = RmSection()
    """Reward modelling."""
    dpo: DpoSection = DpoSection()
    """Preference optimisation."""
    kto: KtoSection = KtoSection()
    """Preference optimisation on unpaired answers."""
    ppo: PpoSection = PpoSection()
    """Proximal policy optimisation."""
    run: RunConfig = Field({}, validate_default=True)
    """The run itself."""
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed keys merged into the derived configuration; what the engine owns, or DeepSpeed does not know, is refused."""

    @property
    def stage_class(self) -> type[Stage]:
        return STAGES[self.stage]

    @property
    def output(self) -> Path:
        return Path(self.run.output)
