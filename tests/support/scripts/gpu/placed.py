"""A model that comes to the GPU in the way that the first word names, and is trained there."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

what = sys.argv[1]
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1) * 2)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(self.embed(x)).relu())) * self.scale)

    @torch.no_grad()
    def reset(self):
        for parameter in self.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / 8)
        for name, buffer in self.named_buffers():
            buffer.fill_(0 if "mean" in name or "num" in name else 1)


first = None
if what == "optimizer first":
    model = Model()
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.cuda()
elif what == "inside of a device":
    with torch.device("cuda"):
        model = Model()
elif what == "empty":
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cuda")
    model.head.weight = model.embed.weight
    model.reset()
elif what == "empty on the host":
    model = Model().to_empty(device="cpu")
    model.reset()
    model.to(0)
elif what == "initialized there":
    model = Model().to("cuda:0")
    model.reset()
    with torch.no_grad():
        model.first.weight.data[0].fill_(0.5)
        nn.init.uniform_(model.second.weight, generator=torch.Generator("cuda").manual_seed(3))
        model.second.bias[1] = 7
        model.norm.bias.chunk(2)[0].fill_(0.25)
elif what == "back and forth":
    model = Model().cuda()
    model.cpu()
    model.first.bias.data.numpy()[:] = 0.25
    model.to(torch.device("cuda", 0)).to(torch.float64).float()
elif what == "copied":
    model = copy.deepcopy(Model().cuda())
elif what == "loaded":
    source = Model().cuda()
    with torch.no_grad():
        source.first.weight.mul_(2)
    model = Model().cuda()
    model.load_state_dict(source.state_dict())
elif what == "loaded by assignment":
    model = Model().cuda()
    model.load_state_dict({name: value * 1.5 for name, value in Model().cuda().state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight
elif what == "frozen":
    model = Model().cuda()
    model.first.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
elif what == "trained by hand first":
    model = Model().cuda().eval()
    F.cross_entropy(model(torch.arange(20, device="cuda")), torch.arange(20, device="cuda")).backward()
    print(model.first.weight.grad.device, model.first.weight.grad.norm())
elif what == "of two":
    model, teacher = Model().cuda(), Model().cuda().eval()
elif what == "numbers of the host":
    model = Model().cuda()
    kept = model.first.weight.detach()
    model.first.weight.data = model.first.weight.data * 2
    print(kept.sum(), model.first.weight.sum())
elif what == "alias":
    model = Model().cuda()
    alias = model.first.weight.data
    view = alias[0]
    view.mul_(3)
    print(alias.sum(), model.first.weight.sum())
print({(p.device.type, p.dtype, p.is_cuda, p.get_device()) for p in model.parameters()})
print(repr(next(model.parameters()))[:60], sum(p.numel() for p in model.parameters()))
optimizer = first or torch.optim.AdamW(model.parameters(), lr=1e-2, fused=what == "copied")
average = copy.deepcopy(model)
generator = torch.Generator().manual_seed(1)
for step in range(3):
    tokens = torch.randint(0, 20, (12,), generator=generator)
    x, y = tokens.to("cuda"), tokens.roll(1).cuda(non_blocking=True)
    tokens.zero_()
    loss = F.cross_entropy(model(x), y)
    if what == "of two":
        with torch.no_grad():
            wanted = teacher(x)
        loss = loss + F.mse_loss(model(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for own, newest in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(newest, 0.5)
    print(step, loss.item(), x.sum().item(), y.float().mean(), x.device)
    if what == "alias":
        alias[1].zero_()
        print(alias.sum(), view.sum())
    if what == "back and forth":
        model.to("cpu")
        print(next(model.parameters()).device, sum(p.double().sum().item() for p in model.parameters()))
        model.to("cuda")
print(f"{sum(p.double().abs().sum().item() for p in (*model.parameters(), *average.parameters())):.17g}")
print({name: value.double().sum().item() for name, value in model.state_dict().items()})
torch.save({"model": model.state_dict(), "whole": average.state_dict(), "states": optimizer.state_dict()}, "placed.pt")
