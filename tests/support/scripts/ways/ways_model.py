"""The model of the ways to use its state, one step of it, and the loop over the ways of one file."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16, bias=False)
        self.drop = nn.Dropout(0.1)
        self.third = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = torch.tanh(self.second(x)) + x
        x = self.drop(torch.relu(self.third(x * self.scale)))
        return self.head(x)


model = Net()
initial = copy.deepcopy(model.state_dict())
data = torch.randn(512, 8)
labels = data[:, :4].argmax(1)


def adam():
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


class run:  # the optimizer of the moment
    opt = adam()


def batch():
    rows = torch.randint(len(data), (12,))
    return data[rows], labels[rows]


def loss_of():
    x, y = batch()
    return F.cross_entropy(model(x), y)


def step(between=None, after=None, zero=True):
    loss = loss_of()
    if zero:
        run.opt.zero_grad()
    loss.backward()
    if between is not None:
        between()
    run.opt.step()
    if after is not None:
        after()
    return loss


def show(*values):
    for value in values:
        if isinstance(value, torch.Tensor):
            print(f"  {value.detach().double().abs().sum().item():.17g}")
        else:
            print(f"  {value!r}")


def try_all(place):
    """Run the functions of a script, each from the same weights."""
    chosen = sys.argv[1:]
    step()
    for name, way in place.items():
        if type(way) is not type(step) or way.__module__ != "__main__" or (chosen and name not in chosen):
            continue
        model.load_state_dict(initial)
        run.opt = adam()
        step()
        print(name)
        way()
        show(step())
        show(sum(v.double().abs().sum() for v in model.state_dict().values()))
        states = [v for s in run.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        show(sum(v.double().abs().sum() for v in states))
        show(torch.rand(1).item())
