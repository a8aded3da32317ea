"""Small models for the axes: each has one construction, and a loss over 8 classes."""

import torch
from torch import nn
from torch.nn import functional

from support.models.trace import Toy

WIDTH = 16


def workload(model, **batch):
    """Return a workload of a model whose forward takes ``x`` [n, 6, WIDTH] and ``labels`` [n, 6] and returns a loss."""

    def of(n, generator):
        x = torch.randn(n, 6, WIDTH, generator=generator)
        return {"x": x, "labels": torch.randint(0, 8, (n, 6), generator=generator), **batch}

    return Toy(model, of)


class Body(nn.Module):
    """A residual block around ``inner``, a norm and a loss. With smoothing, the head stays whole."""

    def __init__(self, inner, smoothing=0.1, classes=8):
        super().__init__()
        self.smoothing = smoothing
        self.first = nn.LayerNorm(WIDTH)
        self.inner = inner
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x, labels):
        x = self.last(x + self.inner(self.first(x)))
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)


class Attention(nn.Module):
    """Attention with 4 heads; subclasses change how the heads are made."""

    HEADS, KV = 4, 4

    def __init__(self, dropout=0.0):
        super().__init__()
        self.size, self.dropout = WIDTH // 4, dropout
        self.qkv = nn.Linear(WIDTH, (self.HEADS + 2 * self.KV) * self.size)
        self.out = nn.Linear(self.HEADS * self.size, WIDTH)

    def heads(self, x):
        b, length, _ = x.shape
        return self.qkv(x).view(b, length, 3, self.HEADS, self.size).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)

    def forward(self, x):
        y = self.attend(*self.heads(x))
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Grouped(Attention):
    """Grouped heads, cut from one projection by slices."""

    HEADS, KV = 8, 2

    def heads(self, x):
        b, length, _ = x.shape
        y = self.qkv(x)
        q, k = self.HEADS * self.size, (self.HEADS + self.KV) * self.size
        parts = (y[..., :q], y[..., q:k], y[..., k:])
        return [part.view(b, length, -1, self.size).transpose(1, 2) for part in parts]

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class GroupedSplit(Grouped):
    """The same with ``split`` and ``repeat_interleave``."""

    def heads(self, x):
        b, length, _ = x.shape
        sizes = [self.HEADS * self.size, self.KV * self.size, self.KV * self.size]
        parts = self.qkv(x).split(sizes, dim=-1)
        q, k, v = (part.view(b, length, -1, self.size).transpose(1, 2) for part in parts)
        groups = self.HEADS // self.KV
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)


class HeadsFirst(Attention):
    """Heads and batch in one dimension, in this order: the members' parts lie a batch apart."""

    def attend(self, q, k, v):
        b, heads, length, size = q.shape
        q, k, v = (part.transpose(0, 1).reshape(heads * b, length, size) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v)
        return y.view(heads, b, length, size).transpose(0, 1)


class Separate(GroupedSplit):
    """The queries have a projection of their own, and keys and values one for both."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 16)
        del self.qkv

    def heads(self, x):
        q, kv = self.q(x).unflatten(-1, (8, 4)).transpose(1, 2), self.kv(x).unflatten(-1, (2, 2, 4))
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        return q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)


class Normed(Attention):
    """Queries and keys are normalized in each head: their weights are whole, and read with sharded values."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(self.size), nn.RMSNorm(self.size)

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Plain(Attention):
    """Attention by products, with slopes of each head in a buffer (ALiBi), and dropout of the weights."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, self.HEADS + 1))

    def attend(self, q, k, v):
        places = torch.arange(q.shape[2])
        bias = self.slopes[:, None, None] * -(places[:, None] - places[None, :]).abs()
        scores = torch.softmax(q @ k.transpose(-2, -1) * 0.5 + bias, -1)
        return functional.dropout(scores, self.dropout, self.training) @ v


class Sinks(Attention):
    """Attention with a learned score of each head that no key has, minus the largest score, as gpt-oss does."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(self.HEADS))

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1) * 0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        scores = torch.cat([scores, sinks], -1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v


class Interleaved(nn.Module):
    """A gated layer whose two parts alternate."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        y = self.up(x)
        return self.down(torch.sigmoid(y[..., ::2]) * y[..., 1::2])


class Merged(Attention):
    """Batch and heads in one dimension, products by ``bmm``, and one by ``einsum``."""

    def attend(self, q, k, v):
        b, heads, length, size = q.shape
        q, k = q.reshape(b * heads, length, size), k.reshape(b * heads, length, size)
        scores = torch.bmm(q, k.transpose(1, 2)).softmax(-1).view(b, heads, length, length)
        return torch.einsum("bhlm,bhmd->bhld", scores, v)


class Module(nn.Module):
    """``nn.MultiheadAttention`` with dropout, a causal mask and padding; the keys may have another width."""

    def __init__(self, batch_first=True, width=WIDTH, weights=False):
        super().__init__()
        self.first, self.weights, self.narrow = batch_first, weights, nn.Linear(WIDTH, width)
        self.attention = nn.MultiheadAttention(
            WIDTH, 4, dropout=0.3, batch_first=batch_first, kdim=width, vdim=width, bias=width == WIDTH
        )

    def forward(self, x):
        keys = self.narrow(x)
        padding = x[..., 0] > 1.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        inputs = (x, keys, keys) if self.first else (x.transpose(0, 1), *(keys.transpose(0, 1),) * 2)
        padding = padding & (torch.arange(x.shape[1]) > 0)
        y, weights = self.attention(*inputs, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights)
        y = y if self.first else y.transpose(0, 1)
        return y if weights is None else y + weights.sum(-1, keepdim=True)


class Layers(nn.Module):
    """Torch's own transformer, with a causal mask of floats and the one of its hint, and dropout."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.first = batch_first
        self.model = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.2, batch_first=batch_first)

    def forward(self, x):
        x = x if self.first else x.transpose(0, 1)
        length = x.shape[1 if self.first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        y = self.model(x, x.flip(-1), tgt_mask=mask, memory_mask=mask, tgt_is_causal=True)
        return y if self.first else y.transpose(0, 1)


class Wide(nn.Module):
    """Two layers, with ``between`` applied to the values between them."""

    def __init__(self, between=torch.relu, hidden=12, gated=False):
        super().__init__()
        self.between, self.gated = between, gated
        self.up = nn.Linear(WIDTH, hidden * (1 + gated))
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        y = self.up(x)
        if self.gated:
            half = y.shape[-1] // 2
            y = functional.silu(y[..., :half]) * y[..., half:]
        return self.down(self.between(y))


class AtZero(nn.Module):
    """A layer with a small ReLU of what is zero but for rounding: its gradient jumps with the order of sums."""

    def __init__(self):
        super().__init__()
        self.wide, self.same = Wide(hidden=64), Wide(lambda x: torch.relu(x).flip(-1).flip(-1), hidden=64)
        self.same.load_state_dict(self.wide.state_dict())
        self.same.requires_grad_(False)

    def forward(self, x):
        y = self.wide(x)
        return y + 0.01 * torch.relu(y - self.same(x))


class Double(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Vocabulary(nn.Module):
    """A tied table of 8 words with a padding row, and the loss as ``log_softmax`` and ``nll_loss``."""

    def __init__(self, padding=3, words=8):
        super().__init__()
        self.table = nn.Embedding(words, WIDTH, padding_idx=padding)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words)
        self.head.weight = self.table.weight

    def forward(self, x, labels):
        y = self.norm(x + self.table(labels))
        scores = functional.log_softmax(self.head(y).flatten(0, 1), -1)
        targets = torch.where(labels == 0, -100, labels).flatten()
        return functional.nll_loss(scores, targets)
