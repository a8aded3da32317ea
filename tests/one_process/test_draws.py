"""Random draws depend on (seed, minibatch, microbatch, position) and on nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe import draws


def test_the_seeds_of_draws_never_change() -> None:
    # a checkpoint of an earlier version must resume with the same masks
    assert draws.seed_of(0, 0, 0, 0) == 1195769770526638388
    assert draws.seed_of(1, 2, 3, 4) == draws.seed_of(1, 2, 3, 4)
    seen = {draws.seed_of(s, t, j, k) for s in range(4) for t in range(4) for j in range(4) for k in range(4)}
    assert len(seen) == 256
    assert all(0 <= value < 2**63 for value in seen)


def test_a_call_draws_the_same_numbers_alone_and_within_the_forward() -> None:
    x = torch.ones(64)
    with draws.Draws(7, 3, 2):
        whole = [F.dropout(x, 0.5), torch.rand(8), F.dropout(x, 0.1)]
    alone = []
    for position, call in enumerate([lambda: F.dropout(x, 0.5), lambda: torch.rand(8), lambda: F.dropout(x, 0.1)]):
        with draws.at((7, 3, 2), position):
            alone.append(call())
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))


def test_every_draw_of_a_call_has_its_own_position() -> None:
    lstm = nn.LSTM(4, 4, num_layers=3, dropout=0.5)
    x = torch.randn(5, 2, 4)
    with draws.Draws(0, 0, 0) as mode:
        whole = lstm(x)[0]
    count = mode.position
    assert count == 2
    with draws.at((0, 0, 0), 0, count):
        assert torch.equal(lstm(x)[0], whole)


def test_attention_without_dropout_draws_nothing() -> None:
    q = torch.randn(1, 1, 4, 8)
    with draws.Draws(0, 0, 0) as mode:
        F.scaled_dot_product_attention(q, q, q)
        assert mode.position == 0
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert mode.position == 1


def test_evaluation_draws_nothing() -> None:
    with draws.Draws(0, 0, 0) as mode:
        nn.Dropout(0.5).eval()(torch.ones(4))
    assert mode.position == 0


class _Fails(nn.LSTM):
    def forward(self, *_):
        raise RuntimeError("no")


def test_recurrent_layers_with_dropout_train_without_cudnn_on_cuda() -> None:
    """cuDNN keeps the state of this dropout and ignores later seeds."""
    enabled: list[bool] = []

    def note(*_: object) -> None:
        enabled.append(torch.backends.cudnn.enabled)

    model = nn.ModuleList(
        [nn.LSTM(4, 4, 2, dropout=0.5), nn.GRU(4, 4, 3, dropout=0.1), nn.LSTM(4, 4, 2), nn.GRU(4, 4), nn.Linear(4, 4)]
    )
    assert draws.seed_recurrent_layers(model, torch.device("cpu")) == 0
    assert not any(layer._forward_pre_hooks for layer in model)
    cuda = torch.device("cuda", 0)
    assert draws.seed_recurrent_layers(model, cuda) == draws.seed_recurrent_layers(model, cuda) == 2
    for layer in model:
        layer.register_forward_pre_hook(note)
    batch = torch.randn(3, 2, 4)
    for training in (True, False):
        enabled.clear()
        for layer in model.train(training):
            layer(batch)
            assert torch.backends.cudnn.enabled
        assert enabled == [not training, not training, True, True, True]


def test_cudnn_is_enabled_again_if_a_layer_fails() -> None:
    layer = _Fails(4, 4, 2, dropout=0.5)
    draws.seed_recurrent_layers(layer, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="no"):
        layer(torch.randn(3, 2, 4))
    assert torch.backends.cudnn.enabled


def test_a_recurrent_layer_without_cudnn_draws_once_between_two_layers() -> None:
    layer, batch = nn.LSTM(4, 4, 3, dropout=0.5), torch.randn(3, 2, 4)
    with torch.backends.cudnn.flags(enabled=False), draws.Draws(0, 0, 0) as counted:
        first = layer(batch)[0]
    assert counted.position == 2
    with draws.at((0, 0, 0), 0, 2):
        assert torch.equal(layer(batch)[0], first)


def test_a_recurrent_layer_that_runs_without_cudnn_can_be_copied() -> None:
    model = nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.5))
    assert draws.seed_recurrent_layers(model, torch.device("cuda")) == 1
    copied = copy.deepcopy(model)
    inside = []
    copied[0].register_forward_pre_hook(lambda *_: inside.append(torch.backends.cudnn.enabled))
    copied(torch.ones(3, 1, 2))
    assert inside == [False] and torch.backends.cudnn.enabled
