"""A loss takes tensors of floats: what is something else is refused by its name, in one sentence."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_losses_shapes import CASES, FUNCTIONS

# masks, lengths and indices may hold whole numbers
WHOLE = {"mask", "weights", "has_eos", "last_index", "cu_seqlens", "margin", "token_index", "public_lengths",
         "chosen_lengths", "rejected_lengths", "targets", "loss_weights", "groups"}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "linear_logprobs": {
        "hidden": torch.rand(3, 4),
        "weight": torch.rand(7, 4),
        "targets": torch.tensor([1, 2, 3]),
        "loss_weights": torch.ones(3),
    },
    "dft_nll": {"logps": torch.rand(3)},
    "z_loss": {"lse": torch.rand(3), "coefficient": 1e-4},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_tensor_of_floats_is_refused_by_name(name):
    function = FUNCTIONS[name]
    shapes, others = CASES.get(name, ({}, MORE.get(name, {})))
    good = {key: torch.rand(shape) for key, shape in shapes.items()} | others
    function(**good)
    tensors = {
        key
        for key, x in inspect.signature(function).parameters.items()
        if x.annotation in (Tensor, Tensor | None)
    }
    assert tensors and tensors <= good.keys()
    for key in tensors:
        for wrong in (good[key].numpy(), good[key].tolist(), "0.5"):
            said = f"^{key} is of type {type(wrong).__name__} but {name} takes torch tensors; use .*$"
            with pytest.raises(TypeError, match=said):
                function(**good | {key: wrong})
        whole = good[key].long()
        if key in WHOLE:
            function(**good | {key: whole})
        else:
            with pytest.raises(
                ValueError, match=rf"\b{key} (holds |is |)torch\.int64 [^\n]*float"
            ):
                function(**good | {key: whole})


def test_arguments_by_place_are_looked_at_too_and_missing_ones_are_told_as_python_does():
    logps = torch.rand(4)
    with pytest.raises(TypeError, match="^reference_chosen_logps is of type list but dpo_loss"):
        FUNCTIONS["dpo_loss"](logps, logps, logps.tolist(), logps)
    with pytest.raises(
        TypeError, match=r"kl_estimate\(\) missing 1 required .*reference_logps"
    ):
        FUNCTIONS["kl_estimate"](logps)
    # those that may be left out
    FUNCTIONS["dpo_loss"](
        logps,
        logps,
        None,
        None,
        loss_type="simpo",
        chosen_lengths=logps,
        rejected_lengths=logps,
    )
    with pytest.raises(TypeError, match="^logps is of type NoneType but kl_estimate"):
        FUNCTIONS["kl_estimate"](None, logps)


def test_the_last_token_of_an_answer_is_one_of_the_tokens():
    for wrong in (-1, 4):
        with pytest.raises(
            ValueError, match=rf"^last_index holds {wrong} but must lie in 0\.\.3$"
        ):
            FUNCTIONS["token_rewards"](
                torch.rand(4), torch.rand(2), torch.tensor([1, wrong]), 0.1
            )
