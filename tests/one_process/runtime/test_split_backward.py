"""The two halves of a backward equal the complete backward, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopipe.runtime.split_backward import backward_inputs


class Shared(nn.Module):
    """A layer used twice, and a weight that is combined with other weights before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(torch.tanh(self.a(x)))) @ (self.scale * self.a.weight)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 6),
    ),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "layer used twice": Shared,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("receives", [True, False])
def test_the_halves_equal_the_complete_backward(name: str, receives: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    data = torch.randn(5, 6) if name != "attention" else torch.randn(5, 3, 6)
    start = torch.randn_like(data)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = data.clone().requires_grad_(receives)
        return x, model(x)

    for _ in range(2):  # gradients of two microbatches are summed
        x, y = forward()
        y.backward(start)
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    expected_x = x.grad
    model.zero_grad(set_to_none=True)
    parameters = dict(model.named_parameters())
    pending = []
    for _ in range(2):
        x, y = forward()
        pending.append(backward_inputs([y], [start], [x] if receives else [], parameters))
    if receives:
        assert torch.equal(x.grad, expected_x)
    for half in pending:
        half.finish(parameters)
    assert {n for n, p in parameters.items() if p.grad is None} == set()
    assert all(torch.equal(p.grad, expected[n]) for n, p in parameters.items())


def test_the_first_half_computes_no_weight_gradients() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    pending = backward_inputs([layer(x)], [torch.ones(2, 4)], [x], dict(layer.named_parameters()))
    assert x.grad is not None and layer.weight.grad is None and layer.bias.grad is None
    pending.finish(dict(layer.named_parameters()))
    assert layer.weight.grad is not None and layer.bias.grad is not None
