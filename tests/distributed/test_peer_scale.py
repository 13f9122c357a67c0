"""Another system's two faults, shown beside ours: its documented sequence-parallel loss, and its tiled loss.

DeepSpeed's recipe gathers the ranks' losses with a differentiable all-gather and takes their mean, weighted by valid
tokens, on every rank. The gather's backward sums over the group, so every rank's gradient is `sp` times its share of
the mean. ZeRO-3 then divides by all ranks and is right; ZeRO-2, and ZeRO-3 with "reduce_scatter": false, divide by
world / sp and give gradients `sp` times too large. Adam hides it; gradient norm and clipping do not.
"""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from losses.logprobs import linear_logprobs
from tests.harness import device, run_distributed
from tests.zero_case import whole_gradients
from ulysses.zero.construct import initialize_distributed
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive

WORLD, TOKENS, WIDTH, VOCABULARY = 2, 24, 16, 32


class Model(nn.Module):
    """A token-wise model, so that a sequence shard needs nothing from the others: what is left is the loss's scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the negative log-likelihood over the targets that are not -100."""
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), targets, ignore_index=-100, reduction="sum")


def sequence() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    targets[:5] = -100  # unequal valid tokens per shard
    return x, targets


def exact() -> dict[str, Tensor]:
    model = Model()
    x, targets = sequence()
    (model(x, targets) / (targets != -100).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def shard() -> tuple[Tensor, Tensor]:
    x, targets = sequence()
    part = slice(dist.get_rank() * TOKENS // WORLD, (dist.get_rank() + 1) * TOKENS // WORLD)
    return x[part].to(device()), targets[part].to(device())


def peer(stage: int, reduce_scatter: bool) -> dict[str, float]:
    """Gradient of the documented recipe over the exact one, per parameter."""
    initialize_distributed()
    parallel_state_sp.initialize_sequence_parallel(WORLD)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "sequence_parallel_size": WORLD,
        "zero_optimization": {"stage": stage, "reduce_scatter": reduce_scatter}, "zero_allow_untested_optimizer": True,
        "seq_parallel_communication_data_type": "fp32",
    }  # fmt: skip
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, mpu=parallel_state_sp
    )
    x, targets = shard()
    valid = (targets != -100).sum()
    loss = engine(x, targets) / valid
    group = parallel_state_sp.get_sequence_parallel_group()
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather(valid, group=group)
    engine.backward(sum(one * n for one, n in zip(losses, counts, strict=True)) / sum(counts))
    ratios = {name: safe_get_full_grad(p).cpu() for name, p in engine.module.named_parameters()}
    return {
        name: float((g.view(-1) @ exact()[name].view(-1)) / exact()[name].norm() ** 2) for name, g in ratios.items()
    }


def ours() -> dict[str, float]:
    """Relative error of the one gradient rule: world_size * local sum / global count."""
    initialize_distributed()
    model = Model()
    engine = ZeroEngine(
        model, derive(dtype=torch.float32), torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    )
    x, targets = shard()
    count = (targets != -100).sum()
    dist.all_reduce(count)
    engine.backward(engine(x, targets) * (WORLD / count), last=True)
    found = whole_gradients(engine.gradients())
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in exact().items()}


@pytest.mark.parametrize(("stage", "reduce_scatter", "factor"), [(3, True, 1.0), (3, False, WORLD), (2, True, WORLD)])
def test_scale_of_the_documented_recipe_depends_on_the_zero_path(
    stage: int, reduce_scatter: bool, factor: float
) -> None:
    for ratios in run_distributed(peer, WORLD, stage, reduce_scatter, with_zero=True):
        assert ratios == pytest.approx(dict.fromkeys(ratios, factor), rel=1e-5)


def test_our_rule_is_exact() -> None:
    for errors in run_distributed(ours, WORLD, with_zero=True):
        assert set(errors) == {"body.weight", "head.weight"} and max(errors.values()) < 1e-6


def test_tiled_losses_under_a_scale() -> None:
    """With an upstream gradient of 1/4 (four micro-batches) theirs leaves the head's gradient four times too large."""
    x, targets = sequence()
    targets = targets.clamp(min=0)
    scale = 0.25

    def gradients(loss: Any) -> tuple[Tensor, Tensor]:
        head, hidden = nn.Linear(WIDTH, VOCABULARY, bias=False), x.clone().requires_grad_()
        with torch.no_grad():
            head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2)))
        (loss(head, hidden) * scale).backward()
        return head.weight.grad, hidden.grad

    def tile(head: nn.Linear, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(rows), wanted, reduction="sum")

    plain = gradients(lambda head, hidden: tile(head, hidden, targets))
    theirs = gradients(
        lambda head, hidden: TiledFusedLogitsLoss.apply(
            tile, head, hidden[None], targets[None], None, 3, [head.weight], "sum"
        )
    )
    mine = gradients(lambda head, hidden: -linear_logprobs(hidden, head.weight, targets, tile_rows=7).logps.sum())
    assert torch.allclose(theirs[1], plain[1], rtol=1e-5, atol=1e-7)
    assert torch.allclose(theirs[0], plain[0] / scale, rtol=1e-5, atol=1e-6)
    assert torch.allclose(mine[0], plain[0], rtol=1e-5, atol=1e-6) and torch.allclose(
        mine[1], plain[1], rtol=1e-5, atol=1e-6
    )
