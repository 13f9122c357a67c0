"""PPO outside the loop: what a rollout holds, which steps it gives, where its scores come from, what is refused."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import ulysses.rl.servers as servers
from losses.logprobs import LogProbs
from losses.ppo import group_advantages
from tests.e2e.launch import tiny
from tests.engine_case import ListDataset, sequences
from tests.sampling_server import SamplingServer
from tests.tiny_tokenizer import CHATML, write_tokenizer
from ulysses.config.command_line import parse_command_line
from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection, is_function
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rewards import Rewards, gsm8k_reward
from ulysses.rl.rollout import Rollout, RolloutMaker
from ulysses.rl.sampler import Completion
from ulysses.run.preflight import prepare
from ulysses.run.watch import Watch
from ulysses.stages.base import MetricSums

EOS = 2
# Three ragged answers; the second is cut at the limit; the first prompt holds an EOS token itself.
ROWS = [([5, EOS, 7], [8, 9, EOS]), ([4], [11, 12, 13, 14]), ([6, 6], [EOS])]
PREDICTED_AT = [2, 3, 4, 6, 7, 8, 9, 12]


def answered(rows=ROWS, number=0, answers_per_prompt=1, **rest):
    scored = zip(rows, (1.0, 2.0, -0.5) * len(rows), (True, False, True) * len(rows))
    answers = [Completion(a, [0.0] * len(a), ended, score) for (_, a), score, ended in scored]
    return Rollout.of(
        number, [torch.tensor(p) for p, _ in rows[::answers_per_prompt]], answers, **rest
    )


def maker(**options):
    rest = dict.fromkeys(("engine", "mesh", "sampler", "budget"))
    return RolloutMaker(config=PpoSection(**options), **rest)


@pytest.mark.parametrize(
    "options",
    map(json.loads, """{}
{"kl_estimator": "k3", "missing_eos_penalty": 1.0, "gamma": 0.9}
{"kl_estimator": "k2", "lam": 1.0, "kl_coefficient": 0.5}""".splitlines()),
    ids=str,
)
def test_rewards_advantages_and_returns_against_the_formula(options):
    """One answer at a time; prompts take no part, and advantages are whitened over the whole rollout."""
    c = PpoSection(**options)
    flat = torch.randn(3, 14)
    rollout = answered()
    maker(**options).finish(rollout, *flat)
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
    deviation = (advantages.var(correction=0) + 1e-8).sqrt()
    expected = {
        "advantages": (advantages - advantages.mean()) / deviation,
        "returns": advantages + values,
    }
    for name, wanted in expected.items():
        column = rollout.columns[name]
        found = column[PREDICTED_AT].double()
        assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not column.index_fill(0, torch.tensor(PREDICTED_AT), 0).any()
    expected = {
        "objective/rlhf_reward": float(rewards.sum()) / 3,
        "objective/kl": float(d.sum()) / 3,
        "objective/scores": 2.5 / 3,
        "response_length/mean": 8 / 3,
        "response_length/clip_ratio": 1 / 3,
    }
    found = {name: rollout.metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "reinforce++"])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_advantages_without_a_value(advantage, kl_in):
    """Two prompts with three answers each; the KL lowers what an answer earns unless it is part of the loss."""
    rows = [([5, 7], a) for a in ([8, 9, EOS], [11, 12], [EOS])]
    rows += [([4], a) for a in ([6, EOS], [9] * 4, [3, 3, EOS])]
    options = {"kl_in": kl_in, "kl_coefficient": 0.3, "answers_per_prompt": 3}
    scores = torch.tensor((1.0, 2.0, -0.5) * 2, dtype=torch.float64)
    rollout = answered(rows, answers_per_prompt=3)
    predicts = rollout.columns["weights"].roll(-1).bool()
    old, reference = torch.randn(2, len(predicts))
    made = maker(advantage=advantage, importance_cap=1.1, **options)
    made.finish(rollout, old, torch.zeros_like(old), reference)
    lengths = torch.tensor([len(a) for _, a in rows])
    gaps = 0.3 * (kl_in == "reward") * (old - reference)[predicts].double()
    to_come = [gap.flip(0).cumsum(0).flip(0) for gap in gaps.split(lengths.tolist())]
    if advantage == "reinforce++":
        wanted = scores.repeat_interleave(lengths) - torch.cat(to_come)
        wanted = (wanted - wanted.mean()) / (wanted.var(correction=0) + 1e-8).sqrt()
    else:
        earned = scores - torch.stack([gap[0] for gap in to_come])
        wanted = group_advantages(earned, 3, advantage).repeat_interleave(lengths)
    found = rollout.columns["advantages"][predicts].double()
    assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert ("reference_logps" in rollout.columns) == (kl_in == "loss")
    assert "returns" not in rollout.columns
    ratio = old[predicts].exp()  # the sampler said 0 for every token
    importance = rollout.columns["importance"][predicts]
    assert_close(importance, ratio.clamp(max=1.1))


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_answers_that_were_cut_are_left_out(kl_in):
    """They keep their place in the comparison but neither weight nor columns, and their KL lowers no reward."""
    rows = [([5, 7], a) for a in ([8, 9, EOS], [11, 12], [EOS])]
    options = {"kl_in": kl_in, "kl_coefficient": 0.3, "answers_per_prompt": 3}
    found, drawn = [], torch.randn(2, 12)
    for masked in (False, True):
        rollout = answered(rows, answers_per_prompt=3)
        in_answer = rollout.columns["weights"] != 0
        old, reference = drawn.clone()
        if masked:  # the second answer's tokens
            reference[6:8] = old[6:8]
        made = maker(advantage="group", mask_truncated=not masked, **options)
        made.finish(rollout, old, torch.zeros_like(old), reference)
        found.append(rollout.columns)
    left_out, plain = found
    assert left_out["weights"][in_answer].tolist() == [1, 1, 1, 0, 0, 1]
    assert plain["weights"][in_answer].tolist() == [1] * 6
    kept = left_out["weights"].roll(-1) != 0
    for name in ("advantages", "old_logps"):
        assert_close(left_out[name], plain[name] * kept)
        assert plain[name][6:8].all()


# Options | loss | norm of the gradient, by GRPOTrainer of TRL 1.16.0. "constant" is with completions of at most 6
# tokens; where mask_truncated is set, two answers were cut.
TRL = """
{"loss_aggregation": "sequence"} | -0.015381882889378501 | 0.1549521976040401
{"loss_aggregation": "token"} | 0.04083397427547562 | 0.14012963455909375
{"loss_aggregation": "constant"} | 0.01701415594811484 | 0.05838734773295572
{"loss_aggregation": "sequence", "ratio": "mean", "kl_in": "loss_with_ratio"} | -0.045211785617463196 | \
0.1247966922118026
{"loss_aggregation": "sequence", "mask_truncated": true} | -0.1206025505654621 | 0.15052069683241784
{"mask_truncated": true} | -0.21253182334376353 | 0.2119409893048637
{"policy_loss": "cispo"} | 0.07288214707986748 | 0.15437024753458775
{"loss_aggregation": "sequence", "dual_clip": 1.4} | -0.023195110626355153 | 0.1522880172104637
""".replace("\\\n", "")


@pytest.mark.parametrize("line", TRL.strip().splitlines())
def test_losses_equal_trls(line):
    """Eight answers to two prompts, with k3 of 0.04 in the loss and DAPO's clip range."""
    lengths = (3, 1, 4, 2, 4, 2, 1, 3)
    scores = torch.tensor([1, 0, 0.5, 2, 0, -1, 1, 1]).double()
    given = {"advantage": "group", "answers_per_prompt": 4, "clip_high": 0.28, "kl_in": "loss"}
    options, *wanted = map(json.loads, line.split(" | "))
    given |= {"kl_estimator": "k3", "kl_coefficient": 0.04, "max_new_tokens": 6, **options}
    config = PpoSection(**given)
    advantages, found, made, rows = group_advantages(scores, 4), [], [], []
    for n, length in enumerate(lengths):
        t = torch.arange(length).double()
        weight = 1 / length if config.loss_aggregation == "sequence" else 1.0
        weight *= not (config.mask_truncated and n in (2, 4))
        columns = {
            "old_logps": -1.5 + 0.4 * torch.sin(2 * n + 5 * t),
            "advantages": advantages[n].expand(length),
            "reference_logps": -1.5 + 0.4 * torch.cos(n + 2 * t),
        }
        columns = {name: torch.cat([x, torch.zeros(1)]) for name, x in columns.items()}
        weights = torch.tensor([0.0] + [weight] * length)
        found.append(Sequence(torch.arange(length + 1), weights, columns))
        made.append((-1.5 + 0.4 * torch.sin(3 * n + t + 1)).requires_grad_())
        rows += [made[-1], torch.zeros(1)]
    logps = torch.cat(rows)
    mesh, out = ParallelMesh(1), LogProbs(logps, torch.zeros_like(logps))
    stage = PpoStage(Config(stage="ppo", ppo=config), lambda *_, **__: out, mesh)
    batch = pack_shard(found, mesh, "cpu")
    terms = stage.losses(batch, MetricSums("cpu"))
    ours = sum(term.value * term.weight for term in terms)
    ours = ours / stage.normalisers(batch)["tokens"]
    ours.backward()
    norm = torch.cat([x.grad for x in made]).norm()
    assert [float(ours), float(norm)] == pytest.approx(wanted, rel=1e-6)


def test_answers_share_their_prompt_within_the_budget():
    rows = [([5, 7, 6], [8] * n) for n in (3, 2, 4, 1)]
    rows += [([4], [6, 6])] * 4
    rollout = answered(rows, answers_per_prompt=4, budget=12)
    # 6 tokens, then 1 + 2 more; then 7 and 1 + 1 more; a prompt of one token is kept by every answer
    assert rollout.owners.tolist() == [0, 0, 2, 2, 4, 4, 4, 4]
    assert rollout.prefixes.tolist() == [0, 2, 0, 2, 0, 0, 0, 0]
    lengths = rollout.sequence_lengths[[0, 2, 4]].tolist()
    assert lengths == [[6, 3, 0, 0], [7, 2, 0, 0], [3, 3, 3, 3]]
    assert rollout.examples([1, 0]) == [4, 0, 2]


def test_the_score_is_earned_by_the_eos_token_itself():
    """Without KL, discount or values, every prediction of an answer returns its score, the last one being EOS's."""

    def first_answer(lam):
        rollout = answered()
        maker(kl_coefficient=0.0, lam=lam).finish(rollout, *torch.zeros(3, 14))
        return rollout[0].sequences[0]

    first = first_answer(1.0)
    trained = torch.nonzero(first.loss_weights).flatten()
    # the EOS of the prompt is not trained, the answer's is
    assert first.tokens[trained].tolist() == [8, 9, EOS]
    # rows 2, 3 and 4 predict 8, 9 and EOS
    assert first.token_columns["returns"].tolist() == [0, 0, 1, 1, 1, 0]
    assert first_answer(0.0).token_columns["returns"].tolist() == [0, 0, 0, 0, 1, 0]


def test_every_pass_takes_every_answer_once_in_new_minibatches(monkeypatch):
    data = ListDataset("prompt", [(s,) for s in sequences(25, 0)])
    prompts, made = StepLoader(data, 10, tokens_per_microbatch=128, seed=3), []

    def make(number, dataset, indices):
        assert dataset is data and indices == prompts.indices(*divmod(number, 3))
        made.append(number)
        return answered([([1, 2], [3])] * len(indices), number)

    steps = maker(epochs=2, minibatches=3)
    steps.prompts = prompts
    monkeypatch.setattr(steps, "make", make)
    assert steps.steps_per_epoch == 3 * 6  # 25 prompts are 3 rollouts, the last of 5
    orders = [steps.indices(0, k) for k in range(18)]
    assert made == [0, 1, 2]
    passes = [orders[at : at + 3] for at in range(0, 18, 3)]
    for count, minibatches in zip((10, 10, 10, 10, 5, 5), passes, strict=True):
        assert sorted(sum(minibatches, [])) == list(range(count))
        assert max(map(len, minibatches)) - min(map(len, minibatches)) <= 1
    assert all(passes[i] != passes[i + 1] for i in (0, 2, 4))


def test_first_step_identities():
    made = PpoStage(Config(stage="ppo"), tolerance=1e-5)
    same = {"policy/logp_change": 1e-7, "reference_gap": 1e-7}
    made.check_first_step(same)
    made.check_first_step({})  # of a step that trains nothing
    for name, whose in (("policy/logp_change", "its"), ("reference_gap", "their")):
        sentence = f"but {whose} log-probabilities differ by 0.01 per token"
        with pytest.raises(RuntimeError, match=sentence):
            made.check_first_step(same | {name: 0.01})


class Letters:
    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


HALF, ALL = (f"tests.reward_functions:{name}" for name in ("half", "all_at_once"))


def answers(*scales, **row):
    """The same prompt and answer for every scale: prompts, answers, rows and indices."""
    count = len(scales)
    rows = [{"scale": x, **row} for x in scales]
    return [[97]] * count, [[98, 99]] * count, rows, [*range(4, 4 + count)]


def test_reward_functions():
    names = (HALF, "http://localhost:1/score", "meta-llama/reward", "C:/x y")
    assert [is_function(name) for name in names] == [True, True, False, False]
    both = Rewards([HALF, ALL], Letters())(*answers(2, 4))
    assert both == [{HALF: 1.0, ALL: 4.0}, {HALF: 0.5, ALL: 6.0}]
    assert Rewards([HALF], Letters())(*answers()) == []
    for name, asked, complaint in (
        (HALF, answers(1, 0), "half on example 5 failed: ZeroDivisionError"),
        (HALF, answers(float("nan")), "half on example 4 failed: ValueError: it returned nan; ret"),
        (ALL, answers(1, 2, most=1), "for 2 answers; return one number for each"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Rewards([name], Letters())(*asked)


def test_rewards_in_workers():
    rewards = Rewards([HALF], Letters(), workers=2, timeout=20)
    try:
        assert rewards(*answers(1, 2, 4)) == [{HALF: 2.0}, {HALF: 1.0}, {HALF: 0.5}]
        rewards.timeout = 0.2
        sentence = "half on example 4 took longer than ppo.reward_timeout, 0.2 s"
        with pytest.raises(ValueError, match=sentence):
            rewards(*answers(1, sleep=60))
    finally:
        rewards.close()


def test_rewards_of_a_server(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    server = SamplingServer()
    url = f"{server.address}/score"
    assert Rewards([url], Letters())(*answers(1, 2)) == [{url: 2.0}, {url: 1.0}]
    for server.scores, server.fault, complaint in (
        ([1.0], "", r"returned \[1.0\] for 2 answers"),
        ("good", "", "returned good for 2 answers"),
        ([], "refuse", "failed: OSError: HTTP 503"),
        ([], "hang", "timed out"),
    ):
        with pytest.raises(ValueError, match=f"the reward {url} .*{complaint}"):
            timeout = 0.2 if server.fault == "hang" else 20
            Rewards([url], Letters(), timeout=timeout)(*answers(1, 2))
    server.close()
    with pytest.raises(ValueError, match="the reward .* failed: OSError: ConnectError"):
        Rewards([url], Letters())(*answers(1))


def test_several_rewards_have_weights_and_held_out_prompts_show_each_by_name():
    section = PpoSection(reward={"models/rm": 0.5, HALF: 2.0})
    assert section.reward_model == "models/rm"
    assert PpoSection(reward=[HALF, ALL]).reward == {HALF: 1.0, ALL: 1.0}
    rounds = [answered(), answered(ROWS[:1])]
    for answer in rounds[0].answers + rounds[1].answers:
        answer.scores = {"models/rm": 3.0, HALF: answer.score}
    asked = SimpleNamespace(
        sampler=SimpleNamespace(synchronise=lambda: None),
        answer=lambda number, *_: rounds[number % 2],
    )
    loader = SimpleNamespace(steps_per_epoch=2, dataset=None, indices=lambda *_: None)
    metrics = PpoStage(Config(stage="ppo", ppo=section), maker=asked).evaluate(loader)
    assert metrics["eval/objective/scores"] == pytest.approx(3.5 / 4) == -metrics["eval/loss"]
    assert metrics["eval/objective/scores/models/rm"] == 3
    assert metrics[f"eval/objective/scores/{HALF}"] == pytest.approx(3.5 / 4)


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("3 + 4 = 7, so she pays $1,007.", "3 and 4\n#### 1007", 1.0),
        ("The answer is 7.0", "7", 1.0),
        ("7 apples, 8 pears", "7", 0.0),
        ("It is -3,", -3, 1.0),
        ("no idea", "nor here", 0.0),
    ],
)
def test_verifiable_reward(completion, answer, score):
    assert gsm8k_reward("", completion, {"answer": answer}) == score


def test_answers_end_with_a_turn(tmp_path):
    folder = write_tokenizer(tmp_path, CHATML, eos_token="<|endoftext|>")
    line = tiny("ppo", tmp_path, model__tokenizer=folder, data__chat_template="chatml")
    plan = prepare(parse_command_line(line).config, 1)
    nothing = dict.fromkeys(("engine", "mesh"))
    more = {"frozen": lambda model: None, "resources": ExitStack(), "watch": Watch()}
    run = SimpleNamespace(prepared=plan, **nothing, **more)
    stop_tokens = PpoStage(plan.config).build(run).maker.sampler.options.stop_tokens
    names = plan.tokenizer.convert_ids_to_tokens(stop_tokens)
    assert sorted(names) == [
        "<|endoftext|>",
        "<|im_end|>",
    ]  # the template ends turns with <|im_end|>
