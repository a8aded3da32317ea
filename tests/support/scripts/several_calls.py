"""One backward through several calls of a model that uses a layer several times; ``--add``: the loss grows in place."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 128)
        self.wider = nn.Linear(128, 128)
        self.out = nn.Linear(128, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        x = torch.tanh(self.wide(x))
        x = torch.tanh(self.wider(x))
        return self.out(x)


model = Repeated()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    opt.zero_grad()
    if "--add" in sys.argv:
        total = 0
        for _ in range(4):
            total += model(torch.randn(8, 16)).pow(2).mean()
        total.backward()
        opt.step()
        print(step, total.item())
        continue
    losses = [model(torch.randn(8, 16)).pow(2).mean() for _ in range(3)]
    if step % 2:
        sum(losses).backward()
    else:
        (losses[0] + losses[1]).backward()
        losses[2].backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(step, *(loss.item() for loss in losses), norm.item())
torch.save(model.state_dict(), "several.pt")
