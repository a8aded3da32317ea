"""The forward's numbers change in every call: a dropout that rises, a factor of Python's random, a temperature."""

import random

import torch
from torch import nn
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.calls = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4), 0

    def forward(self, x):
        self.calls += 1
        h = F.dropout(self.a(x), min(0.5, 0.01 * self.calls), self.training)
        h = self.b(h) * (1 + random.random())
        if self.calls % 7 == 3:
            h = h + 0.1 * self.calls
        return self.c(torch.tanh(h / (0.5 + self.calls)))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(30):
    for rows in (4, 4, 6):
        loss = model(torch.randn(rows, 8)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.17g}", model.calls)
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            print("evaluation", f"{model(torch.ones(3, 8)).sum().item():.17g}")
        model.train()
torch.save(model.state_dict(), "changing_numbers.pt")
