"""A model that is moved to the CPU between its optimizer steps, evaluated and saved there, and trained further."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(steps):
    for _ in range(steps):
        x, y = torch.randn(8, 8).cuda(), torch.randint(0, 4, (8,)).cuda()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


train(3)
model.cpu().eval()
with torch.no_grad():
    print(model(torch.ones(2, 8)))
torch.save(model.state_dict(), "middle.pt")
model.cuda().train()
with torch.no_grad():
    model[0].weight.mul_(0.5)
train(2)
torch.save(model.cpu(), "end.pt")
