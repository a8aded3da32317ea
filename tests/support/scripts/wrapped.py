"""A model in a wrapper for data parallelism: the first word says which, the second one names the device."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

what, device = sys.argv[1:3]
torch.manual_seed(0)
model = inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
if "distributed" in what:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(inner, device_ids=[0] if "moved" in what else None)
elif "wrapped" in what:
    model = nn.DataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,)).to(device)
    x = x if "moved" in what else x.to(device)
    if "distributed" in what and step == 1:
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
    elif step == 1:
        F.cross_entropy(model(x), y).backward()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print({name: value.double().sum().item() for name, value in inner.state_dict().items()})
if model is not inner:
    assert {name.removeprefix("module.") for name in model.state_dict()} == set(inner.state_dict())
