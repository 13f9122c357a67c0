"""What ulysses/registry.py names exists, and answers what is asked of it."""

import pytest

from ulysses.registry import SAMPLERS, STAGES, load
from ulysses.stages.base import Stage


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_its_class(name):
    found = load(STAGES[name])
    assert issubclass(found, Stage) and found.name == name


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_answers_the_same_calls(name):
    found = load(SAMPLERS[name])
    assert all(callable(getattr(found, call)) for call in ("of", "synchronise", "sample"))
