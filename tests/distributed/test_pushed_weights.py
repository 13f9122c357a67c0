"""Weights that reach servers over the network are those of an export for servers, bit by bit."""

import multiprocessing

import pytest
import torch
from safetensors.torch import load, load_file

from tests import rows_of
from tests.e2e.launch import EXPERTS, tiny
from tests.harness import need_gpus, run_distributed
from tests.sampling_server import SamplingServer
from tests.weight_receiver import Receivers, in_a_process
from ulysses.config.command_line import parse_command_line
from ulysses.rl import weight_push
from ulysses.run.training_run import TrainingRun


@pytest.fixture(scope="module")
def processes():
    """Two that receive weights, which import torch once for all tests."""
    spawn = multiprocessing.get_context("spawn")
    with Receivers(ctx=spawn) as first, Receivers(ctx=spawn) as second:
        yield first, second


@pytest.fixture
def servers(processes):
    found = [SamplingServer() for _ in processes]
    for server, process in zip(found, processes):
        server.receiver = process.WeightReceiver()
    yield found
    for server in found:
        server.close()


def push(line, folder):
    """Give every trained weight another value, export, push twice, and return what the pushed weights are called."""
    weight_push.PART_BYTES = 1 << 12
    run = TrainingRun(parse_command_line(line).config)
    run.__enter__()
    for part in run.engine.sub_groups:
        part.master.add_(torch.randn_like(part.master), alpha=0.1)
    run.engine.publish()
    run.export(folder, for_servers=True)
    sampler = run.trainer.stage.maker.sampler
    for rollout in (0, 1):
        sampler.synchronise(rollout)
    run.resources.close()
    return sampler.push.version


# what is trained, and on how many ranks in what groups
MODELS = """
1 => --model.dtype bfloat16
2 => --model.config.tie_word_embeddings true --parallel.sequence_parallel_size 2
2 => --model.lora.rank 2 --ppo.kl_coefficient 0
2 => EXPERTS --parallel.sequence_parallel_size 2
"""


@pytest.mark.parametrize("world, typed", rows_of(MODELS))
def test_pushed_weights_are_those_of_the_export(tmp_path, servers, world, typed):
    addresses = ",".join(
        f'"{dialect}+{server.address}"' for dialect, server in zip(("vllm", "sglang"), servers)
    )
    grpo = f"--ppo.advantage group --ppo.answers_per_prompt 2 --ppo.sampler [{addresses}] --ppo.sampler_sync gloo"
    line = tiny("ppo", tmp_path / "run", f"{grpo} {typed.replace('EXPERTS', EXPERTS)}")
    versions = run_distributed(push, int(world), line, tmp_path / "served", cpu=True)
    given = versions[0]
    files = load_file(tmp_path / "served/model.safetensors")
    for server in servers:
        version, phases, file = server.receiver.held()
        assert version == given and not phases
        found = load(file)
        assert found.keys() == files.keys()
        for name, tensor in found.items():
            assert tensor.dtype == files[name].dtype and torch.equal(tensor, files[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_pushed_weights_travel_from_gpu_to_gpu(tmp_path, servers, dialect):
    """Rank 0 has the first GPU, and the server the second."""
    need_gpus(2)
    grpo = f"--ppo.advantage group --ppo.answers_per_prompt 2 --ppo.sampler {dialect}+{servers[0].address}"
    line = tiny("ppo", tmp_path / "run", f"{grpo} --ppo.sampler_sync nccl --model.lora.rank 2")
    with in_a_process("nccl", "cuda:1") as servers[0].receiver:
        run_distributed(push, 1, line, tmp_path / "served")
        found = load(servers[0].receiver.held()[-1])
    files = load_file(tmp_path / "served/model.safetensors")
    assert found.keys() == files.keys()
    # adapters are added on the GPU here, and on the host in an export
    assert all(torch.allclose(found[name], files[name], rtol=1e-6, atol=1e-7) for name in files)
