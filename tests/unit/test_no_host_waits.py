"""Between a micro-batch's forward and backward the host never waits for the device: it reads and copies no value.

Every stage runs on torch's meta device, which has no values: reading one raises, and so does an index whose size only
values decide. `torch.tensor` on a device copies from pageable memory, which waits too; it is refused here.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from models.decoder import CausalLM
from models.scored import PolicyValue, RewardModel
from tests.engine_case import MOE, SHAPE, Case, dataset
from tests.stage_case import STAGE_CASES
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.stages.base import MetricSums

META = torch.device("meta")


class Waits(TorchFunctionMode):
    """Refuse what torch does for a device only by waiting for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert (
            function not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None
        ), "a copy that waits"
        return function(*args, **kwargs)


class FrozenModel:
    """A model with the face of a frozen engine, whose weights nobody has cut."""

    weights = None

    def __init__(self, module):
        self.module, self.inference = module, torch.no_grad
        self.weights = SimpleNamespace(whole=lambda parameters: nullcontext())

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("name, shape", [*((n, SHAPE) for n in STAGE_CASES), ("sft", MOE)])
def test_no_stage_waits_for_the_device(name, shape):
    mesh, metrics = ParallelMesh(), MetricSums(META)
    with META:
        kind = {"rm": RewardModel, "ppo": PolicyValue}.get(name, CausalLM)
        model = kind(shape, mesh, attention="reference")
        teacher = FrozenModel(CausalLM(SHAPE, mesh, attention="reference"))
    if shape is MOE:
        model.bfloat16()
    case = Case(name, options=STAGE_CASES[name].every_term)
    stage = case.make_stage(model, mesh, teacher=lambda *_: teacher)
    if name == "ppo":
        columns = {
            c: torch.zeros(9) for c in ("old_logps", "old_values", "advantages", "returns")
        }
        sequences = [Sequence(torch.arange(9), torch.ones(9), columns)] * 3
    else:
        data = dataset(name)
        sequences = [s for i in range(4) for s in stage.sequences(data[i])]
    of_step = [torch.zeros((), device=META)] if name == "kto" else []
    batch = pack_shard(sequences, mesh, META)
    with Waits():
        normalisers = stage.normalisers(batch)
        terms = stage.losses(batch, metrics, *of_step)
        metrics.add("projected", float(batch.num_valid))
        sum(t.value * (t.weight / normalisers[t.normaliser]) for t in terms).backward()
        for term in terms:
            metrics.add("loss", stage.local_sum(term))
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):  # what this test relies on
        metrics.reduce()
    with pytest.raises(AssertionError, match="waits"), Waits():
        torch.tensor(1.0, device=META)
