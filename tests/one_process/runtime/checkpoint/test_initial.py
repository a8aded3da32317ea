"""The stages of one rank adopt their parts of one build of the user's model, and share no tensor."""

from __future__ import annotations

import torch
from torch import nn

from autopipe.runtime.checkpoint.initial import adopt_all
from autopipe.stage import Stage


class First(Stage):
    MODULES = ("words", "norm")


class Last(Stage):
    INDEX = 1
    MODULES = ("head",)
    BUFFERS = ("shift",)


class LastWithNorm(Stage):
    INDEX = 1
    MODULES = ("head", "norm")


class Recurrent(Stage):
    INDEX = 1
    MODULES = ("memory",)


class Tagged(nn.Module):
    """A module of the user that may also reach its parameter by another attribute."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.again = [weight]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 5)
        self.head.weight = self.words.weight
        self.head.weight.decay = False
        self.memory = nn.LSTM(3, 3)
        self.memory.bias_hh_l0 = self.norm.weight = nn.Parameter(torch.ones(12))
        self.register_buffer("shift", torch.zeros(2))
        self.tagged = Tagged(self.words.weight)


class Builds:
    """Counts the builds of a model; every build starts from the same seed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Model:
        self.count += 1
        torch.manual_seed(0)
        return Model()


def storages(stage: Stage) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}


def test_two_stages_come_from_one_build_and_a_tied_tensor_is_cloned() -> None:
    build = Builds()
    first, last = adopt_all([First, Last], build, {})
    assert build.count == 1
    assert storages(first).isdisjoint(storages(last))
    one, other = first.words.weight, last.head.weight
    assert one is not other and torch.equal(one, other)
    assert isinstance(other, nn.Parameter) and other.requires_grad and other.decay is False


def test_an_lstm_computes_with_the_clone_of_its_weight() -> None:
    build = Builds()
    first, memory = adopt_all([First, Recurrent], build, {})
    assert build.count == 1 and memory.memory.bias_hh_l0 is not first.norm.weight
    assert any(weight is memory.memory.bias_hh_l0 for weight in memory.memory._flat_weights)
    assert all(weight is not first.norm.weight for weight in memory.memory._flat_weights)


def test_a_module_that_two_stages_call_is_built_again() -> None:
    build = Builds()
    first, last = adopt_all([First, LastWithNorm], build, {})
    assert build.count == 2
    assert first.norm is not last.norm and storages(first).isdisjoint(storages(last))
    assert torch.equal(first.words.weight, last.head.weight)


def test_a_tensor_that_a_module_of_the_user_may_hold_twice_is_built_again() -> None:
    class Odd(Stage):
        INDEX = 1
        MODULES = ("tagged",)

    build = Builds()
    first, odd = adopt_all([First, Odd], build, {})
    assert build.count == 2 and odd.tagged.again[0] is odd.tagged.weight
    assert storages(first).isdisjoint(storages(odd))


def test_a_tied_parameter_with_a_hook_is_built_again_with_its_hook() -> None:
    class Hooked(Builds):
        def __call__(self) -> Model:
            model = super().__call__()
            model.words.weight.register_hook(lambda gradient: gradient * 0.5)
            return model

    build = Hooked()
    first, last = adopt_all([First, Last], build, {})
    assert build.count == 2 and storages(first).isdisjoint(storages(last))
    for weight in (first.words.weight, last.head.weight):
        weight.sum().backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 0.5))


def test_a_tied_parameter_of_a_subclass_stays_of_that_subclass() -> None:
    class Scaled(nn.Parameter):
        pass

    class Subclassed(Builds):
        def __call__(self) -> Model:
            model = super().__call__()
            model.words.weight = model.head.weight = Scaled(torch.randn(5, 3))
            return model

    build = Subclassed()
    first, last = adopt_all([First, Last], build, {})
    assert type(first.words.weight) is type(last.head.weight) is Scaled
    assert storages(first).isdisjoint(storages(last))
