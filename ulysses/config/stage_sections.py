"""The tables of the stages: the settings that one training algorithm reads, and its usual learning rate."""

import re
from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from ulysses.config.section import Fraction, PathOrName, PathOrWord, Section, Share, Values

# Every stage in the order of --help, with its usual learning rate and the reason for it.
LEARNING_RATES = {
    "pt": (
        2e-5,
        "continued pre-training keeps what the model knows; from random weights 3e-4 is usual",
    ),
    "sft": (1e-5, "fine-tuning all weights of a pre-trained model commonly takes 1e-5 to 2e-5"),
    "distill": (
        1e-5,
        "learning from a teacher is fine-tuning, whose usual rates are 1e-5 to 2e-5",
    ),
    "rm": (5e-6, "a reward model overfits its pairs within an epoch at higher rates"),
    "dpo": (5e-7, "preference losses move far on small differences: 5e-7 to 1e-6 is usual"),
    "kto": (5e-7, "its authors recommend 5e-7 to 5e-6, and the lowest is safe without tuning"),
    "ppo": (1e-6, "the policy must stay close to the one that made the rollout"),
}

# A server's address. Credentials behind its path match too: they are refused with those of all settings.
ADDRESS = r"^(vllm|sglang)\+https?://[^/\s]+/?([?#;].*)?$|^rows$"
ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
# names in a list weigh 1, and one that stands there twice weighs 2
WEIGHED = BeforeValidator(
    lambda value: Counter(map(str, value)) if isinstance(value, list) else value
)


class PtSection(Section):
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean log-sum-exp squared, which keeps logits small (PaLM uses 1e-4); 0 is off."""


class SftSection(Section):
    loss_type: Literal["nll", "dft"] = "nll"
    """"nll", or "dft" (dynamic fine-tuning: each token's loss times its own probability)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean log-sum-exp squared (PaLM uses 1e-4); 0 is off."""
    label_smoothing: Share = 0.0
    """Share of the target spread evenly over the vocabulary; 0 is off."""


class DistillSection(Section):
    teacher: PathOrName = ""
    """Folder or hub id of the model to learn from, which must have the student's tokenizer."""
    jsd_beta: Fraction = 0.0
    """Divergence from the teacher: 0 is forward KL, 1 reverse KL, and between them the generalised Jensen-Shannon
    divergence (GKD, arXiv 2306.13649)."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both models in the divergence."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the trained tokens, which is added to the divergence."""
    on_policy: Fraction = 0.0
    """Share of the rows whose (last) answer the student samples itself in every step (GKD's lambda), as the settings of
    sampling in the table ppo say. At 1 rows need no answer."""


class RmSection(Section):
    center_coefficient: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected score)^2, which centres the scores (0.01 in arXiv 2312.09244); 0 is off."""


class DpoSection(Section):
    beta: PositiveFloat = 0.1
    """Strength of the implicit KL constraint."""
    loss_type: str | list[str] = "sigmoid"
    """Preference loss, or a list of losses to add: any of those of losses/preference.py, such as ipo, simpo or orpo."""
    loss_weights: list[NonNegativeFloat] = []
    """Weight of each loss in a list; an empty list weighs all with 1."""
    label_smoothing: float = 0.0
    """Assumed share of flipped labels (cDPO), at least 0 and below 0.5."""
    simpo_gamma: NonNegativeFloat = 0.5
    """SimPO's target margin (with loss_type "simpo")."""
    discopop_tau: float = 0.05
    """Temperature of the blend between the two parts of "discopop", above 0 and at most 1."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence from the reference in sigmoid, robust, hinge, exo_pair and discopop; "reverse_kl" is plain DPO."""
    f_alpha: float = 0.5
    """Parameter of the "alpha" divergence; not 1."""
    ld_alpha: Fraction = 1.0
    """LD-DPO: weight of the tokens beyond the shorter answer's length, for policy and reference; 1 is plain DPO."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the token-mean negative log-likelihood of the chosen answers."""
    reference: PathOrName = "cached"
    """"cached" (the initial policy's log-probabilities, computed once), "live" (a frozen copy) or a model's path."""

    @property
    def loss_types(self) -> list[str]:
        return [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type


class KtoSection(Section):
    beta: PositiveFloat = 0.1
    """Strength of the implicit KL constraint."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """"kto", or "apo_zero_unpaired", which has no KL baseline and costs no pass for it."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of good answers; keep desirable_weight * good / (undesirable_weight * bad) within 1 and 4/3."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of bad answers."""
    reference: PathOrName = "live"
    """"live", a frozen copy of the initial policy, or another model's path."""


def is_function(reward: str) -> bool:
    """Return whether ppo.reward names a Python function or a server rather than a model."""
    return re.fullmatch(r"https?://.*|[\w.]+:\w+", reward) is not None


class PpoSection(Section):
    reward: Annotated[dict[PathOrName, float], WEIGHED, ONE_OR_MORE] = {}
    """What scores an answer: module:function of (prompt, completion, row) or (prompts, completions, rows), a server's
    http://address, a reward model's folder or hub id, a list of these, whose scores are added, or {reward = weight}."""
    reward_workers: int = Field(0, ge=0, le=1024)
    """Processes beside each training process that call reward functions of one answer; 0 calls them in line."""
    reward_timeout: float = Field(60.0, gt=0, le=1e6)
    """Seconds that a worker or a server may take for one answer, and an episode between two calls of the model."""
    rollout: str = Field("", pattern=r"^([\w.]+:\w+)?$")
    """module:function, an async function of (row, model), which makes an episode of several turns by calls of the
    model and returns its score, or None: then ppo.reward scores the whole episode. Empty: one answer."""
    max_episode_tokens: NonNegativeInt = 0
    """Most tokens of an episode, or of each of its branches, with its first prompt; 0 is data.max_length +
    max_new_tokens."""
    reference: PathOrName = "live"
    """What the KL penalty is measured against: "live", a frozen copy of the initial policy, or another model's path."""
    advantage: Literal["gae", "group", "leave_one_out", "reinforce++"] = "gae"
    """Where advantages come from: gae trains a value model; the others need none, and compare answers instead. Those of
    gae and reinforce++ are shifted and scaled to mean 0 and variance 1 over the whole rollout."""
    answers_per_prompt: PositiveInt = 1
    """Answers sampled for each prompt; group and leave_one_out need at least 2."""
    scale_by_std: bool | Literal["batch"] = True
    """Divide group advantages by the standard deviation of the group's scores, or of the whole rollout's ("batch");
    false is Dr. GRPO (2503.20783)."""
    value_lr_factor: NonNegativeFloat = 1.0
    """Learning rate of the value's parameters as a multiple of optimizer.lr."""
    epochs: PositiveInt = 4
    """Passes over each rollout, the answers to batch.examples prompts."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass, each on its own share of the rollout's prompts."""
    max_new_tokens: PositiveInt = 256
    """Longest answer in tokens, or longest turn of an episode."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, in sampling and in training alike."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the likeliest tokens that hold this probability; 1 is all. The KL penalty assumes 1."""
    top_k: NonNegativeInt = 0
    """Sample among this many of the likeliest tokens; 0 is all. The KL penalty assumes 0."""
    generation_batch: PositiveInt | Literal["auto"] = "auto"
    """Answers that each process decodes, or asks servers for, at a time; changes memory and speed only. auto is what a
    GPU's free memory holds, up to 512, and 64 elsewhere."""
    sampler: Annotated[list[Annotated[str, Field(pattern=ADDRESS)]], ONE_OR_MORE] = []
    """Servers that sample instead of this engine: vllm+http://host:port or sglang+http://host:port, or a list; or
    "rows": nothing is sampled, because data.train holds trajectories."""
    sampler_sync: Literal["disk", "nccl", "gloo"] = "disk"
    """How servers get the weights: from sampler_folder, or from rank 0 over the network: nccl is for GPUs."""
    sampler_folder: PathOrWord = ""
    """Where the policy is exported for the servers, on a disk that they share with rank 0; default OUTPUT/sampler."""
    sampler_reload: Values = {}
    """{path = body} of the calls that make a server read that folder (FOLDER in a body); empty takes the dialect's."""
    sampler_sync_every: PositiveInt = 1
    """Rollouts from one export for the servers to the next."""
    sampler_timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds that a server may take for one request."""
    rollouts_ahead: int = Field(0, ge=0, le=1)
    """1: servers answer the next rollout's prompts while this one is trained; needs importance_cap."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of answers that did not end within max_new_tokens; 0 is off."""
    kl_coefficient: NonNegativeFloat = 0.05
    """Weight of the per-token KL penalty; 0 is off and needs no reference."""
    kl_in: Literal["reward", "loss", "loss_with_ratio"] = "reward"
    """Subtract the KL from the reward of each token, or add it to the loss as GRPO does (with k2 or k3: the gradient of
    k1 in a loss is zero on average), also times the token's ratio, through which it is differentiated too (with k3)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL: d, d^2 / 2 or exp(-d) - 1 + d, with d the log-ratio to the reference."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE's lambda: 1 is the plain return minus the value, 0 one step ahead only."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens (DAPO); mean over answers of their tokens' means (GRPO); or the tokens' sum divided by
    answers times max_new_tokens, or max_episode_tokens if it is set (Dr. GRPO)."""
    importance_cap: NonNegativeFloat = 0.0
    """Weigh each token's loss by the ratio of its probabilities in trainer and sampler, at most this (commonly 2); 0
    does not weigh."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """How a token's probability ratio is bounded: PPO's clipped loss, or as a weight without gradient (CISPO,
    2506.13585), at most 1 + clip_high, with which all tokens learn."""
    ratio: Literal["token", "mean", "product"] = "token"
    """Which ratio that is: each token's own, or one for all of an answer, the geometric mean of its tokens' ratios
    (GSPO, 2507.18071) or their product (RLOO)."""
    clip: Share = 0.2
    """Clip range of the probability ratio."""
    clip_high: NonNegativeFloat = 0.0
    """Upper side of the clip range if it differs (0.28 in DAPO, arXiv 2503.14476); 0 means clip."""
    dual_clip: NonNegativeFloat = 0.0
    """Largest ratio that a negative advantage is multiplied by (commonly 3, arXiv 1912.09729); 0 is no bound."""
    mask_truncated: bool = False
    """Leave answers that did not end within max_new_tokens out of the loss (DAPO); others are still compared with
    them."""
    value_clip: NonNegativeFloat = 0.2
    """Clip range of the value around the rollout's; 0 is off."""
    value_coefficient: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    @property
    def reward_model(self) -> str:
        """The reward that is a model, or nothing."""
        return next((name for name in self.reward if not is_function(name)), "")

    @property
    def needs_value(self) -> bool:
        """Whether advantages come from a value."""
        return self.advantage == "gae"

    @property
    def compares_answers(self) -> bool:
        """Whether advantages come from the other answers to the same prompt."""
        return self.advantage in ("group", "leave_one_out")

    @property
    def takes_rows(self) -> bool:
        """Whether the trajectories come from rows, and not from a sampler."""
        return "rows" in self.sampler

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on the answers of one rollout."""
        return self.epochs * self.minibatches

    @property
    def planned_batch(self) -> int:
        """Answers at a time that a plan counts on: one, where a GPU's free memory says how many there are."""
        return 1 if self.generation_batch == "auto" else self.generation_batch


# the settings of the table ppo that other stages that sample do not read
SAMPLING = "max_new_tokens", "temperature", "top_p", "top_k", "generation_batch", "sampler"
NOT_OF_SAMPLING = tuple(
    f"ppo.{name}" for name in PpoSection.model_fields if not name.startswith(SAMPLING)
)
