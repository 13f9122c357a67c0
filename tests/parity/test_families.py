"""Every family of the table against transformers: numbers at all memory levels, files both ways, adapters, sampling."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.folders import read_config
from models.hf_format import WeightFiles
from models.modules import Float32Parameter
from models.scored import RewardModel
from tests.family_case import FAMILIES, NO_CLASSIFIER, VOCABULARY, family_model
from tests.model_folder import write_model
from tests.unit.test_adapter_files import adapter_by_peft
from tests.unit.test_sampler import exact, sampled
from ulysses.memory.levels import LEVELS, TILE_ROWS
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh

LENGTHS = (5, 40, 1, 23)
# of a norm, in float32
LOGPS, GRADIENTS = 2e-7, 2e-6

families = pytest.mark.parametrize("name", FAMILIES)


def rows() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw) for n in LENGTHS]


def weights() -> Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))


Found = tuple[Tensor, dict[str, Tensor]]


def ours(model: Any) -> Found:
    batch = pack_shard([Sequence(row, torch.ones(len(row))) for row in rows()], ParallelMesh())
    logps = model(batch).logps
    (logps * weights()).sum().backward()
    return logps.detach(), {n: p.grad for n, p in model.named_parameters()}


def theirs(model: Any) -> Found:
    found = []
    for row in rows():
        logps = model(row[None]).logits[0, :-1].log_softmax(-1)
        found += [logps.gather(1, row[1:, None])[:, 0], logps.new_zeros(1)]
    logps = torch.cat(found)
    (logps * weights()).sum().backward()
    return logps.detach(), {n: p.grad for n, p in model.named_parameters()}


def twin_of(model: CausalLM) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**model.config.to_hf(dtype="float32"))
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def errors(found: Found, wanted: Found) -> tuple[float, float]:
    """How far the log-probabilities and all gradients together are off, as shares of their norms."""
    (logps, grads), (exact_logps, exact_grads) = found, wanted
    assert set(grads) == set(exact_grads)
    norms = [
        torch.stack([g[n].double().norm() for n in exact_grads]).norm()
        for g in (
            {n: grads[n].double() - g.double() for n, g in exact_grads.items()},
            exact_grads,
        )
    ]
    off = (logps.double() - exact_logps.double()).norm() / exact_logps.double().norm()
    return float(off), float(norms[0] / norms[1])


@families
def test_packed_documents_at_every_level_and_tile_equal_transformers(name: str) -> None:
    """Where float32 itself is worse than the bounds, ours must be as near to float64 as theirs."""
    wanted = theirs(twin_of(family_model(name)))
    precise = ours(family_model(name, torch.float64))
    off_theirs = errors(wanted, precise)
    for level in LEVELS:
        for tile in (TILE_ROWS, 7):
            found = ours(family_model(name, recompute=level, mlp_tile=tile))
            off, near = errors(found, wanted), errors(found, precise)
            for bound, *measured in zip((LOGPS, GRADIENTS), off, near, off_theirs):
                apart, our_error, their_error = measured
                assert apart < bound or our_error < 1.2 * their_error, (level, tile, measured)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_documents_that_cross_chunks_of_linear_attention(name: str, monkeypatch) -> None:
    """Documents of 1 to 300 tokens; ours is as near to float64 as the bound, or as theirs is."""
    monkeypatch.setattr(f"{__name__}.LENGTHS", (300, 1, 65, 128, 2))
    precise = ours(family_model(name, torch.float64))
    off_theirs = errors(theirs(twin_of(family_model(name))), precise)
    for level in ("none", "keep_attention"):
        near = errors(ours(family_model(name, recompute=level)), precise)
        for bound, our_error, their_error in zip((3e-7, 3e-6), near, off_theirs):
            assert our_error < max(bound, 1.2 * their_error), (level, near, off_theirs)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_linear_attention_in_bfloat16_is_as_near_to_float64_as_transformers(name: str) -> None:
    """Their decays are rounded with the other weights; ours are in float32, as a run has them."""
    precise, half = ours(family_model(name, torch.float64)), family_model(name, torch.bfloat16)
    start = family_model(name).state_dict()
    for key, parameter in half.named_parameters():
        if isinstance(parameter, Float32Parameter):
            parameter.data = start[key]
    near = errors(ours(half), precise)
    off_theirs = errors(theirs(twin_of(family_model(name)).bfloat16()), precise)
    assert all(a < 1.2 * b for a, b in zip(near, off_theirs)), (near, off_theirs)


@families
def test_exports_load_in_transformers_with_equal_logits_and_come_back(
    name: str, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    config = ModelConfig.from_hf(FAMILIES[name])
    model = write_model(tmp_path / "ours", config)
    twin, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert twin.config.architectures == [type(twin).__name__]
    row = rows()[1]
    batch = pack_shard([Sequence(row, torch.ones(len(row)))], ParallelMesh())
    logits = model(batch, project=False) @ model.lm_head.weight.T
    torch.testing.assert_close(logits, twin(row[None]).logits[0, :-1], rtol=1e-5, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == config == read_config(tmp_path / "ours")
    files = WeightFiles(tmp_path / "theirs")
    files.check({name: p.shape for name, p in model.named_parameters()})
    for key, parameter in model.named_parameters():
        assert torch.equal(files.read(key), parameter.view(-1)), key


@families
def test_reward_models_have_the_class_that_transformers_has(name: str) -> None:
    import transformers

    config = ModelConfig.from_hf(FAMILIES[name])
    if name in NO_CLASSIFIER:
        with pytest.raises(ValueError, match="no class for reward models of model_type"):
            config.to_hf(reward=True)
        return
    raw = config.to_hf(reward=True)
    (architecture,) = raw["architectures"]
    settings = transformers.AutoConfig.for_model(**raw)
    twin = getattr(transformers, architecture)(settings)
    names = {name for name, _ in RewardModel(config).named_parameters()}
    assert names == {name for name, _ in twin.named_parameters()}


@families
def test_the_sampler_draws_from_the_models_own_distribution(name: str) -> None:
    """Prompts and answers are longer than the windows; chunks of prompts are shorter than they are."""
    model = family_model(name)
    asked = [row.tolist() for row in rows()]
    for prefill in (8192, 6):
        answers = sampled(model, asked, 12, batch=3, prefill=prefill, temperature=0.9)
        logps = exact(model, asked, [a.tokens for a in answers], 0.9)
        reported = torch.tensor([x for a in answers for x in a.logps])
        torch.testing.assert_close(logps, reported, rtol=2e-5, atol=2e-5)


@families
def test_adapters_of_peft_are_read(name: str, tmp_path) -> None:
    model = write_model(tmp_path / "base", ModelConfig.from_hf(FAMILIES[name]))
    whole = adapter_by_peft(tmp_path / "base", tmp_path / "adapter")
    files = WeightFiles(tmp_path / "adapter")
    for key, parameter in model.named_parameters():
        found = files.read(key).view(parameter.shape)
        torch.testing.assert_close(found, whole[key], rtol=1e-6, atol=1e-7)
