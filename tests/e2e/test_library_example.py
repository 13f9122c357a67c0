"""The library examples: the same numbers on every number of processes, under torchrun and without a launcher."""

import re

import pytest

from tests.e2e.launch import python, ranks


def forked(example, processes):
    return ranks([], processes, script=f"examples/{example}").stdout


def test_example_prints_the_one_process_gradient_norm():
    """Of 6 heads: 2 ranks, of torchrun, split heads; 4 also split rows."""
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2"
    alone, two = (
        python(*start.split(), "examples/library.py").check().stdout for start in ("", torchrun)
    )
    for processes, text in ((1, alone), (2, two), (4, forked("library.py", 4))):
        said = re.search(r"on (\d) processes ([\d.]+), on one process ([\d.]+)", text)
        count, many, one = map(float, said.groups())
        assert count == processes and abs(many - one) <= 1e-5 * one > 0


def test_transformers_with_fsdp2_gives_the_same_numbers_on_any_number_of_processes():
    texts = (forked("fsdp2.py", processes) for processes in (1, 2))
    one, two = (
        [
            [*map(float, found)]
            for found in re.findall(r"loss (\S+), gradient norm ([\d.]+)", text)
        ]
        for text in texts
    )
    assert len(one) == 5 and one[-1][0] < one[0][0] - 0.3
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
