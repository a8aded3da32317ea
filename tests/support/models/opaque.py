"""Model files with modules that are not one graph, because their calls differ between batches."""

from __future__ import annotations

from pathlib import Path

_HEAD = """
import random
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
"""

_TAIL = """
def build_model():
    return Model()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield torch.randn(batch_size, 6, 8, generator=g), torch.randn(batch_size, 6, 8, generator=g)

loss = nn.MSELoss

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2, weight_decay=0.1)
"""

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.gate, self.drop = nn.Linear(8, count), nn.Dropout(0.2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(count))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in torch.unique(chosen[: len(chosen) // 2]).tolist():
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.drop(self.experts[number](flat[rows])) * weight[rows, place, None])
        return out.view_as(x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe, self.drop = nn.LayerNorm(8), Experts(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.moe(self.norm(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
"""

LAYER_DROP = """
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = x + layer(x) * np.random.uniform(0.9, 1.1)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.stack, self.more = nn.Linear(8, 8), Stack(), nn.Linear(8, 8)
        self.other, self.drop, self.last = Stack(), nn.Dropout(0.1), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.drop(self.other(self.more(self.stack(self.first(x))))))
"""

STATISTICS = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        branch = int(x.mean() + self.mean.sum() > 0)
        self.seen[branch] += 1
        return x - self.mean, (self.b if branch else self.a)(x).tanh()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two, self.last = nn.Linear(8, 8), Branches(), Branches(), nn.Linear(8, 8)

    def forward(self, x):
        x, y = self.one(self.first(x))
        z, y = self.two(x + y.sin())
        return self.last(y) + z
"""

TIED = """
class Pick(nn.Module):
    def __init__(self, lin):
        super().__init__()
        self.a, self.b = lin, nn.Linear(8,8)
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x).tanh()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8,8)
        self.pick = Pick(self.first)
        self.mid = nn.Linear(8,8)
        self.last = nn.Linear(8,8)
    def forward(self, x):
        x = self.pick(self.first(x))
        x = self.mid(x)
        x = self.pick(x)
        return self.last(x)
"""

LEFT_BEHIND = """
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8,4)
        self.ex = nn.ModuleList(nn.Linear(8,8) for _ in range(4))
        self.aux = None
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        self.aux = p.mean((0,1)).pow(2).sum()
        e = p.argmax(-1)
        out = torch.zeros_like(x)
        for i in e.unique().tolist():
            m = e == i
            out[m] = self.ex[i](x[m])
        return out
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = Moe()
    def forward(self, x):
        y = self.moe(x)
        return x + y, self.moe.aux
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8,8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8,8)
    def forward(self, x):
        x = self.first(x)
        t = 0
        for b in self.blocks:
            x, a = b(x)
            t = t + a
        return self.last(x) + t
"""

INNER_GRADIENTS = """
class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(nn.Linear(8,8), nn.Tanh())
    def forward(self, x):
        rows = torch.func.vmap(torch.func.vmap(torch.func.jacrev(self.l)))(x)
        return x - 0.1*torch.func.grad(lambda z: self.l(z).pow(2).sum())(x) + 0.1*rows.sum(-1)
class E2(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8,8)
    def forward(self, x):
        with torch.enable_grad():
            z = x if x.requires_grad else x.requires_grad_()
            g, = torch.autograd.grad(self.l(z).tanh().pow(2).sum(), z, create_graph=True)
        return x - 0.1*g
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.e, self.m, self.e2, self.last = nn.Linear(8,8), Energy(), nn.Linear(8,8), E2(), nn.Linear(8,8)
    def forward(self, x):
        return self.last(self.e2(self.m(self.e(self.first(x)))))
"""

EARLY_EXIT = """
class W(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.c = nn.Linear(8,8), nn.Parameter(torch.zeros(8))
    def forward(self, x):
        if x.abs().max() > 0.1:
            return self.c.expand_as(x)
        return self.l(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.f2, self.s, self.last = nn.Linear(8,8), nn.Linear(8,8), W(), nn.Linear(8,8)
    def forward(self, x):
        return self.last(self.s(self.f2(self.first(x))))
"""

OBJECTS = """
import dataclasses
@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    stats: list
    note: str = "x"
@dataclasses.dataclass
class Trail:
    hiddens: list
class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.k = nn.Linear(8,8), nn.Linear(8,8)
    def forward(self, x):
        y = self.l(x) if x.abs().max().item() > 2 else self.k(x)
        return Out(y, [y.mean((1,2)), (x > 0).long()])
class S(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8,8) for _ in range(4))
    def forward(self, x):
        hiddens = []
        for l in self.layers:
            if random.random() < 0.5:
                continue
            x = x + l(x).tanh()
            hiddens.append(x)
        return x, Trail(hiddens), hiddens
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.d, self.s, self.last = nn.Linear(8,8), D(), S(), nn.Linear(8,8)
    def forward(self, x):
        o = self.d(self.first(x))
        y = o.hidden + o.stats[0][:, None, None] * o.stats[1]
        y, trail, more = self.s(y)
        return self.last(y)
"""

ALIASES = """
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8,8)
    def forward(self, x):
        if self.training and torch.rand(()) < 0.5:
            return x
        return self.l(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.o, self.p, self.last = nn.Linear(8,8), Drop(), Drop(), nn.Linear(8,8)
    def forward(self, x):
        x = self.first(x)
        y = self.o(x)
        y += 1
        z = self.p(y * x)
        z = z.mul_(2)
        return self.last(z) + x
"""

CHECKPOINTED = """
import torch.utils.checkpoint as cp
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = x + cp.checkpoint(layer, x, use_reentrant=False)
        return x
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.s, self.m, self.t, self.last = nn.Linear(8,8), Stack(), nn.Linear(8,8), Stack(), nn.Linear(8,8)
    def forward(self, x):
        return self.last(self.t(self.m(self.s(self.first(x)))))
"""

AUGMENTED = """
class Aug(nn.Module):
    def forward(self, x):
        if random.random() < 0.5:
            x = x.flip(1)
        return x * random.uniform(0.5, 1.5) + torch.randn_like(x) * float(np.random.rand())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.aug, self.first, self.m, self.last = Aug(), nn.Linear(8,8), nn.Linear(8,8), nn.Linear(8,8)
    def forward(self, x):
        a, b = self.aug(x), self.aug(x)
        return self.last(self.m(self.first(a)).tanh()) + self.m(b)
"""

# its time steps are no linear function of the length of the sequence
STRIDED = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.empty = nn.Conv1d(8, 8, 3, stride=2), nn.Parameter(torch.zeros(8))
    def forward(self, x):
        hidden = self.conv(x.transpose(1, 2)).transpose(1, 2)
        hidden = torch.where(torch.from_numpy(np.random.rand(*hidden.shape[:2]) < 0.3)[..., None], self.empty, hidden)
        return hidden
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.encode, self.mid, self.last = nn.Linear(8,8), Encoder(), nn.Linear(8,8), nn.Linear(8,8)
    def forward(self, x):
        return self.last(x + self.mid(self.encode(self.first(x))).mean(1, keepdim=True))
"""

CASES = {
    "experts": EXPERTS,
    "layer_drop": LAYER_DROP,
    "statistics": STATISTICS,
    "tied": TIED,
    "left_behind": LEFT_BEHIND,
    "inner_gradients": INNER_GRADIENTS,
    "early_exit": EARLY_EXIT,
    "objects": OBJECTS,
    "aliases": ALIASES,
    "checkpointed": CHECKPOINTED,
    "augmented": AUGMENTED,
    "strided": STRIDED,
}


def write(name: str, folder: Path, text: str = "") -> Path:
    """Write a model file."""
    path = folder / f"{name}.py"
    path.write_text(_HEAD + (text or CASES[name]) + _TAIL, encoding="utf-8")
    return path
