"""The memory that a call holds in addition to its inputs."""

import torch

from autopipe.measure.live import Workspace

FLOATS = 1000
ONE = 4 * FLOATS


def test_workspace_is_the_peak_and_the_result_of_a_call():
    before = torch.ones(FLOATS)
    with Workspace(torch.device("cpu")) as used:
        after = (before + 1) * 2
    assert (used.peak, used.left) == (2 * ONE, ONE)
    del after


def test_the_gradients_of_a_backward_are_workspace():
    x = torch.ones(FLOATS, requires_grad=True)
    y = x * 3
    with Workspace(torch.device("cpu")) as used:
        torch.autograd.grad(y, x, torch.ones(FLOATS))
    assert used.peak == 2 * ONE  # inputs and results
    assert used.left == 0
