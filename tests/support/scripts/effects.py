"""Models whose forward does more than compute. The word says what; each prints all that it may have changed."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
total = 0


class Settings:
    level = 0


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.settings, self.kept, self.named = how, Settings(), [], {}
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.count, self.extra, self.mask = 0, None, None
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        global total
        h = torch.tanh(self.a(x))
        match self.how:
            case "count":
                self.count += 1
            case "loss":
                self.extra = h.pow(2).mean()
            case "append":
                self.kept.append(h.detach())
            case "named":
                self.named["h"] = h.detach()
            case "inner":
                self.settings.level += 1
            case "global":
                total += 1
            case "print":
                print("forward", tuple(h.shape))
            case "write":
                sys.stdout.write(f"{len(h)}\n")
            case "first":
                if self.mask is None:
                    self.mask = torch.ones(16)
                    h = h * 2
            case "mask":
                if self.mask is None or len(self.mask) != len(x):
                    self.mask = torch.arange(len(x) * 1.0)[:, None]
                h = h * self.mask
            case "buffer":
                self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
                self.seen += 1
        return self.c(torch.relu(self.b(h)))


if __name__ == "__main__":
    model = Net(sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(6):
        loss = model(torch.randn(4 + i % 2, 8)).pow(2).sum()
        if model.how == "loss":
            loss = loss + 0.1 * model.extra
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        extra = None if model.extra is None else f"{model.extra.item():.17g}"
        print(f"{loss.item():.17g}", model.count, extra, len(model.kept), list(model.named), total)
        print(model.settings.level, None if model.mask is None else tuple(model.mask.shape))
        print(f"{model.mean.double().sum().item():.17g}", model.seen.item())
