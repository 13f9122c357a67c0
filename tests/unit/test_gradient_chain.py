"""Gradient policies in company: scopes, state, configuration and presets."""

import json
import math

import pytest

from tests.fake_ranks import (
    FakeWorld,
    act,
    assert_same_gradients,
    context,
    grads_of,
    of_norm,
    parameters,
)
from ulysses.gradients import build_chain


def test_scopes_are_clipped_separately():
    """As in PPO; the first scope's edit does not make the second one's norm be measured again."""
    named, world = parameters(), FakeWorld(2)
    before = {n: g.double() for n, g in grads_of(named).items()}
    scopes = {n: "value" if n in ("embed.weight", "norm.weight") else "policy" for n in named}
    (report, _) = world.run(
        lambda rank: build_chain("default", 7.0).apply(
            world.view(named, rank, scopes), context()
        )
    )
    assert world.calls == 1
    for scope in ("policy", "value"):
        names = [n for n in named if scopes[n] == scope]
        norm = math.hypot(*(float(before[n].norm()) for n in names))
        assert norm > 7 and report[f"grad/{scope}/norm"] == pytest.approx(norm, rel=1e-6)
        assert report[f"grad/{scope}/clip_factor"] == pytest.approx(7 / norm, rel=1e-6)
        assert report[f"grad/{scope}/clipped"] == 1
        assert_same_gradients(
            grads_of(named), {n: (before[n] * 7 / norm).float() for n in names}
        )


def test_state_survives_json_and_continues_exactly():
    tables = [{"policy": "skip_non_finite"}, {"policy": "skip_spike", "warmup": 4, "window": 8},
              {"policy": "zclip", "warmup": 4}]  # fmt: skip
    norms = [math.nan if i in (8, 20) else 1 + 0.3 * math.sin(2 * i) for i in range(30)]

    def steps(chain, first, last):
        all_named = [(i, of_norm(norms[i])) for i in range(first, last)]
        return [repr((act(chain, named, i), named["p"].grad)) for i, named in all_named]

    want, first, second = (
        steps(build_chain(tables), 0, 30),
        build_chain(tables),
        build_chain(tables),
    )
    steps(first, 0, 13)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert steps(second, 13, 30) == want[13:] and second.skipped_total >= 2
    with pytest.raises(ValueError, match="the checkpoint's gradient policies are"):
        build_chain("default").load_state_dict(saved)


def test_a_policy_that_has_gone_is_refused_with_its_replacement():
    with pytest.raises(
        ValueError,
        match=r"policies\[0\]: policy is 'auto_clip' .*; auto_clip has gone, use zclip$",
    ):
        build_chain([{"policy": "auto_clip"}])


def test_chain_without_a_guard_gets_one_and_presets_have_theirs():
    lists = ([], [{"policy": "zclip"}], [{"policy": "skip_non_finite"}])
    names = [[p.name for p in build_chain(tables).policies] for tables in lists]
    assert names == [
        ["stop_on_non_finite"],
        ["stop_on_non_finite", "zclip"],
        ["skip_non_finite"],
    ]
    presets = ("default", "steady", "ulysses-pro")
    assert [len(build_chain(name).policies) for name in presets] == [2, 4, 2]
