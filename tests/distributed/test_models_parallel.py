"""Sequence-parallel models equal one process; under real ZeRO-3 at every memory level; collectives are counted."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models import CausalLM, LayerMemory, ModelConfig, RewardModel, init_parameter, init_weights
from models.layers import DecoderLayer
from tests.harness import device, gpus, run_distributed
from ulysses.memory.levels import LEVELS
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.kernels import available_kernels
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import gather_tokens, sequence_last
from ulysses.zero.construct import initialize_distributed

SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TIED = ModelConfig.from_hf({**SIZE, "model_type": "qwen2"})
UNTIED = ModelConfig.from_hf({**SIZE, "model_type": "llama", "tie_word_embeddings": False})
LENGTHS = (11, 1, 22, 5)


def sequences() -> list[Sequence]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 61, (length,), generator=generator) for length in LENGTHS]
    weights = [torch.rand(length, generator=generator) * (torch.arange(length) % 3 > 0) for length in LENGTHS]
    return [Sequence(row, weight) for row, weight in zip(rows, weights)]


def loss_of(model: Any, batch: ShardedBatch) -> torch.Tensor:
    return -(model(batch).logps * batch.loss_weights).sum()


def adapted(model: CausalLM) -> Any:
    """Wrap some projections with LoRA adapters of fixed random weights."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return wrapped


def one_process(config: ModelConfig, adapters: bool = False) -> dict[str, torch.Tensor]:
    model: Any = CausalLM(config)
    init_weights(model, seed=0)
    model = adapted(model) if adapters else model
    mesh = ParallelMesh.__new__(ParallelMesh)
    vars(mesh).update(
        world_size=1,
        rank=0,
        sequence_parallel_size=1,
        data_parallel_size=1,
        sp_rank=0,
        dp_rank=0,
        sp_group=None,
        is_main=True,
        head_parallel_size=1,
        row_parallel_size=1,
        num_heads=(),
    )
    loss_of(model, pack_shard(sequences(), mesh)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def worst_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    whole = sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
    return max(float((found[n].cpu() - g).norm()) / max(float(g.norm()), 1e-3 * whole) for n, g in expected.items())


def levels_and_counts() -> dict[str, Any]:
    """At sp 2: gradients of every level and tiling, and how many all-to-alls a layer takes."""
    mesh = ParallelMesh(2)
    expected = one_process(UNTIED)
    batch = pack_shard(sequences(), mesh, device())
    calls: Counter[str] = Counter()
    real = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["all_to_all"] += 1
        return real(*args, **kwargs)

    results = {}
    for level in LEVELS:
        for rows in (0, 5 + 3 * dist.get_rank()):  # ranks disagree about the number of tiles
            model = CausalLM(UNTIED, mesh, memory=LayerMemory(level, rows))
            init_weights(model, seed=0)
            model.to(device())
            calls.clear()
            with mock.patch.object(dist, "all_to_all_single", counted):
                loss_of(model, batch).backward()
            count = calls["all_to_all"] / UNTIED.num_hidden_layers
            for p in model.parameters():
                dist.all_reduce(p.grad)
            error = worst_error({n: p.grad for n, p in model.named_parameters()}, expected)
            results[f"{level} {'tiled' if rows else 'whole'}"] = (error, count)
    return results


def test_every_level_equals_one_process_and_repeats_only_its_collectives() -> None:
    for results in run_distributed(levels_and_counts, 2):
        table = {"pair": 7, "block": 6, "keep_attention": 6, "none": 4}
        for case, (error, count) in results.items():
            assert error < 1e-5, (case, error)
            level, _ = case.split()
            assert count == table[level], (case, count)


def reward_scores(sp: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = ParallelMesh(sp)
    model = RewardModel(TIED, mesh)
    init_weights(model, seed=0)
    model.to(device())
    batch = pack_shard(sequences(), mesh, device())
    values = model(batch)
    return sequence_last(values, batch).detach(), gather_tokens(values, batch)


def test_reward_scores_do_not_depend_on_the_ranks() -> None:
    (one,) = run_distributed(reward_scores, 1, 1)
    for scores, values in run_distributed(reward_scores, 2, 2):
        torch.testing.assert_close(scores, one[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values, one[1], rtol=1e-5, atol=1e-6)


def under_zero(config: ModelConfig, sp: int, dtype: str, adapters: bool, kernel: str = "auto") -> dict[str, float]:
    """Real ZeRO-3 with the layer as leaf module: every level and tiling against plain torch in one process."""
    import deepspeed

    initialize_distributed()
    mesh = ParallelMesh(sp)
    expected = one_process(config, adapters)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    rank, world = dist.get_rank(), dist.get_world_size()
    if adapters:
        model: Any = CausalLM(config, mesh)
        init_weights(model, seed=0)
        decoder, model = model.model, adapted(model)
    else:
        with deepspeed.zero.Init(config_dict_or_path=settings, mem_efficient_linear=False):
            model = CausalLM(config, mesh, attention=kernel)
        decoder = model.model
        for name, parameter in model.named_parameters():
            shard = parameter.ds_tensor
            whole = torch.nn.functional.pad(
                init_parameter(name, parameter.ds_shape, config, 0).view(-1),
                (0, world * shard.ds_numel - parameter.ds_numel),
            )
            shard.data.copy_(whole[rank * shard.ds_numel : (rank + 1) * shard.ds_numel])
    deepspeed.utils.set_z3_leaf_modules(model, [DecoderLayer])
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    mine = sequences() if sp == world else sequences()[rank::world]
    batch = pack_shard(mine, mesh, device())
    results = {}
    cases: list[Any] = [(level, 4 + 3 * rank) for level in LEVELS]
    for level, rows in (*cases, ("block", 0), (["keep_attention", "none"], 0)):
        decoder.set_memory(level, rows)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, batch) * world, scale_wrt_gas=False)
        found = {n: deepspeed.utils.safe_get_full_grad(p).float().clone() for n, p in trainable.items()}
        results[f"{level} {'tiled' if rows else 'whole'}"] = worst_error(found, expected)
        engine.optimizer.zero_grad()
    engine.destroy()
    return results


@pytest.mark.parametrize(
    ("config", "sp", "dtype", "adapters", "tolerance"),
    [
        (UNTIED, 2, "float32", False, 1e-5),
        (TIED, 1, "float32", False, 1e-5),
        (TIED, 2, "bfloat16", False, 0.1),
        (UNTIED, 2, "float32", True, 1e-5),
    ],
    ids=["untied", "tied-dp", "bfloat16", "adapters"],
)
def test_zero3_gradients_at_every_level(
    config: ModelConfig, sp: int, dtype: str, adapters: bool, tolerance: float
) -> None:
    if adapters:
        import peft  # noqa: F401 (imported once, before the ranks fork)
    for results in run_distributed(under_zero, 2, config, sp, dtype, adapters, with_zero=True):
        assert len(results) == len(LEVELS) + 2
        for case, error in results.items():
            assert error < tolerance, (case, error)


# four heads of 64: a size that every kernel knows
WIDE = ModelConfig.from_hf({**SIZE, "model_type": "llama", "hidden_size": 256, "tie_word_embeddings": False})


def every_kernel() -> dict[str, dict[str, float]]:
    return {kernel: under_zero(WIDE, 2, "bfloat16", False, kernel) for kernel in available_kernels("cuda")}


@pytest.mark.gpu
def test_every_kernel_of_this_machine_under_zero3() -> None:
    if gpus() < 2:
        pytest.skip("needs 2 GPUs, one for each rank")
    for results in run_distributed(every_kernel, 2, with_zero=True):
        for kernel, errors in results.items():
            assert max(errors.values()) < 0.1, (kernel, errors)
