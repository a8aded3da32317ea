"""Weights that the first, a middle and the last stage use; with ``--several``, one backward through several calls."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.square = nn.Parameter(torch.eye(16) + 0.1 * torch.randn(16, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = torch.tanh(self.first(self.embedding(x)))
        x = torch.tanh(self.middle(x) @ torch.mm(self.square, self.square))
        x = x + F.linear(x @ self.embedding.weight.t(), self.embedding.weight.t())
        x = torch.tanh(self.last(x))
        return self.head(x)


model = Tied()
if "--frozen" in sys.argv:
    model.head.weight.requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    opt.zero_grad()
    losses = []
    for _ in range(3):
        x = torch.randint(32, (8, 5))
        losses.append(F.cross_entropy(model(x).flatten(0, 1), x.flatten()))
    if "--several" in sys.argv:
        sum(losses).backward()
    else:
        for loss in losses:
            loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(step, *(loss.item() for loss in losses), norm.item())
print(*(f"{name} {value.double().abs().sum().item():.17g}" for name, value in model.state_dict().items()))
