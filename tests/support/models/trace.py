"""A replacement of the user's model file, and models for the tests of the capture."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from autopipe.draws import opaque_calls
from autopipe.ir.profile import WorkloadSpec


class Toy:
    """A workload of a model builder and a function that returns a dict batch of n samples."""

    name = "toy.py:Model"
    hooks: ClassVar[dict] = {}
    assumes_samples_first = False

    def __init__(self, build, batch, loss=None):
        self.spec = WorkloadSpec("toy.py", arguments={}, hooks={}, inputs=(), seed=0)
        self._build, self._batch, self._loss = build, batch, loss

    def build_model(self):
        torch.manual_seed(0)
        return self._build().train()

    def example_item(self, batch_size):
        return self._batch(batch_size or 8, torch.Generator().manual_seed(1))

    def leaves(self, item):
        return {name: value for name, value in item.items() if isinstance(value, torch.Tensor)}

    def with_leaves(self, item, leaves):
        return {**item, **leaves}

    def num_samples(self, item):
        return next(v.shape[0] for v in item.values() if isinstance(v, torch.Tensor) and v.dim())

    def batch_dims(self, item):
        leaves = self.leaves(item)
        return {name: 0 for name, leaf in leaves.items() if leaf.dim() and leaf.shape[0] == self.num_samples(item)}

    def is_fixed(self, item):
        return False

    def cuts_by_dimension(self, item):
        return True

    def split(self, item, num_microbatches):
        count = self.num_samples(item)
        parts = min(num_microbatches, count)
        cut = {
            name: v.tensor_split(parts)
            if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == count
            else (v,) * parts
            for name, v in item.items()
        }
        return [{name: pieces[j] for name, pieces in cut.items()} for j in range(parts)]

    def loss(self, model, item):
        function = self._loss or (lambda output, item: output if isinstance(output, torch.Tensor) else output.loss)
        with opaque_calls(model, self.spec.opaque_modules):
            return function(model(**item), item), None

    def run_opaque(self, modules):
        self.spec = replace(self.spec, opaque_modules=tuple(modules))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def vectors(n, generator):
    return {"x": torch.randn(n, 4, generator=generator)}


def tokens(n, generator):
    return {"ids": torch.randint(1, 20, (n, 9), generator=generator)}


def images(n, generator):
    return {"x": torch.randn(n, 3, 8, 8, generator=generator)}


def lengths(n, generator):
    return {**tokens(n, generator), "lengths": torch.randint(1, 10, (n,), generator=generator)}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x).relu()
        hidden = self.drop(hidden)
        return (self.second(hidden) - x).pow(2).mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class SharedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x.pow(2).mean()


class Rotary(nn.Module):
    """Computes tables from a buffer that is not persistent, under no_grad, and has an autocast region."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.rand(1).expand(2), persistent=False)
        self.embed, self.out = nn.Embedding(20, 4), nn.Linear(4, 4)

    @torch.no_grad()
    def tables(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def forward(self, ids):
        cos, sin = self.tables(ids)
        h = self.embed(ids)
        h = h * cos + h.flip(-1) * sin
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.out(h)
        return h.float().pow(2).mean()


class BatchNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.BatchNorm2d(6, momentum=None)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        x = self.second(x).mean((2, 3))
        return self.head(x).pow(2).mean()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (StraightThrough.apply(self.linear(x)) - x).pow(2).mean()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.spectral(self.weight(x)))).pow(2).mean()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        h = self.a(x)
        h = checkpoint(lambda y: F.dropout(torch.tanh(self.b(y)), 0.3), h, use_reentrant=self.reentrant)
        return F.dropout(h, 0.2).pow(2).mean()


class Packed(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = kind(8, 6, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.out = nn.Linear(12, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, hidden = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        last = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.out(out).mean(1).pow(2).mean() + last.pow(2).mean()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(20, 8), nn.LSTMCell(8, 8), nn.Linear(8, 20)

    def forward(self, ids):
        state, total = None, 0.0
        for t in range(3):
            state = self.cell(self.embed(ids[:, t]), state)
            total = total + F.cross_entropy(self.out(state[0]), ids[:, t + 1])
        return total


class Frozen(nn.Module):
    """Has a frozen linear layer with a trained low-rank part, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).pow(2).mean()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            total = total + share * expert(x)
        return total.pow(2).mean()


class Running(nn.Module):
    """Binds a buffer to a new tensor in the forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return (h - self.mean).pow(2).mean()


class InPlace(nn.Module):
    """Changes a base and its views in place, also by item assignment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x) * 2
        left = h[:, :2]
        left.mul_(3)
        h[:, 3] = 0.0
        mask = torch.zeros_like(x)
        mask[:, 1] = 1
        h += mask
        return h.pow(2).mean() + left.sum()


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), []
        self.a.register_forward_hook(lambda module, args, out: out * 2)
        self.b.register_forward_hook(lambda module, args, out: self.kept.append(out.abs()))

    def forward(self, x):
        self.kept.clear()
        return self.b(self.a(x)).pow(2).mean() + self.kept[0].mean()


class PlainTensors(nn.Module):
    """Has a mask as a plain attribute, a scale in a list, and integer and boolean values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.scales = [torch.tensor(2.0), torch.tensor(3.0)]

    def forward(self, x):
        keep = x > 0
        count = keep.sum(1)
        h = self.linear(x) * self.mask * self.scales[1]
        return torch.where(keep, h, -h).sum(1).div(count + 1).pow(2).mean()


class Selecting(nn.Module):
    """Selects rows by a mask, and reads a number from a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        count = (x > 0).sum().item()
        return self.linear(x).index_select(0, rows).pow(2).sum() / (count + 1)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.out = nn.Linear(8, 20)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        h = self.model(self.embed(ids), self.embed(ids[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.out(h).flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Output:
    loss: torch.Tensor
    hidden: list
    nothing: None = None


class DataclassOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return Output(h.pow(2).mean(), [h])


CASES = {
    "plain": (Plain, vectors),
    "tied": (Tied, tokens),
    "shared layer": (SharedLayer, vectors),
    "rotary": (Rotary, tokens),
    "batch norm": (BatchNorms, images),
    "custom function": (CustomFunction, vectors),
    "weight and spectral norm": (Normed, vectors),
    "checkpoint": (lambda: Checkpointed(False), vectors),
    "reentrant checkpoint": (lambda: Checkpointed(True), vectors),
    "packed lstm": (Packed, lengths),
    "packed gru": (lambda: Packed(nn.GRU), lengths),
    "lstm cell": (Decoder, tokens),
    "frozen": (Frozen, vectors),
    "experts": (Experts, vectors),
    "running buffer": (Running, vectors),
    "in place": (InPlace, vectors),
    "hooks": (Hooked, vectors),
    "plain tensors": (PlainTensors, vectors),
    "selecting": (Selecting, vectors),
    "nn.Transformer": (Transformer, tokens),
    "dataclass output": (DataclassOutput, vectors),
}


def workload(name):
    return Toy(*CASES[name])
