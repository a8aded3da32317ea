"""Losses in the styles of users, with the weights that their microbatches must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

CLASS_WEIGHTS = torch.tensor([0.25, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 5)
        self.register_buffer("class_weights", CLASS_WEIGHTS.clone())
        self.criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone(), ignore_index=-1)
        self.scale = nn.Parameter(torch.tensor(0.3))
    def forward(self, x, y, mask, value):
        h = self.body(x)
        logits = self.head(h)
        flat, targets = logits.flatten(0, 1), y.flatten()
        return {"loss": self.loss(h, logits, flat, targets, x, y, mask, value)}
    def loss(self, h, logits, flat, targets, x, y, mask, value):
%s

def build_model():
    return Net().double()

def data(batch_size=7):
    g = torch.Generator().manual_seed(3)
    while True:
        lengths = torch.randint(1, 7, (batch_size,), generator=g)
        if batch_size >= 6:
            lengths[:2] = 0   # the first two samples have nothing that counts
            lengths[2] = 6
        mask = (torch.arange(6)[None] < lengths[:, None])
        y = torch.randint(0, 5, (batch_size, 6), generator=g)
        x = torch.randn(batch_size, 6, 6, generator=g, dtype=torch.float64)
        value = torch.randn(batch_size, 6, generator=g, dtype=torch.float64)
        yield {"x": x, "y": y.masked_fill(~mask, %d), "mask": mask.double(), "value": value}
"""

Batch = dict[str, Any]
_WEIGHTS = torch.tensor([0.25, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)


def samples(batch: Batch) -> float:
    return batch["x"].shape[0]


def one(batch: Batch) -> float:
    return 1.0


def counted(batch: Batch) -> float:
    return float(batch["mask"].sum())


def by_class(batch: Batch) -> float:
    return float(_WEIGHTS[batch["y"][batch["mask"] > 0]].sum())


@dataclass(frozen=True)
class LossCase:
    """``body``: of the loss. ``divisor``: by hand, or None if no weights make microbatches equal the batch."""

    name: str
    body: str
    divisor: Callable[[Batch], float] | None
    ignored: int = -100


def _case(name: str, divisor: Callable[[Batch], float] | None, *lines: str, ignored: int = -100) -> LossCase:
    return LossCase(name, "\n".join(f"        {line}" for line in lines), divisor, ignored)


_PER_TOKEN = 'per = F.cross_entropy(flat, targets, reduction="none").view(y.shape)'
CASES = [
    _case("mean of tokens", samples, "return F.cross_entropy(flat, targets.clamp(min=0))"),
    _case("ignore_index", counted, "return F.cross_entropy(flat, targets)"),
    _case("another ignore_index", counted, "return F.cross_entropy(flat, targets, ignore_index=-7)", ignored=-7),
    _case("permuted, as for images", counted, "return F.cross_entropy(logits.transpose(1, 2), y)"),
    _case("nll", counted, "return F.nll_loss(F.log_softmax(flat, 1), targets)"),
    _case("label smoothing", counted, "return F.cross_entropy(flat, targets, label_smoothing=0.1)"),
    _case("class weights", by_class, "return F.cross_entropy(flat, targets, weight=self.class_weights)"),
    _case("class weights, smooth", by_class,
          "return F.cross_entropy(flat, targets, weight=self.class_weights, label_smoothing=0.2)"),
    _case("module with class weights", by_class, "return self.criterion(flat, targets)", ignored=-1),
    _case("probabilities", samples, "return F.cross_entropy(flat, flat.detach().softmax(1))"),
    _case("mask by hand", counted, _PER_TOKEN, "return (per * mask).sum() / mask.sum()"),
    _case("mask with clamp", lambda b: max(counted(b), 1.0), _PER_TOKEN,
          "return (per * mask).sum() / mask.sum().clamp(min=1)"),
    _case("mask with an epsilon", lambda b: counted(b) + 1e-3, _PER_TOKEN,
          "return (per * mask).sum() / (mask.sum() + 1e-3)"),
    _case("multiplied by one over", counted, _PER_TOKEN, "n = 1.0 / mask.sum()", "return (per * mask).sum() * n"),
    _case("mask by where", counted, _PER_TOKEN,
          "return torch.where(mask > 0, per, torch.zeros_like(per)).sum() / (mask > 0).sum()"),
    _case("mean of sample means", samples, _PER_TOKEN,
          "return ((per * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()"),
    _case("sum", one, _PER_TOKEN, "return (per * mask).sum()"),
    _case("sum over the batch size", samples, _PER_TOKEN, "return (per * mask).sum() / x.size(0)"),
    _case("sum over numel", samples, _PER_TOKEN, "return (per * mask).sum() / y.numel()"),
    _case("sum of squares", one, 'return F.mse_loss(logits.sum(-1), value, reduction="sum")'),
    _case("mean square", samples, "return F.mse_loss(logits.sum(-1), value)"),
    _case("huber and a penalty", samples,
          "penalty = sum(p.pow(2).sum() for p in self.head.parameters())",
          "return F.smooth_l1_loss(logits.sum(-1), value) + 0.01 * penalty"),
    _case("tokens and a penalty", counted,
          "return F.cross_entropy(flat, targets) + 0.1 * self.head.weight.abs().sum()"),
    _case("two heads, one mask", counted,
          "a = F.cross_entropy(flat, targets)", "b = F.cross_entropy(2 * flat, targets, label_smoothing=0.1)",
          "return 0.5 * a + b / 3 - a * 0.1"),
    _case("learned weight of a term", counted,
          "return F.cross_entropy(flat, targets) * (-self.scale).exp() + self.scale"),
    _case("added up in place", counted, "total = torch.zeros((), dtype=x.dtype)",
          "for factor in (1.0, 2.0):", "    total += F.cross_entropy(factor * flat, targets)", "return total / 2"),
    _case("stacked terms", counted,
          "return torch.stack([F.cross_entropy(flat, targets), F.cross_entropy(3 * flat, targets)]).mean()"),
    _case("KL, batchmean", samples,
          "wanted = value[..., None].expand(-1, -1, 5).softmax(-1)",
          'return F.kl_div(F.log_softmax(logits, -1), wanted, reduction="batchmean")'),
    _case("mean over time, then the batch", samples, "return (logits.sum(-1) - value).pow(2).mean(1).mean(0)"),
    _case("mean over the batch, then time", samples, "return (logits.sum(-1) - value).abs().mean(0).sum()"),
    _case("dot product", one, "return torch.dot(logits.sum(-1).flatten(), value.flatten())"),
    _case("tokens and elements", None, "return F.cross_entropy(flat, targets) + F.mse_loss(logits.sum(-1), value)"),
    _case("root of a mean", None, "return F.mse_loss(logits.sum(-1), value).sqrt()"),
    _case("contrastive", None, "z = F.normalize(h.mean(1), dim=-1)",
          "return F.cross_entropy(z @ z.T, torch.arange(x.size(0)))"),
]  # fmt: skip
