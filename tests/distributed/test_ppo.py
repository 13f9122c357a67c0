"""PPO on real ranks under ZeRO-3: the step against the formula on fixed rollouts, and rollouts on any topology."""

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from losses.ppo import kl_estimate, ppo_policy_loss, ppo_value_loss
from models.arch import ModelConfig
from models.decoder import CausalLM, PolicyValue, RewardModel
from tests.engine_case import SHAPE, CaptureChain, ListDataset
from tests.harness import full, run_distributed
from tests.memory_case import assert_same_gradients
from tests.shuffled_loader import ShuffledLoader
from tests.zero_case import HostWeights, filled, frozen_engine, trained_engine
from ulysses.config.schema import Config, OptimizerSection, RunSection
from ulysses.config.stage_sections import PpoSection
from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.policies import StopOnNonFinite
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rollout import Rollout, RolloutMaker
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.run.optim import parameter_groups
from ulysses.run.trainer import Trainer
from ulysses.stages.referenced import logps_of
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.engine import ZeroEngine, gathered_weights

ODD = replace(
    SHAPE, num_attention_heads=3, num_key_value_heads=1
)  # query rows are split at every degree but 3
EOS = (3, 7, 11, 19, 23, 31, 40, 41, 52, 63, 70, 77, 85, 90)  # many: answers are ragged
OPTIONS = SamplingOptions(12, temperature=0.9, stop_tokens=EOS, seed=9)
FIXED = {"value_coefficient": 0.5, "entropy_coefficient": 0.01, "temperature": 0.8}
REAL = PpoSection(
    reward="a:b",
    epochs=2,
    minibatches=2,
    kl_coefficient=0.2,
    missing_eos_penalty=0.5,
    temperature=0.9,
)


class PromptDataset(ListDataset):
    def row(self, index: int) -> dict[str, Any]:
        return {"shift": 0.01 * index}


def reward(
    prompts: Any, answers: list[list[int]], rows: list[Any], indices: Any
) -> list[dict[str, float]]:
    """How many tokens are even, within -2 to 2, shifted by the example."""
    return [
        {"a:b": 4 * sum(v % 2 == 0 for v in answer) / len(answer) - 2 + row["shift"]}
        for answer, row in zip(answers, rows)
    ]


def prompts() -> PromptDataset:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 20, (14,), generator=draw).tolist()
    found = [torch.randint(0, 97, (n,), generator=draw) for n in lengths]
    return PromptDataset("prompt", [(Sequence(t, torch.zeros(len(t))),) for t in found])


def fixed_rollout(config: PpoSection, budget: int = 0) -> Rollout:
    """Twelve answers with made-up columns: ratios on both sides of the clip range, advantages of both signs.

    Without a value they answer three prompts, which they share within the budget.
    """
    draw, prompts, answers, parts = torch.Generator().manual_seed(9), [], [], []
    alone = config.advantage == "gae"
    for prompt in (30, 1, 12):
        prompts += [torch.randint(0, 97, (prompt,), generator=draw)] * (4 if alone else 1)
        for length in torch.randint(1, 25, (4,), generator=draw).tolist():
            answers.append(Completion(torch.randint(0, 97, (length,), generator=draw).tolist()))
            a, b, c, d = torch.randn(4, prompt + length, generator=draw)
            columns = {"old_logps": 0.4 * a - 4.6, "advantages": b, "old_values": 0.3 * c}
            columns |= {"returns": d, "reference_logps": 0.4 * c - 4.6}
            parts.append({**columns, "importance": d.exp().clamp(max=2.0)})
    by_length = config.loss_aggregation == "sequence"
    rollout = Rollout.of(0, prompts, answers, budget=budget, by_length=by_length)
    if config.mask_truncated:  # every third answer
        ends = rollout.ends.tolist()
        for n in range(0, 12, 3):
            rollout.columns["weights"][ends[n] - len(answers[n].tokens) : ends[n]] = 0
    for name in parts[0]:
        held = [part[name][left:] for part, left in zip(parts, rollout.prefixes.tolist())]
        rollout.columns[name] = torch.cat(held)
    return rollout


def engine_of(
    mesh: ParallelMesh, config: PpoSection, lr: float = 0.0, shape: ModelConfig = SHAPE
) -> ZeroEngine:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        scopes = {"policy": 1.0, "value": config.value_lr_factor} if value else None
        return parameter_groups(model, 0.0, scopes)

    value = config.advantage == "gae"
    kind = PolicyValue if value else CausalLM
    return trained_engine(lambda: kind(shape, mesh), HostWeights(shape, 0), lr, groups=groups)


def maker_of(
    engine: ZeroEngine, mesh: ParallelMesh, config: PpoSection, budget: int, **models: Any
) -> RolloutMaker:
    sampler = EngineSampler(engine, mesh, OPTIONS)
    rest: Any = {"engine": engine, "mesh": mesh, "config": config, "budget": budget}
    return RolloutMaker(sampler=sampler, shared_budget=budget, **rest, **models)


def trainer_of(
    sp: int,
    config: PpoSection,
    *,
    lr: float = 1e-3,
    budget: int = 128,
    packing_seed: int | None = None,
    reference_seed: int | None = 1,
    shape: ModelConfig = SHAPE,
) -> tuple[Trainer, CaptureChain]:
    """Build everything on this rank; without a reference it trains on made-up rollouts that never change."""
    initialize_distributed()
    mesh = ParallelMesh(sp, num_heads=shape.num_attention_heads)
    engine = engine_of(mesh, config, lr, shape)
    reference = None
    if reference_seed is not None:
        reference = logps_of(
            frozen_engine(lambda: CausalLM(shape, mesh), HostWeights(shape, reference_seed))
        )
    maker = maker_of(engine, mesh, config, budget, reference=reference, reward=reward)
    if reference_seed is None:
        maker.make = lambda *_: fixed_rollout(config, budget)  # type: ignore[method-assign]
    rate = OptimizerSection(lr=lr, schedule="constant", warmup=0)
    stage = PpoStage(
        Config(stage="ppo", ppo=config, run=RunSection(seed=0), optimizer=rate),
        engine,
        mesh,
        maker=maker,
        tolerance=1e-5 if reference_seed == 0 else math.inf,
    )
    loader = ShuffledLoader(
        prompts(),
        6,
        tokens_per_microbatch=budget,
        seed=3,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=mesh.dp_rank,
        packing_seed=packing_seed,
    )
    chain = CaptureChain()
    trainer = Trainer(
        stage=stage,
        loader=stage.loader(loader),
        total_steps=6,
        policies=chain,
    )
    return trainer, chain


def formula(
    config: PpoSection, shape: ModelConfig
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics (the loss among them) and gradients of the first step, one sequence at a time, float64, no ZeRO."""
    alone, data = config.advantage == "gae", fixed_rollout(config)
    model = (PolicyValue if alone else CausalLM)(shape, None, attention="reference")
    filled(model, HostWeights(shape, 0)).double()
    whole = (list(data[i].sequences) for i in range(len(data.lengths)))
    found = [
        model(pack_shard(s, ParallelMesh(1), "cpu"), entropy=True, temperature=0.8)
        for s in whole
    ]
    logps, entropy = (torch.cat([out[i] for out in found]) for i in (0, 1))
    c = {name: column.double() for name, column in data.columns.items()}
    trained, expected = (c["weights"].roll(-1) != 0).double(), {}
    lengths = data.lengths.tolist()
    ratioed = logps
    if config.ratio != "token":
        gaps = ((logps - c["old_logps"]) * trained).split(lengths)
        counts = [mask.sum().clamp(min=1) for mask in trained.split(lengths)]
        whole = [
            gap.sum() / (n if config.ratio == "mean" else 1) for gap, n in zip(gaps, counts)
        ]
        ratioed = c["old_logps"] + torch.stack(whole).repeat_interleave(data.lengths)
    policy = ppo_policy_loss(
        ratioed,
        c["old_logps"],
        c["advantages"],
        config.clip,
        dual_clip=config.dual_clip or None,
        kind=config.policy_loss,
    )
    each = (
        policy.losses * (c["importance"] if config.importance_cap else 1)
        - config.entropy_coefficient * entropy
    )
    if config.kl_in != "reward":
        kl = kl_estimate(logps, c["reference_logps"], config.kl_estimator)
        ratio = (ratioed - c["old_logps"]).exp() if config.kl_in == "loss_with_ratio" else 1
        each = each + config.kl_coefficient * kl * ratio
    if alone:
        values = ppo_value_loss(
            torch.cat([out[2] for out in found]),
            c["old_values"],
            c["returns"],
            config.value_clip,
        )
        each = each + config.value_coefficient * values.losses
        expected = {
            name: float((x * trained).sum() / trained.sum())
            for name, x in {
                "loss/policy_avg": policy.losses,
                "policy/clipfrac_avg": policy.clipped,
                "val/ratio": policy.ratios,
                "loss/value_avg": values.losses,
                "policy/approxkl_avg": 0.5 * (logps - c["old_logps"]).square(),
                "policy/entropy_avg": entropy,
            }.items()
        }
    sums, counts = (
        torch.stack([x.sum() for x in y.split(lengths)]) for y in (each * trained, trained)
    )
    loss = {
        "token": sums.sum() / counts.sum(),
        "sequence": (sums / counts.clamp(min=1)).mean(),
        "constant": sums.mean() / config.max_new_tokens,
    }[config.loss_aggregation]
    loss.backward()
    return expected | {"loss": float(loss)}, {n: p.grad for n, p in model.named_parameters()}


def fixed_steps(
    sp: int, config: PpoSection, steps: int = 1, gather: bool = False, **options: Any
) -> tuple[dict[str, float], Any]:
    """The last of some steps on a fixed rollout, with or without the sampler's gathering before each."""
    trainer, chain = trainer_of(
        sp, config, lr=1e-3 * (steps > 1), reference_seed=None, **options
    )
    for _ in range(steps):
        if gather:
            with gathered_weights(trainer.engine) as weights:
                assert (
                    all(w.numel() > 0 for w in weights.values())
                    and "model.norm.weight" in weights
                )
        metrics = trainer.train_step()
    trainer.engine.destroy()
    return metrics, chain.steps[-1] if dist.get_rank() == 0 else {}


GROUPED = {
    "advantage": "group",
    "answers_per_prompt": 4,
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
}


GSPO = GROUPED | {"ratio": "mean", "loss_aggregation": "sequence"}
RLOO = GROUPED | {
    "advantage": "leave_one_out",
    "ratio": "product",
    "loss_aggregation": "sequence",
}
IN_LOSS = {"kl_in": "loss_with_ratio", "kl_estimator": "k3"}


@pytest.mark.parametrize(
    ("world", "sp", "budget", "seed", "options", "shape"),
    [
        (4, 4, 64, 1, GSPO | IN_LOSS | {"importance_cap": 2.0}, ODD),
        (4, 2, 128, 2, GSPO | {"loss_aggregation": "token", "mask_truncated": True}, SHAPE),
        (4, 2, 64, 1, RLOO, SHAPE),
        (2, 2, 128, 1, GROUPED | {"policy_loss": "cispo", "mask_truncated": True}, SHAPE),
        (2, 1, 128, 1, GROUPED | {"dual_clip": 1.4, "ratio": "product"}, SHAPE),
        (4, 2, 64, 1, FIXED, SHAPE),
        (4, 4, 512, None, FIXED, ODD),
        (
            4,
            2,
            64,
            1,
            GROUPED | {"kl_in": "loss", "kl_estimator": "k2", "importance_cap": 2.0},
            SHAPE,
        ),
        (
            4,
            4,
            512,
            2,
            RLOO | {"ratio": "token", "loss_aggregation": "constant", "max_new_tokens": 25},
            SHAPE,
        ),
        *full(
            (1, 1, 128, None, GSPO | IN_LOSS | {"mask_truncated": True}, SHAPE),
            (1, 1, 128, None, FIXED, SHAPE),
            (1, 1, 128, None, GROUPED | IN_LOSS | {"loss_aggregation": "sequence"}, SHAPE),
            (4, 2, 64, 1, GROUPED | IN_LOSS, SHAPE),
            (4, 2, 64, 1, GSPO | {"policy_loss": "cispo"}, SHAPE),
            (2, 1, 512, 1, FIXED, SHAPE),
            (4, 2, 128, 1, FIXED, ODD),
        ),
    ],
)
def test_loss_metrics_and_gradients(
    world,
    sp,
    budget,
    seed,
    options,
    shape,
):
    """THE invariance test for PPO on a fixed rollout, policy and value parameters alike.

    Without a value answers share prompts, and equal the formula on separate sequences.
    """
    config = PpoSection(**options)
    expected, exact = formula(config, shape)
    how = {"budget": budget, "packing_seed": seed, "shape": shape}
    metrics, gradients = run_distributed(fixed_steps, world, sp, config, **how)[0]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(gradients, exact)
    if config.advantage == "gae":
        assert 0.05 < metrics["policy/clipfrac_avg"] < 0.95
    else:
        assert metrics["tokens_shared"] >= 3 * 29 * (
            budget > 100
        )  # the long prompt, for three of four answers


def run_steps(
    sp: int, config: PpoSection, steps: int, **options: Any
) -> tuple[list[dict[str, float]], Rollout, Any]:
    """Take real steps on real rollouts; returns metrics, the last rollout and the gradients."""
    trainer, chain = trainer_of(sp, config, **options)
    metrics = [trainer.train_step() for _ in range(steps)]
    return metrics, trainer.loader.rollout, chain.steps if dist.get_rank() == 0 else []


@cache
def alone(shape: ModelConfig = SHAPE, advantage: str = "gae") -> Any:
    """Two rollouts and a bit on one process, against another reference so that every term takes part."""
    return run_distributed(run_steps, 1, 1, real(advantage), 6, shape=shape)[0]


def trained(rollout: Rollout, name: str) -> torch.Tensor:
    """A column where answers are trained; how prompts are shared depends on the micro-batches."""
    predicts = rollout.columns["weights"].roll(-1) != 0
    assert name == "weights" or not rollout.columns[name][~predicts].any()
    return rollout.columns[name][predicts]


def real(advantage: str) -> PpoSection:
    return REAL.model_copy(
        update={
            "advantage": advantage,
            "answers_per_prompt": 1 if advantage == "gae" else 3,
        }
    )


@pytest.mark.parametrize(
    ("world", "sp", "budget", "shape", "advantage"),
    [
        (4, 2, 64, SHAPE, "gae"),
        (4, 4, 64, ODD, "gae"),
        (4, 4, 100, SHAPE, "group"),
        *full(
            (2, 2, 128, SHAPE, "gae"),
            (2, 1, 128, SHAPE, "group"),
            (4, 2, 64, SHAPE, "leave_one_out"),
        ),
    ],
)
def test_rollouts_do_not_depend_on_the_ranks(world, sp, budget, shape, advantage):
    """The same tokens, scores, advantages and gradients, whoever decoded what and however it was packed."""
    how = {"budget": budget, "shape": shape}
    found = run_distributed(run_steps, world, sp, real(advantage), 6, **how)
    metrics, rollout, gradients = alone(shape, advantage)
    assert len(rollout.answers) == 6 * real(advantage).answers_per_prompt
    for _, other, _ in found:
        assert [(a.tokens, a.score) for a in other.answers] == [
            (a.tokens, a.score) for a in rollout.answers
        ]
        assert other.columns.keys() == rollout.columns.keys()
        for name in rollout.columns.keys() - {"tokens"}:
            torch.testing.assert_close(
                trained(other, name), trained(rollout, name), rtol=1e-3, atol=2e-4
            )
    assert_same_gradients(found[0][2][0], gradients[0], 2e-5)
    for ours, theirs in zip(found[0][0], metrics, strict=True):
        for name in "loss objective/kl objective/scores val/ratio val/num_eos_tokens".split():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


def test_what_a_run_reports():
    metrics = alone()[0]
    first, fifth = metrics[0], metrics[4]
    assert [m["rollout"] for m in metrics] == [0, 0, 0, 0, 1, 1]
    assert all(
        m["sampler/logp_gap_max"] < 1e-4 for m in metrics
    )  # the sampler computes what the trainer computes
    assert [first["val/ratio"], fifth["val/ratio"]] == pytest.approx([1, 1], abs=1e-6)
    assert abs(metrics[1]["val/ratio"] - 1) > 1e-5
    assert 0 < first["val/num_eos_tokens"] < 6


def test_gathering_for_the_sampler_leaves_training_as_it_was():
    how = {"deterministic": True}
    plain, gathered = (
        run_distributed(fixed_steps, 2, 1, PpoSection(**FIXED), 2, gather, **how)[0][1]
        for gather in (False, True)
    )
    assert all(torch.equal(plain[name], gathered[name]) for name in plain)


def weights_of_steps(
    config: PpoSection, first: int, steps: int, **sampling: Any
) -> list[torch.Tensor]:
    """The weights before some steps and after each of them."""
    trainer, _ = trainer_of(2, config, lr=3e-3)
    trainer.step, trainer.loader.sampler.options = first, replace(OPTIONS, **sampling)
    weights = trainer.engine.partition.masters[0]
    found = [weights.detach().clone()]
    for _ in range(steps):
        trainer.train_step()
        found.append(weights.detach().clone())
    return found


@pytest.mark.parametrize(
    "options, first, steps, trained, sampling",
    [
        ({"epochs": 1, "minibatches": 4}, 8, 4, 2, {}),  # the last rollout has two prompts
        ({"mask_truncated": True}, 0, 1, 0, {"stop_tokens": ()}),
    ],
    ids=["no prompts", "all answers cut"],
)
def test_a_step_without_anything_to_train_leaves_the_weights_alone(
    options, first, steps, trained, sampling
):
    config = PpoSection(reward="a:b", temperature=0.9, **options)
    given = weights_of_steps, 2, config, first, steps
    for weights in run_distributed(*given, **sampling):
        changed = [not torch.equal(x, y) for x, y in pairwise(weights)]
        assert changed == [step < trained for step in range(steps)]


def numbers_of_a_bad_step() -> str:
    trainer, _ = trainer_of(2, PpoSection(**FIXED), reference_seed=None)
    trainer.policies = GradientPolicyChain([StopOnNonFinite()])
    losses = trainer.stage.losses
    trainer.stage.losses = lambda *args, **more: [  # type: ignore[method-assign]
        term._replace(value=term.value * math.nan) for term in losses(*args, **more)
    ]
    with pytest.raises(FloatingPointError) as caught:
        trainer.train_step()
    return str(caught.value)


def test_a_loss_that_is_not_finite_names_answers_of_the_rollout():
    """They are numbered there, and not in the data of prompts."""
    for told in run_distributed(numbers_of_a_bad_step, 2):
        assert re.search(r"loss is nan.*; examples \[\d+, .*\] \.\.\. of the rollout$", told), (
            told
        )


def model_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of three answers by the frozen engine, and by the plain model one answer at a time."""
    initialize_distributed()
    mesh = ParallelMesh(2, num_heads=SHAPE.num_attention_heads)
    config, source = PpoSection(reward="models/rm"), HostWeights(SHAPE, 4)
    scorer = frozen_engine(lambda: RewardModel(SHAPE, mesh), source)
    engine = engine_of(mesh, config)
    maker = maker_of(engine, mesh, config, 128, scorer=scorer)
    rollout = maker.answer(0, prompts(), [3, 1, 5])
    plain = filled(RewardModel(SHAPE, None, attention="reference"), source)
    with torch.no_grad():
        one = [
            plain(pack_shard(list(rollout[i].sequences), ParallelMesh(1), "cpu"))[-1]
            for i in range(3)
        ]
    return torch.tensor([answer.score for answer in rollout.answers]), torch.stack(one)


def test_rewards_from_a_model_are_read_at_the_answers_last_token():
    for found, expected in run_distributed(model_scores, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
