"""PPO outside the loop: what a rollout holds, which steps it gives, where its scores come from, what is refused."""

import json
import math
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

import ulysses.rl.servers as servers
from losses.logprobs import LogProbs
from losses.ppo import group_advantages
from tests import rows_of
from tests.data_case import content
from tests.e2e.launch import tiny
from tests.engine_case import ListDataset, sequences
from tests.harness import PATIENCE, STUCK
from tests.sampling_server import SamplingServer
from tests.tiny_tokenizer import CHATML, write_tokenizer
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.schema import Config
from ulysses.config.section import UserCodeError
from ulysses.config.stage_sections import PpoSection, is_function
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rewards import Rewards, gsm8k_reward
from ulysses.rl.rollout import RolloutMaker
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.base import MetricSums

EOS = 2
# Three ragged answers; the second is cut at the limit; the first prompt holds an EOS token itself.
PROMPTS, ANSWERS = [[5, EOS, 7], [4], [6, 6]], [[8, 9, EOS], [11, 12, 13, 14], [EOS]]
PREDICTED_AT = [2, 3, 4, 6, 7, 8, 9, 12]


def answered(prompts=PROMPTS, answers=ANSWERS, number=0, budget=0):
    """Answers that score 1, 2 and -0.5 in turn; the second of every three was cut."""
    scored = zip(answers, cycle((1.0, 2.0, -0.5)), cycle((True, False, True)))
    each = len(answers) // len(prompts)
    found = []
    for n, (answer, score, ended) in enumerate(scored):
        drawn = answer, [0.0] * len(answer), [True] * len(answer), ended
        found.append(Trajectory(prompts[n // each], *drawn, n // each, n, score=score))
    return Rollout.of(number, found, tokens_per_microbatch=budget)


def ppo(settings=""):
    """The table of settings such as "lam=1 kl_in=loss"."""
    return PpoSection(**dict(setting.split("=") for setting in settings.split()))


def whitened(x):
    return (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt()


def ppo_stage(settings):
    stage = PpoStage(Config(stage="ppo", ppo=ppo(settings)))
    return replace(stage, maker=RolloutMaker(stage, parts=None, sampler=None))


SETTINGS = (
    "",
    "kl_estimator=k3 missing_eos_penalty=1 gamma=0.9",
    "kl_estimator=k2 lam=1 kl_coefficient=0.5",
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_rewards_advantages_and_returns_against_the_formula(settings):
    """One answer at a time; prompts take no part, and advantages are whitened over the whole rollout."""
    c = ppo(settings)
    flat = torch.randn(3, 14)
    rollout = answered()
    # the EOS of a prompt is not trained, an answer's is; each token is predicted one row before its own
    assert rollout.columns["weights"].nonzero().flatten().tolist() == [
        i + 1 for i in PREDICTED_AT
    ]
    ppo_stage(settings).maker.finish(rollout, *flat)
    old, values, reference = flat[:, PREDICTED_AT].double()
    d = old - reference
    kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[c.kl_estimator]
    rewards = -c.kl_coefficient * kl
    rewards[[2, 6, 7]] += torch.tensor([1.0, 2.0 - c.missing_eos_penalty, -0.5])
    advantages = torch.zeros(8).double()
    for t in reversed(range(8)):
        last = t in (2, 6, 7)
        value, later = (0.0, 0.0) if last else (values[t + 1], advantages[t + 1])
        advantages[t] = rewards[t] + c.gamma * (value + c.lam * later) - values[t]
    for name, wanted in ("advantages", whitened(advantages)), ("returns", advantages + values):
        column = rollout.columns[name]
        assert_close(column[PREDICTED_AT].double(), wanted, rtol=1e-5, atol=1e-5)
        assert not column.index_fill(0, torch.tensor(PREDICTED_AT), 0).any()
    expected = {
        "objective/rlhf_reward": rewards.sum(), "objective/kl": d.sum(), "objective/scores": 2.5,
        "response_length/mean": 8, "response_length/clip_ratio": 1,
    }  # fmt: skip
    for name, total in expected.items():
        assert rollout.metrics[name] == pytest.approx(float(total) / 3, rel=1e-5), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "reinforce++"])
def test_advantages_without_a_value(advantage, kl_in, masked):
    """Two prompts with three answers each; the KL lowers what an answer earns unless it is part of the loss.

    Where answers that were cut are masked, they keep their place in the comparison but neither weight nor columns, and
    their KL lowers no reward.
    """
    answers = [8, 9, EOS], [11, 12], [EOS], [6, EOS], [9] * 4, [3, 3, EOS]
    rollout = answered([[5, 7], [4]], answers)
    columns = [(a.score, a.ended or not masked, len(a.tokens)) for a in rollout.trajectories]
    scores, kept, lengths = map(torch.tensor, zip(*columns))
    scores, kept = scores.double(), kept.repeat_interleave(lengths).float()
    predicts = rollout.columns["weights"].roll(-1).bool()
    old, reference = torch.randn(2, len(predicts))
    settings = f"advantage={advantage} kl_in={kl_in} mask_truncated={masked}"
    given = "answers_per_prompt=3 kl_coefficient=0.3 importance_cap=1.1"
    ppo_stage(f"{settings} {given}").maker.finish(
        rollout, old, torch.zeros_like(old), reference
    )
    gaps = 0.3 * (kl_in == "reward") * kept * (old - reference)[predicts].double()
    to_come = [gap.flip(0).cumsum(0).flip(0) for gap in gaps.split(lengths.tolist())]
    if advantage == "reinforce++":
        wanted = whitened(scores.repeat_interleave(lengths) - torch.cat(to_come))
    else:
        earned = scores - torch.stack([gap[0] for gap in to_come])
        wanted = group_advantages(earned, torch.arange(6) // 3, advantage).repeat_interleave(
            lengths
        )
    found = {name: column[predicts] for name, column in rollout.columns.items()}
    assert_close(found["advantages"].double(), wanted * kept, rtol=1e-5, atol=1e-5)
    assert_close(found["old_logps"], old[predicts] * kept)
    # the sampler said 0 for every token
    assert_close(found["importance"], old[predicts].exp().clamp(max=1.1) * kept)
    assert_close(rollout.columns["weights"].roll(-1)[predicts], kept)
    assert ("reference_logps" in found) == (kl_in == "loss") and "returns" not in found


# Loss and gradient norm by GRPOTrainer of TRL 1.16.0. The first three are its "grpo", "bnpo" and "dapo", and "dr_grpo"
# with completions of at most 6 tokens; two answers were cut where they are masked.
TRL = """\
-0.015381882889378501 0.15495219760404010 loss_aggregation=sequence
 0.040833974275475620 0.14012963455909375 loss_aggregation=token
 0.017014155948114840 0.05838734773295572 loss_aggregation=constant
-0.045211785617463196 0.12479669221180260 loss_aggregation=sequence ratio=mean kl_in=loss_with_ratio
-0.120602550565462100 0.15052069683241784 loss_aggregation=sequence mask_truncated=true
-0.212531823343763530 0.21194098930486370 mask_truncated=true
 0.072882147079867480 0.15437024753458775 policy_loss=cispo
-0.023195110626355153 0.15228801721046370 loss_aggregation=sequence dual_clip=1.4"""


@pytest.mark.parametrize("case", TRL.splitlines())
def test_losses_equal_trls(case):
    """Eight answers to two prompts, with k3 of 0.04 in the loss and DAPO's clip range."""
    loss, gradient_norm, settings = case.split(maxsplit=2)
    lengths = (3, 1, 4, 2, 4, 2, 1, 3)
    scores = torch.tensor([1, 0, 0.5, 2, 0, -1, 1, 1]).double()
    given = "advantage=group answers_per_prompt=4 clip_high=0.28 kl_in=loss kl_estimator=k3"
    config = ppo(f"{given} kl_coefficient=0.04 max_new_tokens=6 {settings}")
    advantages, sequences, rows = group_advantages(scores, torch.arange(8) // 4), [], []
    for n, length in enumerate(lengths):
        # the last token of a sequence predicts nothing
        t = torch.arange(length + 1).double()
        columns = {
            "old_logps": torch.sin(2 * n + 5 * t) * 0.4 - 1.5,
            "reference_logps": torch.cos(n + 2 * t) * 0.4 - 1.5,
            "advantages": advantages[n].expand(length + 1),
        }
        weights = (t > 0) / (length if config.loss_aggregation == "sequence" else 1)
        weights *= not (config.mask_truncated and n in (2, 4))
        sequences.append(Sequence(t.long(), weights, columns))
        rows.append(torch.sin(3 * n + t + 1) * 0.4 - 1.5)
    logps = torch.cat(rows).requires_grad_()
    mesh, out = ParallelMesh(1), LogProbs(logps, torch.zeros_like(logps))
    stage = PpoStage(Config(stage="ppo", ppo=config), lambda *_, **__: out, mesh)
    batch = pack_shard(sequences, mesh, "cpu")
    terms = stage.losses(batch, MetricSums("cpu"))
    ours = sum(term.value * term.weight for term in terms) / stage.normalisers(batch)["tokens"]
    ours.backward()
    found = ours.item(), logps.grad.norm().item()
    assert found == pytest.approx((float(loss), float(gradient_norm)), rel=1e-6)


def test_answers_share_their_prompt_within_the_budget():
    answers = [[8] * length for length in (3, 2, 4, 1, 2, 2, 2, 2)]
    rollout = answered([[5, 7, 6], [4]], answers, budget=12)
    # 6 tokens, then 1 + 2 more; then 7 and 1 + 1 more; a prompt of one token is kept by every answer
    assert rollout.example_ids.tolist() == [0, 0, 2, 2, 4, 4, 4, 4]
    assert rollout.prefixes.tolist() == [0, 2, 0, 2, 0, 0, 0, 0]
    lengths = rollout.sequence_lengths[[0, 2, 4]].tolist()
    assert lengths == [[6, 3, 0, 0], [7, 2, 0, 0], [3, 3, 3, 3]]
    assert rollout.examples([1, 0]) == [4, 0, 2]


def turns(prompt, *said, group, episode, score=0.0):
    """A trajectory of one drawn turn after the other, with what is told between them: [drawn], [told], [drawn] ..."""
    sampled = [place % 2 == 0 for place, part in enumerate(said) for _ in part]
    tokens = sum(said, [])
    logps = [0.0] * len(tokens)
    return Trajectory(prompt, tokens, logps, sampled, True, group, episode, score=score)


def test_branches_of_episodes_leave_out_every_turn_that_another_holds(monkeypatch, tmp_path):
    monkeypatch.setattr("ulysses.rl.trajectory.FEWEST_SHARED", 2)
    found = [
        turns([5, 6], [7, 8, 9], [1], [4], group=3, episode=0),
        turns([5, 6], [7, 3], group=3, episode=1),
        turns([5, 6], [7, 8, 9], [2], [4, 4], group=3, episode=0),
        turns([9], [8], [7], group=1, episode=2),
        turns([5, 6], [7, 8], group=3, episode=3),
    ]
    rollout = Rollout.of(0, found, tokens_per_microbatch=15)
    # one token in common is not shared; two are, and what a branch is told another one has drawn
    order = [found[i] for i in (1, 4, 0, 2, 3)]
    assert rollout.trajectories == order and rollout.groups.tolist() == [0, 0, 0, 0, 1]
    assert rollout.prefixes.tolist() == [0, 1, 3, 4, 0]
    assert rollout.example_ids.tolist() == [0, 0, 0, 0, 4]
    wholes = [s.tokens.tolist() for i in (0, 4) for s in rollout[i].sequences]
    assert wholes == [one.whole.tolist() for one in order]
    assert rollout.columns["tokens"].tolist() == [
        5, 6, 7, 3, 6, 7, 8, 8, 9, 1, 4, 9, 2, 4, 4, 9, 8, 7,
    ]  # fmt: skip
    weights = [0, 0, 1, 1, 0, 3, 3, 0, 2, 0, 1, 0, 0, 1, 1, 0, 1, 0]
    assert rollout.columns["weights"].tolist() == weights
    assert rollout.examples([1]) == [4] and rollout.examples([1, 0]) == [4, 0]
    # a smaller budget begins an example, whose first sequence is whole; without one nothing is shared
    assert Rollout.of(0, found, tokens_per_microbatch=12).prefixes.tolist() == [0, 1, 3, 0, 0]
    apart = Rollout.of(0, found)
    assert apart.trajectories == order and apart.example_ids.tolist() == [0, 1, 2, 3, 4]
    # tokens that both draw may be kept apart
    drawn_twice = Rollout.of(0, found, tokens_per_microbatch=99, share_drawn=False)
    assert drawn_twice.prefixes.max() == 1 and drawn_twice.columns["weights"].max() == 1
    rollout.save(tmp_path / "rollout.safetensors")
    loaded = Rollout.load(tmp_path / "rollout.safetensors")
    assert loaded.examples([1, 0]) == [4, 0]
    for i in (0, 4):
        both = ([*map(content, one[i].sequences)] for one in (loaded, rollout))
        assert next(both) == next(both)


@pytest.mark.parametrize("advantage", ["group", "leave_one_out"])
def test_an_episode_counts_once_however_many_branches_it_has(advantage):
    """Groups of three episodes and of one, which learns nothing."""
    scores = {0: 1.0, 1: 4.0, 2: 2.0, 3: 9.0}
    branches = [(0, 0), (0, 1), (0, 1), (0, 2), (5, 3), (0, 1), (5, 3)]
    found = [
        turns([4], [6, place], group=group, episode=episode, score=scores[episode])
        for place, (group, episode) in enumerate(branches)
    ]
    rollout = Rollout.of(0, found)
    zeros = torch.zeros(len(rollout.columns["tokens"]))
    found = ppo_stage(f"advantage={advantage} kl_coefficient=0").maker
    found.finish(rollout, zeros, zeros, zeros)
    wanted = group_advantages(torch.tensor([1.0, 4, 2]).double(), torch.zeros(3), advantage)
    by_episode = [*wanted.tolist(), 0.0]
    got = rollout.columns["advantages"][rollout.ends - 2]
    expected = [by_episode[one.episode] for one in rollout.trajectories]
    assert got.tolist() == pytest.approx(expected)
    assert rollout.metrics["advantages/zero_groups"] == 0.5
    assert rollout.metrics["objective/scores"] == 4.0  # of four episodes


def test_a_rollout_from_longer_micro_batches_is_trained_as_it_was_laid_out():
    """A run continues a checkpoint on more processes, whose micro-batches are shorter."""
    data = ListDataset("prompt", [(s,) for s in sequences(2, 0)])
    prompts, stage = StepLoader(data, 2, tokens_per_microbatch=8, seed=3), ppo_stage("")
    stage.maker.rollout = answered([[1, 2, 3]] * 2, [[5] * 4] * 4, budget=20)
    served = [example for each in stage.micro_batches(prompts, 0) for example in each]
    assert sorted(len(example.sequences) for example in served) == [2, 2]


def test_every_pass_takes_every_answer_once_in_new_minibatches(monkeypatch):
    data = ListDataset("prompt", [(s,) for s in sequences(25, 0)])
    prompts, made = StepLoader(data, 10, tokens_per_microbatch=128, seed=3), []

    def make(number, dataset, indices, following):
        assert dataset is data and indices == prompts.indices(*divmod(number, 3))
        assert following is None
        made.append(number)
        return answered([[1, 2]] * len(indices), [[3]] * len(indices), number)

    stage, orders = ppo_stage("epochs=2 minibatches=3"), []
    monkeypatch.setattr(stage.maker, "make", make)
    for k in range(18):  # 25 prompts are 3 rollouts, the last of 5
        served = [example.index for each in stage.micro_batches(prompts, k) for example in each]
        orders.append(stage.rollout_examples(prompts, k))
        assert sorted(served) == sorted(orders[-1])
        # what the sentence says about a step that is not finite
        said = stage.trained_examples(prompts, k)
        assert said == f"examples {orders[-1]} ... of rollout {k // 6}"
    assert made == [0, 1, 2]
    for first, count in zip(range(0, 18, 3), (10, 10, 10, 10, 5, 5)):
        minibatches = orders[first : first + 3]
        assert sorted(sum(minibatches, [])) == list(range(count))
        assert {*map(len, minibatches)} <= {count // 3, count // 3 + 1}
    assert all(orders[i : i + 3] != orders[i + 3 : i + 6] for i in (0, 6, 12))


def test_first_step_identities():
    check = PpoStage(Config(stage="ppo"), tolerance=1e-5).check_first_step
    check({"policy/logp_change": 1e-7, "reference_gap": 1e-7})
    check({})  # of a step that trains nothing
    for name, whose in ("policy/logp_change", "its"), ("reference_gap", "their"):
        sentence = f"but {whose} log-probabilities differ by 0.01 per token"
        with pytest.raises(RuntimeError, match=sentence):
            check({name: 0.01})


class Letters:
    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


HALF, ALL, ANY, FAILS, *SPOILING = (
    f"tests.reward_functions:{name}"
    for name in "half all_at_once answers_with fails spoils_all spoils".split()
)


def called(rows, *names, workers=0, timeout=PATIENCE):
    """What rewards give the prompt "a" with the answer "bc" for every row; the first example is number 4."""
    answers = [Trajectory([97], [98, 99], [], [], True, row=4 + n) for n in range(len(rows))]
    with closing(Rewards(names, Letters(), workers, timeout)) as rewards:
        rewards(answers, lambda number: rows[number - 4])
    return [one.scores for one in answers]


def scores(name, *scales, sleep=0, **options):
    rows = [{"scale": x, "sleep": sleep} for x in scales]
    return [each[name] for each in called(rows, name, **options)]


def test_reward_functions():
    names = (HALF, "http://localhost:1/score", "meta-llama/reward", "C:/x y")
    assert [is_function(name) for name in names] == [True, True, False, False]
    assert scores(HALF, 2, 4) == [1.0, 0.5] and scores(ALL, 2, 4) == [4.0, 6.0]
    assert scores(HALF) == []
    finite = "half on example 4 returned nan; return a finite number"
    for scales, complaint in (
        ((1, 0), "half on example 5 failed: ZeroDivisionError"),
        ((math.nan,), finite),
    ):
        with pytest.raises(ValueError, match=complaint):
            scores(HALF, *scales)


def test_rewards_in_workers():
    assert scores(HALF, 1, 2, 4, workers=2) == [2.0, 1.0, 0.5]
    sentence = "half on example 4 took longer than ppo.reward_timeout, 0.2 s"
    with pytest.raises(ValueError, match=sentence):
        scores(HALF, 1, sleep=3600, workers=1, timeout=0.2)


# what a function of all answers returns for two of them, and what is said of it
BATCHES = r"""
[1, 2.0] =>
(True, 2) =>
np.array([1, 2]) =>
pd.Series([1.0, 2.0], index=[7, 8]) =>
torch.tensor([1, 2]) =>
[np.float32(1), torch.tensor(2.0)] =>
{'a': 1, 'b': 2} => returned {.a.: 1, .b.: 2} for 2 answers; return one number for each, in a list, tuple, array or
{1, 2} => returned {1, 2} for 2 answers
b'12' => returned b'12' for 2
bytearray(b'12') => returned bytearray\(b.12.\) for 2
'12' => returned '12' for 2
(x for x in [1, 2]) => returned <generator .* for 2
None => returned None for 2
np.float32(1) => returned 1.0 for 2
np.ones((2, 1)) => TypeError
[1, '2'] => TypeError: must be real number, not str
[1, None] => TypeError: must be real number, not NoneType
[1] => returned \[1\] for 2 answers
np.ones(3) => returned \[1.0, 1.0, 1.0\] for 2 answers
[1, float('inf')] => on example 5 returned inf; return a finite number
[1e300, 1] => on example 4 returned 1e\+300; return a finite number, of at most 2\^53
[1, -1e17] => on example 5 returned -1e\+17; return a finite number
[1, 10**400] => OverflowError
"""


@pytest.mark.parametrize("returned, sentence", rows_of(BATCHES))
def test_a_batch_reward_returns_a_row_of_numbers(returned, sentence):
    rows = [{"returns": returned}] * 2
    if not sentence:
        assert called(rows, ANY) == [{ANY: 1.0}, {ANY: 2.0}]
        return
    with pytest.raises(UserCodeError, match=f"the reward .*answers_with.*{sentence}") as caught:
        called(rows, ANY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_every_function_gets_its_own_copy_of_the_row(workers):
    row = {"tests": ["one"]}
    found = called([row, row], *SPOILING * 2, workers=workers)
    assert row == {"tests": ["one"]} and found == [dict(zip(SPOILING, (0.0, 4.0)))] * 2


# the way in which a reward goes wrong, and what is said of it
WAYS = r"""
leaves => failed: SystemExit: enough
interrupts => failed: KeyboardInterrupt
unpicklable => failed: tests.reward_functions.UnpicklableError: this and that \(reward_functions.py, line \d+\)
rude => failed: tests.reward_functions.RudeError: <exception str
lambda => failed: TypeError: must be real number, not function
text => failed: TypeError: must be real number, not str
exits => has ended its process with exit code 7
killed => has ended its process with exit code -9
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way, sentence", rows_of(WAYS))
def test_a_reward_that_fails_is_told_at_once_with_what_it_was(way, sentence, workers):
    if not workers and "ended" in sentence:
        return  # the witness of the run tells of it
    sentence = f"^the reward tests.reward_functions:fails on example 7 {sentence}"
    with pytest.raises(UserCodeError, match=sentence) as caught:
        called([{}, {}, {}, {"way": way}, {}], FAILS, workers=workers)
    assert "\n" not in str(caught.value)


def test_a_failure_waits_for_no_slower_answer():
    with pytest.raises(UserCodeError, match="on example 5 failed: ZeroDivisionError"):
        called([{"scale": 1, "sleep": STUCK}, {"scale": 0}], HALF, workers=2)


def test_rewards_of_a_server(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    server = SamplingServer()
    url = f"{server.address}/score"
    assert scores(url, 1, 2) == [2.0, 1.0]
    for server.scores, server.fault, complaint in (
        ([1.0], "", r"returned \[1.0\] for 2 answers"),
        ("good", "", "returned 'good' for 2 answers"),
        ([], "hang", "failed: TimeoutError: timed out after 0.4 s"),
    ):
        with pytest.raises(ValueError, match=f"the reward {url} .*{complaint}"):
            scores(url, 1, 2, timeout=0.2 if server.fault else PATIENCE)
    server.close()


def test_several_rewards_have_weights_and_held_out_prompts_show_each_by_name():
    assert PpoSection().reward == {}
    assert PpoSection(reward=[HALF, ALL, HALF]).reward == {HALF: 2.0, ALL: 1.0}
    section = PpoSection(reward={"models/rm": 0.5, HALF: 2.0})
    assert section.reward_model == "models/rm"
    rounds = [answered(), answered(PROMPTS[:1], ANSWERS[:1])]
    for row, answer in enumerate(rounds[0].trajectories + rounds[1].trajectories):
        answer.row = row
        answer.scores = {"models/rm": 3.0, HALF: answer.score}
    asked = Mock(scored=lambda number, *_: rounds[number % 2])
    stage = PpoStage(Config(stage="ppo", ppo=section), maker=asked)
    prompts = Mock(steps_per_epoch=2)
    prompts.indices.return_value = [0]
    prompts.sets.return_value = {"": prompts}
    metrics = stage.evaluate(prompts)
    assert metrics["objective/scores"] == pytest.approx(3.5 / 4) == -metrics["loss"]
    assert metrics["objective/scores/models/rm"] == 3
    assert metrics[f"objective/scores/{HALF}"] == pytest.approx(3.5 / 4)


# what is said, the row's answer as JSON, and the score
VERIFIED = r"""
3 + 4 = 7, so she pays $1,007. => "3 and 4\n#### 1007" => 1
The answer is 7.0 => "7" => 1
7 apples, 8 pears => "7" => 0
It is -3, => -3 => 1
no idea => "nor here" => 0
"""


@pytest.mark.parametrize("completion, answer, score", rows_of(VERIFIED))
def test_verifiable_reward(completion, answer, score):
    assert gsm8k_reward("", completion, {"answer": json.loads(answer)}) == float(score)


def test_answers_end_with_a_turn(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="<|endoftext|>")
    line = tiny("ppo", tmp_path / "run", model__tokenizer=folder, data__chat_template="chatml")
    plan = prepare(parse_command_line(line).config, 1)
    parts = Mock(
        frozen={}, weights=plan.weights, tokenizer=plan.tokenizer, resources=ExitStack()
    )
    sampler = PpoStage(plan.config).build(parts).maker.sampler
    names = plan.tokenizer.convert_ids_to_tokens(sampler.options.stop_tokens)
    # the template ends turns with <|im_end|>
    assert sorted(names) == ["<|endoftext|>", "<|im_end|>"]
