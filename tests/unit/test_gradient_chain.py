"""Gradient policies in company: scopes, state, configuration and presets."""

import json
import math

import pytest

from tests.fake_ranks import FakeWorld, act, grads_of, of_norm, parameters
from tests.memory_case import assert_same_gradients
from ulysses.gradients import build_chain


def test_scopes_are_clipped_separately():
    """As in PPO; the first scope's edit does not make the second one's norm be measured again."""
    named, world = parameters(), FakeWorld(2)
    before = {n: g.double() for n, g in grads_of(named).items()}
    scopes = {n: "value" if n in ("embed.weight", "norm.weight") else "policy" for n in named}
    report, wanted = world.act("default", 7.0, named=named, scopes=scopes), {}
    assert world.calls == 1
    for scope in ("policy", "value"):
        own = {n: g for n, g in before.items() if scopes[n] == scope}
        norm = math.hypot(*(float(g.norm()) for g in own.values()))
        names = [f"grad/{scope}/{what}" for what in ("norm", "clip_factor", "clipped")]
        assert norm > 7 and [report[n] for n in names] == pytest.approx([norm, 7 / norm, 1])
        wanted |= {n: g * 7 / norm for n, g in own.items()}
    assert_same_gradients(grads_of(named), wanted, 1e-6)


def test_state_survives_json_and_continues_exactly():
    tables = [{"policy": "skip_non_finite"}, {"policy": "skip_spike", "warmup": 4, "window": 8},
              {"policy": "clip_global_norm"}]  # fmt: skip
    norms = [math.nan if i in (8, 20) else 1 + 0.3 * math.sin(2 * i) for i in range(30)]

    def steps(chain, first, last):
        all_named = [(i, of_norm(norms[i])) for i in range(first, last)]
        return [repr((act(chain, named, i), named["p"].grad)) for i, named in all_named]

    whole, first, second = (build_chain(tables) for _ in range(3))
    steps(first, 0, 13)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert steps(second, 13, 30) == steps(whole, 0, 30)[13:] and second.skipped_total >= 2
    with pytest.raises(ValueError, match="the checkpoint's gradient policies are"):
        build_chain("default").load_state_dict(saved)


@pytest.mark.parametrize("name", ["auto_clip", "zclip"])
def test_a_policy_that_has_gone_is_refused_with_its_replacement(name):
    sentence = rf"policies\[0\]: policy is '{name}' .*; {name} has gone, use clip_global_norm$"
    with pytest.raises(ValueError, match=sentence):
        build_chain([{"policy": name}])


def test_chain_without_a_guard_gets_one_and_presets_have_theirs():
    def names(*given):
        return " ".join(
            policy.name for policy in build_chain([{"policy": p} for p in given]).policies
        )

    assert names() == "stop_on_non_finite"
    assert names("skip_spike") == "stop_on_non_finite skip_spike"
    assert names("skip_non_finite") == "skip_non_finite"
    assert [len(build_chain(name).policies) for name in ("default", "ulysses-pro")] == [2, 2]
