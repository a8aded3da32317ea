"""Models that are difficult to trace, in addition to those of the tests (``tests/support/models/trace.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.zoo.workload import Batch, ZooWorkload


def _vectors(n: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(n, 8, 16, generator=generator)}


def _tokens(n: int, generator: torch.Generator) -> Batch:
    return {"ids": torch.randint(1, 20, (n, 9), generator=generator)}


class Spectral(nn.Module):
    """Complex weights between two Fourier transforms, windows by ``unfold`` and their sum by ``index_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 9, dtype=torch.complex64) * 0.1)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=x.shape[-1])
        windows = self.mix(x.unfold(-1, 4, 2))
        places = (torch.arange(7)[:, None] * 2 + torch.arange(4)).flatten()
        x = torch.zeros_like(x).index_add(-1, places, windows.flatten(-2))
        return torch.einsum("bcl,bdl->bcd", x, F.silu(x)).square().mean().sqrt()


class Siamese(nn.Module):
    """One encoder with batch norm, called twice; a predictor for one side and no gradient for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(128, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8)
        )
        self.predictor = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        views = [self.encoder(F.dropout(x, 0.2)), self.encoder(x.flip(-1))]
        total = torch.zeros(())
        for ours, theirs in (views, reversed(views)):
            total = total - F.cosine_similarity(self.predictor(ours), theirs.detach()).mean() / 2
        return total


class Quantised(nn.Module):
    """The nearest codeword with a straight-through gradient; the codebook is a buffer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv1d(8, 4, 1), nn.ConvTranspose1d(4, 8, 3, padding=1)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).transpose(1, 2)
        flat = h.reshape(-1, 4)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        quantised = self.codes[nearest].view_as(h)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(flat.dtype)
                self.counts.lerp_(chosen.sum(0), 0.1)
                self.codes.lerp_(chosen.t() @ flat / self.counts.clamp(min=1)[:, None], 0.05)
        through = h + (quantised - h).detach()
        return F.mse_loss(self.out(through.transpose(1, 2)), x) + 0.25 * F.mse_loss(h, quantised.detach())


class Hyper(nn.Module):
    """Weights that another network computes, one set per sample, sliced from one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"first": (6, 16), "second": (16, 6)}
        self.make = nn.Linear(8, sum(math.prod(size) for size in self.sizes.values()))

    def weights(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        vector, start = self.make(x.mean(-1)), 0
        for name, (rows, columns) in self.sizes.items():
            stop = start + rows * columns
            yield name, vector[:, start:stop].unflatten(1, (rows, columns))
            start = stop

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.weights(x))
        h = torch.tanh(x @ weights["first"].mT) @ weights["second"].mT
        return torch.vmap(lambda row: (row * row).mean())(h).mean()


class Noisy(nn.Module):
    """Many ways to draw random numbers: in place, by distribution, by position, by the shape of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop = nn.ModuleList([nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.Dropout1d(0.2), nn.RReLU(inplace=True)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x + torch.randn_like(x) * 0.1)
        for layer in self.drop:
            h = layer(h)
        h = h * torch.empty(len(x), 1, 1).bernoulli_(0.8).div_(0.8)
        order = torch.randperm(h.shape[1])
        h = self.b(h[:, order]) + torch.normal(0.0, 0.1, (h.shape[-1],))
        chosen = F.gumbel_softmax(h, tau=0.5, hard=True, dim=1)
        picked = torch.multinomial(h.detach().mean(1).softmax(-1), 2)
        return (h * chosen).sum(1).pow(2).mean() + h.mean(1).gather(1, picked).pow(2).mean()


class LowRank(nn.Module):
    """A frozen weight plus the product of two small ones."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(rows, 2) * 0.1), nn.Parameter(torch.randn(2, columns) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Adapted(nn.Module):
    """Low-rank parametrizations of frozen layers, a head tied to the embedding, and nested autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "value")})
        for layer in self.layers.values():
            layer.requires_grad_(False)
            parametrize.register_parametrization(layer, "weight", LowRank(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.layers["query"](h) @ h.transpose(1, 2)
            with torch.autocast("cpu", enabled=False):
                weights = scores.float().masked_fill(torch.ones(9, 9).triu(1).bool(), -1e4).softmax(-1)
            h = h + weights @ self.layers["value"](h)
        logits = F.linear(h, self.embed.weight)
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], label_smoothing=0.1)


class State(NamedTuple):
    """The state that a step passes to the next."""

    hidden: Tensor
    memory: Tensor
    history: tuple[Tensor, ...] = ()


class Stepping(nn.Module):
    """A recurrent net with a named tuple as its state, early outputs, and attention over its own history."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, 8), nn.GRUCell(16, 8)
        self.start = nn.Parameter(torch.zeros(1, 8))
        self.heads = nn.ModuleList(nn.Linear(8, 20) for _ in range(3))

    def step(self, token: Tensor, *, state: State) -> State:
        past = torch.stack((*state.history, state.hidden), 1)
        read = (past @ state.hidden.unsqueeze(-1)).softmax(1).mul(past).sum(1)
        hidden = self.cell(torch.cat([token, read], -1), state.hidden)
        return state._replace(hidden=hidden, memory=state.memory + hidden, history=(*state.history, hidden))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.start.expand(len(ids), -1)
        state, losses = State(hidden, torch.zeros_like(hidden)), []
        for index, token in enumerate(self.embed(ids).unbind(1)[:-1]):
            state = self.step(token, state=state)
            if index % 3 == 2:
                losses.append(F.cross_entropy(self.heads[index // 3](state.memory), ids[:, index + 1]))
        return sum(losses) / len(losses)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "spectral": (Spectral, _vectors),
    "siamese": (Siamese, _vectors),
    "quantised": (Quantised, _vectors),
    "hyper": (Hyper, _vectors),
    "noisy": (Noisy, _vectors),
    "adapted": (Adapted, _tokens),
    "stepping": (Stepping, _tokens),
}


def workload(name: str) -> ZooWorkload:
    """Return the workload of a model."""
    build, batch = MODELS[name]
    return ZooWorkload(name, build, batch)
