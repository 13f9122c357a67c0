"""What belongs together has one shape: every loss refuses a tensor that does not fit, and says what would."""

import inspect
from typing import Any

import pytest
import torch

import losses
from losses.distill import divergence

# function | its tensors by their shapes | its other arguments
TABLE = """
aot_margins | policy=[4], reference=[4] |
reward_loss | chosen_rewards=[4], rejected_rewards=[4], margin=[4] |
ld_dpo_weights | token_index=[4], public_lengths=[4] | alpha=0.5
token_nll | logps=[2, 3], weights=[2, 3] |
weighted_sum | values=[2, 3], weights=[2, 3] |
label_smoothed_nll | logps=[4], lse=[4], mean_logit=[4] | label_smoothing=0.1
group_advantages | scores=[4], groups=[4] |
packed_gae | rewards=[4], values=[4] | cu_seqlens=torch.tensor([0, 4])
gae | rewards=[2, 3], values=[2, 3], mask=[2, 3] |
ppo_policy_loss | logps=[4], old_logps=[4], advantages=[4] |
ppo_value_loss | values=[3], old_values=[3], returns=[3] |
kl_estimate | logps=[4], reference_logps=[4] |
whiten | values=[2, 3], mask=[2, 3] |
token_rewards | kl=[4], scores=[2], has_eos=[2] | \
    last_index=torch.tensor([1, 3]), kl_coefficient=0.1, missing_eos_penalty=1.0
divergence | student=[2, 3], teacher=[2, 3] | beta=0.5
kto_loss | policy_chosen_logps=[4], reference_chosen_logps=[4], policy_rejected_logps=[3], \
    reference_rejected_logps=[3], policy_KL_logps=[5], reference_KL_logps=[5], kl=[] |
dpo_loss | policy_chosen_logps=[4], policy_rejected_logps=[4], reference_chosen_logps=[4], \
    reference_rejected_logps=[4], chosen_lengths=[4], rejected_lengths=[4], aot_reference_margins=[4], bco_delta=[] | \
    loss_type=["ipo", "bco_pair", "aot"]
"""
ROWS = [line.split("|") for line in TABLE.strip().splitlines()]
CASES = {name.strip(): [eval(f"dict({x})") for x in arguments] for name, *arguments in ROWS}
ANY_LENGTH = {"token_rewards": "kl"}
FUNCTIONS = {
    name: getattr(losses, name)
    for name in losses.__all__
    if inspect.isfunction(getattr(losses, name))
} | {"divergence": divergence}


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_of_another_shape_is_refused(name):
    shapes, others = CASES[name]

    def called(**wrong: list[int]) -> Any:
        tensors = {key: torch.rand(shape) for key, shape in (shapes | wrong).items()}
        return FUNCTIONS[name](**tensors, **others)

    called()
    for key, shape in shapes.items():
        # those that broadcast first
        for other in ([*shape, 1], [1, *shape], [1] * len(shape), [], [n + 1 for n in shape]):
            if other == shape or (key in ANY_LENGTH.get(name, ()) and len(other) == 1):
                continue
            with pytest.raises(ValueError, match=r"with shapes .* will not do: ") as caught:
                called(**{key: other})
            said = str(caught.value)
            assert str(other) in said and "\n" not in said and len(said) < 400


def test_the_shapes_that_broadcast_silently():
    three, four, five = torch.randn(3), torch.randn(4), torch.randn(5)
    for name, given, sentence in (
        (
            "ppo_value_loss",
            (three, three, torch.randn(3, 1)),
            r"^values, old_values and returns with shapes \[\[3\], \[3\], \[3, 1\]\] will not do: they must have",
        ),
        ("kl_estimate", (four, torch.randn(4, 1)), r"shapes \[\[4\], \[4, 1\]\] will not do: they must have one"),
        (
            "kto_loss",
            (three, three, five, three, three, torch.randn(1)),
            r"shapes \[\[5\], \[1\]\] will not do: both must be sums",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            FUNCTIONS[name](*given)


def test_every_function_has_its_shapes_in_its_docstring():
    for name, function in FUNCTIONS.items():
        said = inspect.getdoc(function) or ""
        assert "[" in said or "shape" in said, name
    # the last two take one tensor of any shape
    assert FUNCTIONS.keys() == {*CASES, "linear_logprobs", "dft_nll", "z_loss"}
