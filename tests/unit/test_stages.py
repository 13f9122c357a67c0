"""The parts of the stages that need no process group: metrics, KTO's pairs, the reference cache."""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from models.arch import ARCHITECTURES
from tests import rows_of
from tests.e2e.launch import ROOT
from tests.engine_case import FROZEN, dataset
from tests.shuffled_loader import ShuffledLoader
from tests.stage_case import STAGE_CASES
from ulysses.check.input_files import check_examples
from ulysses.config.command_line import check
from ulysses.config.section import ConfigError
from ulysses.data.serve.steps import StepLoader
from ulysses.options import STAGES, stage_of
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.progress import progress
from ulysses.stages.cached_reference import cache_file, read_reference
from ulysses.stages.kto import mismatched_pairs
from ulysses.stages.rm import RmStage

CPU = torch.device("cpu")


def test_the_tests_know_every_stage_and_its_frozen_models():
    """What a new stage still lacks is named here."""
    missing = {*STAGES} - {*STAGE_CASES}
    assert not missing, f"STAGE_CASES in tests/stage_case.py has no entry for {missing}"
    for name, case in STAGE_CASES.items():
        if not callable(case.formula):
            assert (ROOT / case.formula).exists(), f"{name} has no formula"
            continue
        assert len(dataset(name)) > 10
        for settings in (case.options, case.every_term):
            found = stage_of(check({"stage": name, name: settings})).requirements
            roles = {model.role for model in found.models} - {*FROZEN}
            assert not roles, f"FROZEN in tests/engine_case.py has no {roles} for {name}"


# the EOS tokens of a model and the pad token of its tokenizer, and what is exported
PADS = """
[7] => 8 => 8
[7] => 7 => null
[5, 7] => 5 => null
[] => null => null
"""


@pytest.mark.parametrize("row", rows_of(PADS))
def test_exported_reward_model_never_pads_with_eos(row):
    eos, pad, expected = map(json.loads, row)
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=eos[0] if eos else None)
    shape = replace(ARCHITECTURES["llama3-8b"], eos_token_id=tuple(eos), pad_token_id=9)
    config = check({"stage": "rm"})
    assert RmStage(config).exported_config(shape, tokenizer).pad_token_id == expected


EMPTY = [
    *((name, {}) for name in STAGE_CASES if callable(STAGE_CASES[name].formula)),
    ("dpo", {"ld_alpha": 0.3}),
]


@pytest.mark.parametrize("name, options", EMPTY)
def test_a_group_without_data_has_the_columns_of_the_others(name, options):
    """Its losses are sums over nothing, which read the same columns."""
    stage, data = stage_of(check({"stage": name, name: options})), dataset(name)
    loader = StepLoader(data, 1, tokens_per_microbatch=1000, data_parallel_size=2)
    device = SimpleNamespace(device=CPU)
    packs = [
        replace(stage, model=device, mesh=ParallelMesh(1))
        .read(replace(loader, dp_rank=i), 0)
        .trained[0]
        for i in range(2)
    ]
    assert [pack.num_sequences > 0 for pack in packs] == [True, False]
    for columns in ("token_columns", "sequence_columns"):
        full, empty = ({k: x.dtype for k, x in getattr(p, columns).items()} for p in packs)
        assert full == empty
    assert packs[1].num_valid == 0 and packs[1].tokens.tolist() == [0]


def test_kto_refuses_data_of_one_example():
    data = dataset("kto", count=1)
    with pytest.raises(
        ConfigError, match=r"data\.train has one example but kto's baseline pairs"
    ):
        check_examples(stage_of(check({"stage": "kto"})), data, None)
    free = check({"stage": "kto", "kto": {"loss_type": "apo_zero_unpaired"}})
    check_examples(stage_of(free), data, None)


# The weights' quantisation and the rank of adapters; the file's name as the first runs gave it.
FILES = """
none => 0 => reference-51862b62ebc4daeaee774bda.bin
none => 4 => reference-64e4f764d045c191d6c8a6ea.bin
"""


@pytest.mark.parametrize("quantize, rank, name", rows_of(FILES))
def test_a_cache_of_before_is_found(quantize, rank, name, tmp_path):
    given = {"data": {"cache": str(tmp_path)}, "model": {"lora": {"rank": int(rank)}}}
    stage = stage_of(check({"stage": "dpo", **given}))
    weights = SimpleNamespace(shape="shape", paths=[], seed=3, quantize=quantize)
    data = SimpleNamespace(fingerprint="abc False")
    assert cache_file(stage.config, weights, "reference", data) == tmp_path / name


@pytest.mark.parametrize("examples", [2, 3, 5, 6])
def test_kto_pairs_the_next_example_of_the_step_with_another_prompt(examples):
    """A permutation of pairs by ranks or packing would be seen here; so would reversed pairs on an odd batch."""
    data = dataset("kto")
    prompts, options = (
        data.columns["prompt_id"],
        {"seed": 3, "data_parallel_size": 2, "packing_seed": 5},
    )
    plain = StepLoader(data, examples, tokens_per_microbatch=128, seed=3)
    other = ShuffledLoader(data, examples, tokens_per_microbatch=512, dp_rank=1, **options)
    for k in range(plain.steps_per_epoch):
        indices = plain.indices(0, k)
        partners = dict(mismatched_pairs(prompts, indices))
        for place, i in enumerate(indices):
            following = indices[place + 1 :] + indices[:place]
            assert partners.get(i) == next(
                (n for n in following if prompts[n] != prompts[i]), None
            )
        assert mismatched_pairs(prompts, other.indices(0, k)) == list(partners.items())
    assert mismatched_pairs(prompts, [4]) == []


def fake_reference(batch):
    return -(batch.tokens.double() / 7 + batch.positions) * 0.1


def read(path, data, logps=fake_reference):
    parts = SimpleNamespace(
        mesh=ParallelMesh(1),
        engine=SimpleNamespace(device=CPU),
        tokens_per_microbatch=128,
        say=lambda text: None,
    )
    return read_reference(data, path, logps, parts)


def test_reference_values_are_written_whole_or_not_at_all(tmp_path):
    data, file, count = dataset("dpo"), tmp_path / "values.bin", 0

    def counted(batch):
        nonlocal count
        count += batch.num_sequences
        if count > limit:
            raise KeyboardInterrupt
        return fake_reference(batch)

    for most in (6, 15):
        count, limit = 0, most
        with pytest.raises(KeyboardInterrupt):
            read(file, data, counted)
        assert not file.exists()
    count, limit = 0, 2 * len(data)
    for _ in range(2):  # the second time nothing is computed again
        read(file, data, counted)
        assert count == limit


def test_each_side_of_a_pair_has_its_own_reference_values(tmp_path, monkeypatch, capsys):
    """The bar counts the examples themselves, and not whole chunks of them."""
    data = dataset("dpo")
    at_once = partial(progress, seconds=0)
    monkeypatch.setattr("ulysses.stages.cached_reference.progress", at_once)
    values = read(tmp_path / "values.bin", data)
    shown = re.findall(r"reference: (\d+)/(\d+) examples", capsys.readouterr().err)
    assert shown[-1] == (str(len(data)), str(len(data)))
    everything = [s for example in data.examples for s in example]
    expected = torch.cat([fake_reference(pack_shard([s], ParallelMesh(1))) for s in everything])
    assert values == pytest.approx(expected)
