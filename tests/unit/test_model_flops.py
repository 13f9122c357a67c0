"""FLOPs, of MFU and of the planner, against torch's own count of what a model's products do."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.lora import add_adapters
from tests.engine_case import Case as EngineCase
from tests.engine_case import build_trainer, dataset
from tests.harness import run_distributed
from tests.memory_case import CONFIG, MOE, QWEN3, batch, build
from ulysses.config.schema import LoraSection
from ulysses.parallel import ParallelMesh, Sequence, pack_shard
from ulysses.plan.hardware import Machine
from ulysses.plan.layer_cost import model_flops, plain_model, total
from ulysses.plan.step_cost import Plan, Question, step_flops

ADDED = {torch.ops.aten.addmm_: lambda _, a, b, *__, **___: 2 * a[0] * a[1] * b[1]}
LENGTHS = 9, 1, 16  # of tests.memory_case.batch


def products(model):
    """Return the FLOPs of matrix products in a step on the batch; attention is none of them."""
    with FlopCounterMode(display=False, custom_mapping=ADDED) as counted:
        model(batch(), nll=True).nll.backward()
    return counted.get_total_flops()


@pytest.mark.parametrize(
    "config, rank", [(CONFIG, 0), (CONFIG, 2), (QWEN3, 0), (QWEN3, 2), (MOE, 0), (MOE, 8)]
)
def test_equals_what_torch_counts(config, rank):
    model, planned = build(config=config), plain_model(config)
    # norms and biases, which MFU's formula takes for products
    rest = planned.parameters - planned.vocabulary_parameters
    rest -= total(planned.layers).parameters
    again = 0
    if rank:
        add_adapters(model, LoraSection(rank=rank))
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        of_experts = sum(p.numel() for n, p in model.named_parameters() if "experts.lora" in n)
        unmet = 1 - config.moe.num_experts_per_tok / config.moe.num_experts if config.moe else 0
        planned = planned._replace(
            parameters=planned.parameters + adapters,
            trained=adapters,
            idle_adapters=unmet * of_experts,
        )
    if (
        config is MOE
    ):  # what the router makes, and x a^T of experts' adapters, is computed again in backward
        moe, widths = config.moe, config.hidden_size + config.moe.moe_intermediate_size
        sparse = sum(kind.feed_forward == "experts" for kind in config.layers)
        again = 2 * sum(LENGTHS) * sparse * config.hidden_size * moe.num_experts
        again += 2 * sum(LENGTHS) * moe.num_experts_per_tok * rank * widths
    found = model_flops(planned, sum(LENGTHS), 0.0, sum(LENGTHS) - len(LENGTHS))
    assert found - (4 if rank else 6) * sum(LENGTHS) * rest + again == products(model)


@pytest.mark.parametrize("windows", [(4, None, None), (4, 10, 4), (24, 25, 99)])
def test_windows_are_counted_by_batches_and_planner_alike(windows, monkeypatch):
    """Of a pack with a shared prompt the metrics take the batch's count, and the planner its own of equal documents."""
    pairs = sum(24**2 - max(0, 24 - (w or 24)) ** 2 for w in windows)
    mesh = ParallelMesh(windows=windows)
    batch = pack_shard([Sequence(range(24), [1] * 24)] * 2, mesh)
    model = plain_model(CONFIG)
    counted = model_flops(model, 0, batch.num_squares, 0)
    width = CONFIG.num_attention_heads * CONFIG.head_dim
    assert counted == pytest.approx(6 * width * 2 * pairs)
    monkeypatch.setattr(type(CONFIG), "windows", windows)
    question = Question(model, Machine(1, 1e9), 48, documents=2)
    attention = step_flops(Plan(question, ("none",) * 3))[1]
    assert attention == pytest.approx(3.5 * 2 * width * 2 * pairs)

    def squares(*lengths):
        given = [Sequence(range(n), [1] * n, prompt=0, prompt_length=n) for n in lengths]
        return pack_shard(given, mesh).num_squares

    assert squares(24) == pytest.approx(pairs / 3)
    # the second one leaves out 19 tokens of the first one, but sees them
    assert squares(20, 24) == pytest.approx(squares(20) + squares(24) - squares(19))


def counted_amounts():
    data = dataset("sft")
    trainer, _ = build_trainer(EngineCase("sft"))
    seen = []

    def flops(*amounts):
        seen.append(amounts)
        return 0.0

    trainer.flops, trainer.peak_flops = flops, 1.0
    examples = [data[i] for i in trainer.loader.indices(0, 0)]
    trainer.train_step()
    trainer.engine.destroy()
    lengths = [len(e.sequences[0].tokens) for e in examples]
    trained = [
        int((torch.as_tensor(e.sequences[0].loss_weights)[1:] != 0).sum()) for e in examples
    ]
    return seen, lengths, trained


def test_the_vocabulary_projection_counts_trained_tokens_only():
    [(seen, lengths, trained)] = run_distributed(counted_amounts, 1)
    assert seen == [(sum(lengths), sum(n * n for n in lengths), sum(trained))]
    assert 0 < sum(trained) < sum(lengths)
