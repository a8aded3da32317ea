"""Weight versions are separate parameters: those that autograd has saved never get other data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import AutopipeError
from autopipe.runtime.weights import WeightVersions


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def stepped(versions: WeightVersions, by: float) -> None:
    versions.begin_step(versions.newest)
    with torch.no_grad():
        for parameter in versions.masters.values():
            if parameter.requires_grad:
                parameter += by
    versions.end_step()


KERNELS = {
    "multiplication": (torch.randn(4), lambda x, w: w * x, torch.randn(4)),
    "matrix product": (torch.randn(4, 4), lambda x, w: F.linear(x, w), torch.randn(2, 4)),
    "convolution": (torch.randn(3, 2, 3, 3), lambda x, w: F.conv2d(x, w), torch.randn(1, 2, 8, 8)),
    "layer norm": (torch.randn(4), lambda x, w: F.layer_norm(x, (4,), w), torch.randn(2, 4)),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_backward_after_a_step_uses_the_weights_of_its_forward(kernel: str) -> None:
    value, call, data = KERNELS[kernel]

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(value.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x, self.w).pow(2).sum()

    expected = data.clone().requires_grad_()
    One()(expected).backward()
    module = One()
    versions = WeightVersions(module, staleness=1)
    x = data.clone().requires_grad_()
    loss = module(x)
    stepped(versions, 10.0)
    loss.backward()
    assert torch.equal(x.grad, expected.grad)
    assert torch.equal(versions.masters["w"], value + 10.0)


def test_replacing_the_data_of_a_parameter_gives_wrong_gradients() -> None:
    # the reason for separate parameters: torch does not detect this mistake
    weight = nn.Parameter(torch.tensor([2.0]))
    x = torch.tensor([3.0], requires_grad=True)
    loss = (weight * x).sum()
    weight.data = torch.tensor([12.0])
    loss.backward()
    assert x.grad is not None and x.grad.item() == 12.0


def test_staleness_zero_steps_in_place_and_holds_one_version() -> None:
    module = Scale(2.0)
    parameter, memory = module.w, module.w.data_ptr()
    versions = WeightVersions(module, staleness=0)
    for _ in range(3):
        stepped(versions, 1.0)
    assert module.w is parameter and parameter.data_ptr() == memory
    assert versions.versions == (3,)
    assert versions.peak_versions == 1


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_as_many_old_versions_are_held_as_the_staleness(staleness: int) -> None:
    module = Scale(0.0)
    versions = WeightVersions(module, staleness)
    for _ in range(6):
        stepped(versions, 1.0)
    assert versions.versions == tuple(range(6 - staleness, 7))
    for version in versions.versions:
        versions.use(version)
        assert module.w.item() == version
    with pytest.raises(AutopipeError, match="weight version 0 is not stored"):
        versions.use(0)


def test_a_minibatch_steps_with_the_gradients_of_its_version() -> None:
    module = Scale(0.0)
    versions = WeightVersions(module, staleness=1)
    stepped(versions, 1.0)
    versions.use(0)
    module(torch.tensor([5.0])).backward()
    versions.begin_step(1)
    assert versions.masters["w"].grad is not None and versions.masters["w"].grad.item() == 5.0
    versions.end_step()
    assert all(leaf.grad is None for leaf in versions._leaves[1].values())


def test_every_module_that_shares_a_parameter_gets_the_version() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    versions = WeightVersions(module, staleness=1, names={"b.weight": "a.weight"})
    assert sorted(versions.masters) == ["a.bias", "a.weight", "b.bias"]
    stepped(versions, 1.0)
    versions.use(1)
    assert module["a"].weight is module["b"].weight is versions.in_use["a.weight"]


def test_an_lstm_computes_with_the_version_of_its_minibatch() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 3), torch.randn(2, 1, 3)
    before = lstm(x)[0]
    versions = WeightVersions(lstm, staleness=1)
    stepped(versions, 1.0)
    versions.use(1)
    assert not torch.equal(lstm(x)[0], before)
    versions.use(0)
    assert torch.equal(lstm(x)[0], before)


def test_frozen_parameters_have_no_versions() -> None:
    module = Scale(1.0)
    module.w.requires_grad_(False)
    versions = WeightVersions(module, 1)
    assert versions.tensors(0) == {}
    assert versions.in_use["w"] is module.w


def test_a_checkpoint_of_step_0_resumes_with_its_weights() -> None:
    module = Scale(1.0)
    versions = WeightVersions(module, staleness=1)
    versions.masters["w"].data = torch.tensor([2.0])  # as when a checkpoint is read
    versions.start_at(0)
    module(torch.ones(1)).backward()
    assert module.w.item() == 2.0
    versions.begin_step(0)
    assert versions.masters["w"].grad is not None  # the parameters that the modules hold
