"""Llama in plain torch: 7 B and 70 B parameters, and sizes that a laptop can measure. Random tokens as data."""

import torch
import torch.nn.functional as F
from torch import nn

# width, hidden width, blocks, heads, heads of keys and values
SIZES = {
    "7b": (4096, 11008, 32, 32, 32),  # Llama 2, arXiv:2307.09288, and Llama, arXiv:2302.13971, table 2
    "70b": (8192, 28672, 80, 64, 8),  # Llama 2, with grouped queries
    "2b": (2560, 6912, 24, 20, 20),
    "1b": (2048, 5504, 22, 16, 16),
    "tiny": (128, 352, 4, 4, 2),
}
VOCABULARY = 32000


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    def __init__(self, width, heads, shared):
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.size, bias=False)
        self.value = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cosine, sine):
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.size).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        q, k = turned(q, cosine, sine), turned(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def turned(x, cosine, sine):
    """Rotate pairs of features by an angle that depends on the position (RoPE, arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    def __init__(self, width, hidden, heads, shared):
        super().__init__()
        self.before_attention = RMSNorm(width)
        self.attention = Attention(width, heads, shared)
        self.before_mlp = RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.before_attention(x), cosine, sine)
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width, hidden, blocks, heads, shared, context):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, shared) for _ in range(blocks))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids):
        length = ids.size(1)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        return self.head(self.norm(x))


def build_model(size="tiny", context=2048):
    return Llama(*SIZES[size], context)


def data(batch_size=16):
    yield tokens(batch_size)


def tokens(batch_size, length=2048):
    ids = torch.randint(VOCABULARY, (batch_size, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
