"""A model whose forward does what the way of the moment says, and the loop over the ways of one file.

A way is a class. ``inside`` runs in the forward, ``between`` after each step, ``show`` returns what may have changed.
"""

import copy
import random
import sys

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Nothing:
    def inside(net, h):
        return h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.way, self.kept, self.count = Nothing, [], 0

    def forward(self, x):
        h = self.way.inside(self, torch.tanh(self.a(x)))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.seen += 1
        return self.c(self.drop(torch.relu(self.b(h))))


model = Net()
initial = copy.deepcopy(model.state_dict())


def steps(way, optimizer):
    lines = []
    for i in range(3):
        loss = model(torch.randn(6, 8)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lines.append(f"  {loss.item():.17g}")
        if hasattr(way, "between"):
            way.between(i)
    if hasattr(way, "show"):
        lines.append(f"  {way.show()!r}")
    lines.append(f"  {sum(v.double().abs().sum().item() for v in model.state_dict().values()):.17g}")
    lines.append(f"  {torch.rand(1).item():.17g} {random.random():.17g} {np.random.rand():.17g}")
    return lines


def try_all(place):
    """Run the classes of a script, each from the same weights; print only those that are not refused."""
    chosen = sys.argv[1:]
    steps(Nothing, torch.optim.SGD(model.parameters(), 0.1))
    for name, way in place.items():
        if not isinstance(way, type) or not hasattr(way, "inside") or way is Nothing or (chosen and name not in chosen):
            continue
        model.load_state_dict(initial)
        model.train().requires_grad_(True)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model.way, model.kept, model.count = way, [], 0
        try:
            lines = steps(way, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        except Exception as error:
            where = getattr(error, "where", "")
            kind = "refused" if str(error).startswith("autopipe run:") and ".py:" in where else type(error).__name__
            print(f"{name}: {kind}: {error} [{where}]".replace("\n", " "), file=sys.stderr)
        else:
            print(name)
            print("\n".join(lines))
        for key in [key for key in vars(model) if key.startswith("own")]:
            delattr(model, key)
