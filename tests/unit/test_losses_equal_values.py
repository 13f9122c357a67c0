"""Advantages of equal scores are zero, whatever the scores and their number, and a scale is one of those that exist."""

from typing import Any

import pytest
import torch

from losses import group_advantages, whiten


@pytest.mark.parametrize("score", [0.7, 100.1, -1234.8, 1234567.8])
@pytest.mark.parametrize("count", [2, 3, 7, 1000])
def test_equal_scores_are_no_advantage(score, count):
    scores, ones = torch.full((count,), score), torch.ones(count)
    assert whiten(scores, ones).abs().max() < 1e-4
    scales: tuple[Any, ...] = (True, False, "batch")
    for scale in scales:
        assert group_advantages(scores, ones, scale=scale).abs().max() < 1e-4
    found = group_advantages(scores, ones, "leave_one_out")
    assert found.abs().max() < 1e-4 and found.dtype == torch.float32


def test_a_scale_is_one_of_those_that_exist():
    scores, groups = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3)
    wrong: tuple[Any, ...] = ("none", "group", "Batch", None)
    for scale in wrong:
        with pytest.raises(
            ValueError,
            match=rf"^scale is {scale!r} but must be True, False or 'batch'$",
        ):
            group_advantages(scores, groups, scale=scale)


def test_values_that_the_mask_leaves_out_get_no_gradient_and_change_none():
    values = torch.tensor([1.0, float("nan"), 2.0, float("inf"), 4.0], requires_grad=True)
    mask, factors = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([1.0, 2, 3, 4, 5])
    kept = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    deviation = (kept.var(unbiased=False) + 1e-8).sqrt()
    wanted = (kept - kept.mean()) / deviation
    (of_kept,) = torch.autograd.grad((wanted * factors[mask.bool()]).sum(), kept)
    found = whiten(values, mask)
    (grad,) = torch.autograd.grad((found * factors).sum(), values)
    torch.testing.assert_close(found[mask.bool()], wanted.float())
    torch.testing.assert_close(grad[mask.bool()], of_kept.float(), atol=1e-6, rtol=1e-5)
    assert grad[[1, 3]].tolist() == found[[1, 3]].tolist() == [0, 0]
