"""A byte-level GPT that learns Python from the standard library's own source text. Its embeddings are tied."""

import functools
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT = 128


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, blocks, width, heads, dropout):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._start)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids):
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(blocks=6, width=128, heads=4, dropout=0.0):
    return GPT(blocks, width, heads, dropout)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@functools.cache
def source_text(limit=2_000_000):
    """The first two million bytes of the standard library, files in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def windows(text, batch_size, order):
    """Minibatches of neighbouring windows of text; the target is the text one byte further."""
    starts = order * CONTEXT
    for chosen in starts.split(batch_size):
        index = chosen[:, None] + torch.arange(CONTEXT + 1)
        ids = text[index].long()
        yield ids[:, :-1], ids[:, 1:]


def data(batch_size=32):
    text = source_text()
    text = text[: len(text) * 9 // 10]
    order = torch.randperm((len(text) - 1) // CONTEXT, generator=torch.Generator().manual_seed(0))
    return windows(text, batch_size, order)


def evaluate_data(batch_size=32):
    text = source_text()
    text = text[len(text) * 9 // 10 :]
    return windows(text, batch_size, torch.arange(min(256, (len(text) - 1) // CONTEXT)))


def example_inputs(batch_size):
    return next(iter(data(batch_size)))


def optimizer(named_parameters):
    named_parameters = list(named_parameters)
    decayed = [p for _, p in named_parameters if p.dim() >= 2]
    others = [p for _, p in named_parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.95))
