"""The forward calls functions with a backward of their own, which the script defines, with what they use."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable

ROOT, LIMITS = math.sqrt(0.25), (-2.0, 2.0)
SCALE = 1.5


def scaled(x: torch.Tensor, by: float = SCALE) -> torch.Tensor:
    return x * by


class Base(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return scaled(grad) * x.cos() * BOUND


BOUND = 2.0


class Sine(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return scaled(torch.sin(x))


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(*LIMITS) * ROOT * math.sqrt(1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ROOT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.c(Half.apply(self.b(Sine.apply(self.a(x)))))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    for step in range(8):
        loss = model(torch.randn(4 + step % 2, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, f"{loss.item():.17g}")
    torch.save(model.state_dict(), "own_function.pt")


if __name__ == "__main__":
    main()
