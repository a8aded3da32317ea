import torch
from torch import nn
from torch.optim import lr_scheduler as S


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def build_model():
    torch.manual_seed(0)
    return Net()


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    for _ in range(40):
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 5, (batch_size,), generator=g)


def optimizer(named):
    named = list(named)
    groups = [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for n, p in named if p.dim() < 2]},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=torch.tensor(0.01))


class Decay:
    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.99**self.calls


def scheduler(o):
    return S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=3), S.LambdaLR(o, Decay())], [3])
