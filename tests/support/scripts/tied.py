"""A weight in three places of a model, a layer that is used twice, and several calls of the model in one backward."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.a, self.b, self.drop = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.1)
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.a(torch.tanh(self.first(x))))
        x = torch.relu(self.b(self.b(self.drop(torch.tanh(self.second(x))))))
        return self.third(x)


model = Tied()
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(40, 12)
for i in range(4):
    left, right = data[i : i + 8], data[i + 8 : i + 19]  # of different sizes
    loss = F.mse_loss(model(left), left) + model(right).abs().mean() * F.mse_loss(model(left * 2), right[:8])
    opt.zero_grad()
    loss.backward()
    if i % 2:  # a second backward adds
        model(model(right).detach()).pow(2).mean().backward()
    opt.step()
    print(f"{loss.item():.17g} {model.first.weight.grad.double().abs().sum().item():.17g}")
torch.save({**model.state_dict(), **{f"{k}.grad": p.grad for k, p in model.named_parameters()}}, "tied.pt")
