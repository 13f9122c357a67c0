"""PPO on real ranks under ZeRO-3: the step against the formula on fixed rollouts, and rollouts on any topology."""

import math
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
from tests.engine_case import SHAPE, CaptureChain, ListDataset, shuffled
from tests.harness import run_distributed
from tests.memory_case import assert_same_gradients
from tests.zero_case import HostWeights, filled, frozen_engine, trained_engine
from ulysses.config.schema import Config, OptimizerSection, RunSection
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rollout import Rollout, RolloutMaker
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.run.optim import adamw, parameter_groups
from ulysses.run.trainer import Trainer
from ulysses.stages.referenced import logps_of
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.engine import ZeroEngine, gathered_weights

# query rows are split at every degree but 3
ODD = replace(SHAPE, num_attention_heads=3, num_key_value_heads=1)
EOS = (3, 7, 11, 19, 23, 31, 40, 41, 52, 63, 70, 77, 85, 90)  # many: answers are ragged
OPTIONS = SamplingOptions(12, temperature=0.9, stop_tokens=EOS, seed=9)
FIXED = {"value_coefficient": 0.5, "entropy_coefficient": 0.01, "temperature": 0.8}
REAL = PpoSection(
    reward="a:b", epochs=2, minibatches=2, kl_coefficient=0.2, missing_eos_penalty=0.5, temperature=0.9
)  # fmt: skip


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
            parts.append({
                "old_logps": 0.4 * a - 4.6, "advantages": b, "old_values": 0.3 * c, "returns": d,
                "reference_logps": 0.4 * c - 4.6, "importance": d.exp().clamp(max=2.0),
            })  # fmt: skip
    by_length = config.loss_aggregation == "sequence"
    rollout = Rollout.of(0, prompts, answers, budget=budget, by_length=by_length)
    if config.mask_truncated:  # every third answer
        for end, answer in [*zip(rollout.ends.tolist(), answers)][::3]:
            rollout.columns["weights"][end - len(answer.tokens) : end] = 0
    for name in parts[0]:
        held = [part[name][left:] for part, left in zip(parts, rollout.prefixes.tolist())]
        rollout.columns[name] = torch.cat(held)
    return rollout


def engine_of(
    mesh: ParallelMesh, config: PpoSection, lr: float = 0.0, shape: ModelConfig = SHAPE
) -> ZeroEngine:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        scopes = {"policy": 1.0, "value": config.value_lr_factor} if value else None
        groups = parameter_groups(model, 0.0, scopes)
        return adamw(groups, OptimizerSection(lr=lr))

    value = config.advantage == "gae"
    kind = PolicyValue if value else CausalLM
    source = HostWeights(shape, 0)
    return trained_engine(lambda: kind(shape, mesh), source, optimizer=optimizer)


def maker_of(
    engine: ZeroEngine, mesh: ParallelMesh, config: PpoSection, budget: int, **models: Any
) -> RolloutMaker:
    sampler = EngineSampler(engine, mesh, OPTIONS)
    return RolloutMaker(
        sampler=sampler, engine=engine, mesh=mesh, config=config, budget=budget, shared_budget=budget, **models
    )  # fmt: skip


def trainer_of(
    sp: int, config: PpoSection, *, lr: float = 1e-3, budget: int = 128, packing_seed: int | None = None,
    fixed: bool = False, shape: ModelConfig = SHAPE,
) -> tuple[Trainer, CaptureChain]:  # fmt: skip
    """Build everything on this rank, with another reference, or for made-up rollouts that never change."""
    initialize_distributed()
    mesh = ParallelMesh(sp, num_heads=shape.num_attention_heads)
    engine, reference = engine_of(mesh, config, lr, shape), None
    if not fixed:
        other = frozen_engine(lambda: CausalLM(shape, mesh), HostWeights(shape, 1))
        reference = logps_of(other)
    maker = maker_of(engine, mesh, config, budget, reference=reference, reward=reward)
    if fixed:
        maker.make = lambda *_: fixed_rollout(config, budget)  # type: ignore[method-assign]
    rate = OptimizerSection(lr=lr, schedule="constant", warmup=0)
    settings = Config(stage="ppo", ppo=config, run=RunSection(seed=0), optimizer=rate)
    stage = PpoStage(settings, engine, mesh, maker=maker, tolerance=math.inf)
    loader = stage.loader(shuffled(prompts(), 6, mesh, budget, packing_seed))
    chain = CaptureChain()
    return Trainer(stage=stage, loader=loader, total_steps=6, policies=chain), chain


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

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum() for part in (x * trained).split(lengths)])

    counts = summed(trained)
    ratioed = logps
    if config.ratio != "token":
        whole = summed(logps - c["old_logps"])
        whole = whole / (counts.clamp(min=1) if config.ratio == "mean" else 1)
        ratioed = c["old_logps"] + whole.repeat_interleave(data.lengths)
    how = {"dual_clip": config.dual_clip or None, "kind": config.policy_loss}
    policy = ppo_policy_loss(ratioed, c["old_logps"], c["advantages"], config.clip, **how)
    each = policy.losses * (c["importance"] if config.importance_cap else 1)
    each = each - config.entropy_coefficient * entropy
    if config.kl_in != "reward":
        kl = kl_estimate(logps, c["reference_logps"], config.kl_estimator)
        ratio = (ratioed - c["old_logps"]).exp() if config.kl_in == "loss_with_ratio" else 1
        each = each + config.kl_coefficient * kl * ratio
    if alone:
        found = torch.cat([out[2] for out in found])
        values = ppo_value_loss(found, c["old_values"], c["returns"], config.value_clip)
        each = each + config.value_coefficient * values.losses
        means = {
            "loss/policy_avg": policy.losses, "policy/clipfrac_avg": policy.clipped, "val/ratio": policy.ratios,
            "loss/value_avg": values.losses, "policy/approxkl_avg": 0.5 * (logps - c["old_logps"]).square(),
            "policy/entropy_avg": entropy,
        }  # fmt: skip
        expected = {name: float(summed(x).sum() / counts.sum()) for name, x in means.items()}
    loss = {
        "token": summed(each).sum() / counts.sum(),
        "sequence": (summed(each) / counts.clamp(min=1)).mean(),
        "constant": summed(each).mean() / config.max_new_tokens,
    }[config.loss_aggregation]
    loss.backward()
    return expected | {"loss": float(loss)}, {n: p.grad for n, p in model.named_parameters()}


def fixed_steps(
    sp: int, config: PpoSection, steps: int = 1, gather: bool = False, **options: Any
) -> tuple[dict[str, float], Any]:
    """The last of some steps on a fixed rollout, with or without the sampler's gathering before each."""
    trainer, chain = trainer_of(sp, config, lr=1e-3 * (steps > 1), fixed=True, **options)
    for _ in range(steps):
        if gather:
            with gathered_weights(trainer.engine) as weights:
                assert all(w.numel() > 0 for w in weights.values())
                assert "model.norm.weight" in weights
        metrics = trainer.train_step()
    trainer.engine.destroy()
    return metrics, chain.steps[-1] if dist.get_rank() == 0 else {}


GROUPED = FIXED | {"advantage": "group", "answers_per_prompt": 4, "kl_coefficient": 0.3}
GSPO = GROUPED | {"ratio": "mean", "loss_aggregation": "sequence"}
RLOO = GSPO | {"advantage": "leave_one_out", "ratio": "product"}
IN_LOSS = {"kl_in": "loss_with_ratio", "kl_estimator": "k3"}
K2 = {"kl_in": "loss", "kl_estimator": "k2", "importance_cap": 2.0}
CONSTANT = {"ratio": "token", "loss_aggregation": "constant", "max_new_tokens": 25}


@pytest.mark.parametrize(
    "world, sp, budget, seed, options, shape",
    [
        (4, 4, 64, 1, GSPO | IN_LOSS | {"importance_cap": 2.0}, ODD),
        (4, 2, 128, 2, GSPO | {"loss_aggregation": "token", "mask_truncated": True}, SHAPE),
        (4, 2, 64, 1, RLOO, SHAPE),
        (2, 2, 128, 1, GROUPED | {"policy_loss": "cispo", "mask_truncated": True}, SHAPE),
        (2, 1, 128, 1, GROUPED | {"dual_clip": 1.4, "ratio": "product"}, SHAPE),
        (4, 2, 64, 1, FIXED, SHAPE),
        (4, 4, 512, None, FIXED, ODD),
        (4, 2, 64, 1, GROUPED | K2, SHAPE),
        (4, 4, 512, 2, RLOO | CONSTANT, SHAPE),
    ],
)
def test_loss_metrics_and_gradients(world, sp, budget, seed, options, shape):
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
    else:  # the long prompt, for three of four answers
        assert metrics["tokens_shared"] >= 3 * 29 * (budget > 100)


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
    answers = 1 if advantage == "gae" else 3
    return REAL.model_copy(update={"advantage": advantage, "answers_per_prompt": answers})


@pytest.mark.parametrize(
    "world, sp, budget, shape, advantage",
    [(4, 2, 64, SHAPE, "gae"), (4, 4, 64, ODD, "gae"), (4, 4, 100, SHAPE, "group")],
)
def test_rollouts_do_not_depend_on_the_ranks(world, sp, budget, shape, advantage):
    """The same tokens, scores, advantages and gradients, whoever decoded what and however it was packed."""
    how = {"budget": budget, "shape": shape}
    found = run_distributed(run_steps, world, sp, real(advantage), 6, **how)
    metrics, rollout, gradients = alone(shape, advantage)
    assert len(rollout.answers) == 6 * real(advantage).answers_per_prompt
    for _, other, _ in found:
        ours, theirs = ([(a.tokens, a.score) for a in one.answers] for one in (other, rollout))
        assert ours == theirs and other.columns.keys() == rollout.columns.keys()
        for name in rollout.columns.keys() - {"tokens"}:
            columns = (trained(one, name) for one in (other, rollout))
            torch.testing.assert_close(*columns, rtol=1e-3, atol=2e-4)
    assert_same_gradients(found[0][2][0], gradients[0], 2e-5)
    for ours, theirs in zip(found[0][0], metrics, strict=True):
        for name in "loss objective/kl objective/scores val/ratio val/num_eos_tokens".split():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


def test_what_a_run_reports():
    metrics = alone()[0]
    first, fifth = metrics[0], metrics[4]
    assert [m["rollout"] for m in metrics] == [0, 0, 0, 0, 1, 1]
    # the sampler computes what the trainer computes
    assert all(m["sampler/logp_gap_max"] < 1e-4 for m in metrics)
    assert [first["val/ratio"], fifth["val/ratio"]] == pytest.approx([1, 1], abs=1e-6)
    assert abs(metrics[1]["val/ratio"] - 1) > 1e-5
    assert 0 < first["val/num_eos_tokens"] < 6


def test_gathering_for_the_sampler_leaves_training_as_it_was():
    config, how = PpoSection(**FIXED), {"deterministic": True}
    plain, gathered = (
        run_distributed(fixed_steps, 2, 1, config, 2, gather, **how)[0][1]
        for gather in (False, True)
    )
    assert all(torch.equal(plain[name], gathered[name]) for name in plain)


def weights_of_steps(config: PpoSection) -> list[torch.Tensor]:
    """The weights before the steps of the last rollout and after each of them."""
    trainer, _ = trainer_of(2, config, lr=3e-3)
    trainer.step, weights = 8, trainer.engine.partition.masters[0]
    found = [weights.detach().clone()]
    for _ in range(config.minibatches):
        trainer.train_step()
        found.append(weights.detach().clone())
    return found


def test_a_step_without_anything_to_train_leaves_the_weights_alone():
    """The last rollout has two prompts for four steps."""
    config = PpoSection(reward="a:b", temperature=0.9, epochs=1, minibatches=4)
    for weights in run_distributed(weights_of_steps, 2, config):
        changed = [not torch.equal(x, y) for x, y in pairwise(weights)]
        assert changed == [True, True, False, False]


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
    alone = (pack_shard(list(rollout[i].sequences), ParallelMesh(1), "cpu") for i in range(3))
    with torch.no_grad():
        one = torch.stack([plain(batch)[-1] for batch in alone])
    return torch.tensor([answer.score for answer in rollout.answers]), one


def test_rewards_from_a_model_are_read_at_the_answers_last_token():
    for found, expected in run_distributed(model_scores, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
