"""A small token model with dropout, batch statistics, a tie over the stages, a buffer and a frozen parameter."""

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, TOKENS = 6, 24


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.drop(self.fc2(F.gelu(self.fc1(x))))
        return x + self.norm(y.transpose(1, 2)).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, norm, tokens, tied):
        super().__init__()
        width = 16
        self.table = nn.Embedding(tokens, width)
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, width))
        self.gain = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.first, self.last = Block(width, norm), Block(width, norm)
        self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens) * self.gain + self.offset
        return self.head(self.last(self.first(x)))


def build_model(norm: bool = True, tokens: int = TOKENS, tied: bool = True):
    return Net(norm, tokens, tied)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def large_loss(output, target):
    """Overflow float16 until the loss scale has halved a few times."""
    return 20 * output.square().mean() + loss(output, target)


def nan_loss(output, target):
    """Give gradients that are not numbers: the slope of the root is infinite at zero."""
    return loss(output, target) + (0 * output).abs().sum().sqrt()


def optimizer(named_parameters):
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    decayed = [p for name, p in named if p.dim() > 1]
    others = [p for name, p in named if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 5e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def signs(named_parameters):
    """Step by the signs of gradients only."""
    return torch.optim.Rprop([p for _, p in named_parameters if p.requires_grad], lr=1e-2)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def data(batch_size=16, seed=0, batches=40):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        tokens = torch.randint(0, TOKENS, (batch_size, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def evaluate_data(batch_size=16):
    return data(batch_size, seed=1, batches=2)
