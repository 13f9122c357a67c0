"""A change of the numerics shows old and new; if it is meant, `python -m tests.golden.curves` stores the new curve."""

import pytest

from tests.golden.curves import CASES, STEPS, curve, stored

TOLERANCE = 1e-5  # relative; other CPUs and thread counts round a little differently


@pytest.mark.parametrize("name", CASES)
def test_curve_has_not_changed(name: str) -> None:
    old, new = stored(name), curve(name)
    assert len(old) == len(new) == STEPS
    lines, changed = [], False
    for step, (before, after) in enumerate(zip(old, new, strict=True), start=1):
        off = max(abs(a - b) / abs(b) for a, b in zip(after, before, strict=True))
        changed |= off > TOLERANCE
        mark = "  <--" if off > TOLERANCE else ""
        lines.append(
            f"{step:4d}  {before[0]:.8f} {after[0]:.8f}   {before[1]:.8f} {after[1]:.8f}   {off:.1e}{mark}"
        )
    table = "\n".join(
        ["step  loss old   loss new     norm old   norm new     difference", *lines]
    )
    assert not changed, (
        f"{name}: the curve has changed\n{table}\nif this is meant: python -m tests.golden.curves"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_stored_curve_learns(name: str) -> None:
    losses = [loss for loss, _ in stored(name)]
    assert sum(losses[-5:]) < sum(losses[:5]), "the last of four epochs against the first"
