"""Gradual unfreezing: layers get gradients and a group of the optimizer in the middle of training."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(11)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
data = torch.randn(256, 8)
labels = data[:, :4].argmax(1)
model.requires_grad_(False)
model[5].requires_grad_(True)
opt = torch.optim.AdamW(model[5].parameters(), lr=1e-2)
for step in range(9):
    if step == 3:
        model[3].requires_grad_(True)
        opt.add_param_group({"params": model[3].parameters(), "lr": 5e-3})
    if step == 6:
        rest = [*model[0].parameters(), *model[1].parameters()]
        for p in rest:
            p.requires_grad = True
        opt.add_param_group({"params": rest, "lr": 1e-3, "weight_decay": 0.0})
    x, y = data[step * 16 : step * 16 + 16], labels[step * 16 : step * 16 + 16]
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    print(loss.item(), len(opt.param_groups), len(opt.state))
torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, "unfreezing.pt")
