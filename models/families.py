"""The families of models as data: a row of families.json each, and the records of what their layers may have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]  # of a config.json, or of another object of JSON


class LayerKind(NamedTuple):
    """Say of which kinds a layer's parts are; the names of mixers are transformers' layer_types.

    rotary: "main" rotates with the model's base and scaling, "local" with rope_local_theta and no scaling, "none" not
    at all.
    """

    mixer: str = "full_attention"
    feed_forward: str = "mlp"  # or "experts"
    rotary: str = "main"


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart, as families.json says.

    Args:
        class_name: what transformers' classes of the family begin with.
        classifier: the same for the class of reward models, if it differs; "none" if transformers has no such class.
        fixed: fields of config.json that must have this value, and are written so.
        defaults: what transformers assumes for a field that config.json leaves out.
        aliases: the field that another name in files stands for.
        qkv_bias: q_proj, k_proj and v_proj have a bias and o_proj has none, whatever config.json says; elsewhere its
            `attention_bias` gives a bias to all four.
        qk_norm: queries and keys are normalised before they are rotated: "none", each "head", or the whole "row".
        norms: the names of a layer's four norms, before and after the mixer and before and after the feed-forward; ""
            where there is none.
        centred_norms: norms multiply by 1 + weight, in float32.
        activation: of the feed-forward, by transformers' name.
        mixers: of the layers, repeated from the first layer on; config.json's layer_types may arrange them otherwise.
        rotary: the kind of rotary positions by mixer, where it is not "main".
        experts: layers may have experts in place of the MLP.
        shared_expert: beside the experts there is one for all rows, whose output the sigmoid of a gate multiplies.
        mlp_by_parameter: PEFT would take the names of MLPs' modules for the experts', so that adapters of MLPs are
            exported under the names of their weights.
        output_gate: attention's output is multiplied by the sigmoid of a gate, whose rows stand in q_proj.
        fused_projections: the projections of linear attention are two matrices, in which the rows of a key head stand
            together.
        clamped_experts: the experts are gpt-oss's. They and the router have biases, their matrices are [N, inputs,
            outputs] with gate and up in turns, the activation is (up + 1) * gate * sigmoid(1.702 * gate) of values
            clamped to 7, and files hold all experts of a layer in one tensor.
        sinks: every head has a trained logit that takes its part of the softmax and adds nothing.
        rope_scaling: what transformers assumes if config.json has neither rope_scaling nor rope_parameters.
        multipliers: the fields of Multipliers that config.json has.
        scaled_embeddings: embeddings are multiplied by the square root of their width.
        scaled_window: max_position_embeddings is the window that a linear rotary scaling in the file leads to.
    """

    class_name: str
    fixed: Fields
    defaults: Fields
    aliases: dict[str, str] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: str = "none"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    centred_norms: bool = False
    activation: str = "silu"
    mixers: tuple[str, ...] = ("full_attention",)
    rotary: dict[str, str] = field(default_factory=dict)
    experts: bool = False
    shared_expert: bool = False
    mlp_by_parameter: bool = False
    output_gate: bool = False
    fused_projections: bool = False
    clamped_experts: bool = False
    sinks: bool = False
    rope_scaling: Fields = field(default_factory=dict)
    multipliers: tuple[str, ...] = ()
    scaled_embeddings: bool = False
    scaled_window: bool = False
    classifier: str = ""


TABLES: Fields = json.loads(Path(__file__).with_name("families.json").read_text())
FAMILIES: Mapping[str, Family] = {k: Family(**v) for k, v in TABLES["families"].items()}
# Multimodal models by model_type; the text model's is the same with "_text". class_name: transformers' class.
# CausalLM, SequenceClassification: the classes that transformers' AutoModelFor... makes of the folder.
# prefix: what files have before the text model's names, where these differ from the names of modules.
MULTIMODAL: Mapping[str, dict[str, str]] = TABLES["multimodal"]


@dataclass(frozen=True)
class RopeScaling:
    """Say how rotary positions reach beyond the original window of so many tokens; names are those of config.json.

    Fields that a type does not use, or leaves to its default, are None.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        low, high = self.low_freq_factor or 1, self.high_freq_factor or 4
        if self.factor < 1 or fast <= slow or high <= low:
            raise ValueError(
                f"rotary scaling is {self.to_hf()} but needs a factor of at least 1, beta_fast above beta_slow and "
                "high_freq_factor above low_freq_factor; correct it"
            )

    def to_hf(self) -> Fields:
        """Return the table that transformers calls rope_scaling."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Multipliers:
    """Constants that some families multiply by; names are those of config.json."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what the mixer and the feed-forward add
    attention_multiplier: float | None = None  # of attention's scores; None is E^-1/2
    query_pre_attn_scalar: float | None = None  # attention's scores are multiplied by its ^-1/2
    logits_scaling: float = 1.0  # the logits are divided by it


@dataclass(frozen=True)
class Experts:
    """Describe the layers whose rows each go through a few of many MLPs; names are those of config.json."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False  # the weights of a row's experts are made to sum to 1
    shared_expert_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} but there are only num_experts = "
                f"{self.num_experts}; correct the config"
            )


@dataclass(frozen=True)
class Delta:
    """Describe the layers of linear attention; names are those of config.json."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    def __post_init__(self) -> None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.linear_num_value_heads} but must be a multiple of "
                f"linear_num_key_heads = {self.linear_num_key_heads}; correct the config"
            )

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """The number of heads and their width, of queries, keys and values, which lie side by side, of b and of a."""
        key = self.linear_num_key_heads, self.linear_key_head_dim
        heads = self.linear_num_value_heads
        return [[key, key, (heads, self.linear_value_head_dim)], [(heads, 1)], [(heads, 1)]]

    @property
    def widths(self) -> list[int]:
        """The columns of queries, keys and values."""
        return [heads * width for heads, width in self.parts[0]]
