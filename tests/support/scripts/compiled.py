"""A model, or parts of one, that the script compiles. The first word says how.

"dropout" adds masks; with "eager", the compiler does nothing.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

how = sys.argv[1]


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return x + self.dropout(self.second(F.gelu(self.first(self.norm(x)))))


@torch.compile(backend="eager")
def loss_of(output, target):
    return F.cross_entropy(output, target)


torch.manual_seed(0)
raw = model = nn.Sequential(nn.Linear(16, 32), *[Block(0.2 if "dropout" in how else 0.0) for _ in range(2)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
backend = "eager" if "eager" in how else "inductor"
if "in place" in how:
    model.compile(backend=backend)
if "parts" in how:
    model[1] = torch.compile(model[1], backend=backend)
    model[2].compile(backend=backend)
if "whole" in how:
    model = torch.compile(model, backend=backend)
generator = torch.Generator().manual_seed(1)
for _ in range(4):
    for _ in range(2):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 32, (8,), generator=generator)
        loss = loss_of(model(x), y)
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
raw.eval()
with torch.no_grad():
    print(raw(x).sum().item(), model(x).sum().item())
print(len(model), *model.state_dict())
