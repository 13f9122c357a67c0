"""DeepSpeed trains as plain torch does, as far as the engine uses it; another release than the tested one is refused.

The engine uses much of DeepSpeed that is not documented (deepspeed_internals.py), and a release that changed any of it
could train on with wrong gradients. So a model of a few hundred weights takes one step through the real engine, and
the outputs of its new weights are compared with those of plain torch. Changes of DeepSpeed show that this would tell.
"""

import math
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload as Offload
from torch import nn

from tests.e2e.launch import ROOT
from tests.harness import run_distributed
from ulysses.check.setting_checks import check_packages
from ulysses.config.command_line import parse_command_line
from ulysses.zero.construct import build_partitioned, initialize_distributed
from ulysses.zero.engine import TrainedEngine
from ulysses.zero.settings import derive
from ulysses.zero.update import ParameterGroup

WIDTH, ROWS, MICRO_BATCHES = 9, 4, 2  # 81 elements do not divide into equal slices
# So large an eps makes AdamW's first update proportional to the gradient, which it would only take the sign of.
ADAMW = {"lr": 50.0, "eps": 100.0, "foreach": False}
# relative, in float32; after a missing, doubled or badly scaled gradient the outputs are off by far more
TOLERANCE = 1e-4


class _Unit(nn.Linear):
    """A leaf module, as decoder layers are."""

    def forward(self, x):
        return x + super().forward(x).tanh()


def _tiny():
    return nn.Sequential(_Unit(WIDTH, WIDTH), _Unit(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _waves(*shape):
    """Return values that every rank computes alike."""
    return torch.arange(math.prod(shape), dtype=torch.float32).mul(0.7).sin().div(3).view(shape)


def trains_correctly(device):
    """Take one step and compare the outputs of the new weights with those of plain torch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = _waves(MICRO_BATCHES, world, ROWS, WIDTH).to(device)
    plain = _tiny()
    for p in plain.parameters():
        p.data = _waves(*p.shape).to(device)

    def fill(_, shape, start, out):
        out.copy_(_waves(*shape).flatten()[start : start + len(out)])

    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH}
    settings = derive(dtype=torch.float32, raw=small)
    model = build_partitioned(_tiny, settings, fill)
    groups = [ParameterGroup(list(model.parameters()))]
    optimizer = partial(torch.optim.AdamW, **ADAMW)
    engine = TrainedEngine(model.train(), settings, optimizer, groups, (_Unit,))
    for micro_batch in inputs:
        engine.backward(engine(micro_batch[rank].requires_grad_()).square().sum())
    # refuses to go on without all gradients
    engine.step(engine.gradients(), ADAMW["lr"])
    (plain(inputs).square().sum() / world).backward()
    torch.optim.AdamW(plain.parameters(), weight_decay=0.0, **ADAMW).step()
    with engine.inference():
        found, wanted = engine(inputs[0, rank]), plain(inputs[0, rank])
    engine.destroy()
    return float((found - wanted).norm() / wanted.norm()) <= TOLERANCE


def taken(parameter):
    parameter.grad = None


def halved(parameter):
    parameter.grad.mul_(0.5)


def also(change, own=Offload.setup_zero_stage3_hooks):
    """DeepSpeed's own hooks, and one that changes gradients."""

    def hooks(self):
        own(self)
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(change)

    return hooks


# A method of DeepSpeed, what it becomes, or nothing if it is gone, and what is said; None trains on, wrongly.
CHANGES = [
    (
        "setup_zero_stage3_hooks",
        also(taken),
        r"\d+ of \d+ trained parameters received no gradient in this step, the first is \S+",
    ),
    ("setup_zero_stage3_hooks", also(halved), None),
    ("partition_all_parameters", None, "partition_all_parameters"),
]


def trials():
    where, found = initialize_distributed(), []
    for name, replacement, said in CHANGES:
        found.append(trains_correctly(where))
        with mock.patch.object(Offload, name, replacement):
            if replacement is None:
                delattr(Offload, name)
            if said is None:
                assert not trains_correctly(where)
                continue
            with pytest.raises((RuntimeError, AttributeError), match=said):
                trains_correctly(where)
    return found


def test_deepspeed_trains_as_plain_torch_and_a_change_of_it_would_show():
    assert run_distributed(trials, 2, cpu=True) == [[True] * 3] * 2


def test_another_release_is_refused_in_one_sentence():
    config = parse_command_line(["--config", f"{ROOT}/configs/demo/sft.toml"]).config
    assert [*check_packages(config)] == []
    with mock.patch("ulysses.check.setting_checks.version", lambda _: "9.9.9"):
        [text] = check_packages(config)
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert re.match("the package deepspeed is not installed", [*check_packages(config)][-1])
    assert re.fullmatch(r"deepspeed 9\.9\.9 is installed, .*; install deepspeed [\d.]+", text)
