"""An LSTM encoder and decoder that learn to reverse words from the source text of the standard library."""

import functools
import re
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 10  # letters; shorter words are padded
PAD, START = 0, 27  # a is 1, z is 26


class Encoder(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(28, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, letters):
        _, state = self.lstm(self.embedding(letters))
        return state


class Decoder(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(28, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.out = nn.Linear(width, 28)

    def forward(self, letters, state):
        x, _ = self.lstm(self.embedding(letters), state)
        return self.out(x)


class Seq2Seq(nn.Module):
    def __init__(self, width=96, layers=2):
        super().__init__()
        self.encoder = Encoder(width, layers)
        self.decoder = Decoder(width, layers)

    def forward(self, word, written):
        """``written``: the target shifted by one letter, as input of the decoder (teacher forcing)."""
        return self.decoder(written, self.encoder(word))


def build_model(width=96, layers=2):
    return Seq2Seq(width, layers)


def loss(output, target):
    """Return the mean over letters, and their number as its weight."""
    letters = (target != PAD).sum()
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return total / letters, letters


@functools.cache
def words():
    """Return all words of 3 to 10 letters in the files a*.py to d*.py of the standard library, and their reversals."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = " ".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("[a-d]*.py")))
    unique = sorted(set(re.findall(rf"\b[a-z]{{3,{LENGTH}}}\b", text.lower())))
    rows = [[ord(letter) - 96 for letter in word] for word in unique]
    return (
        torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in rows]),
        torch.tensor([row[::-1] + [PAD] * (LENGTH - len(row)) for row in rows]),
    )


def batches(rows, batch_size):
    forwards, backwards = words()
    for chosen in rows.split(batch_size):
        target = backwards[chosen]
        written = torch.cat([torch.full((len(chosen), 1), START), target[:, :-1]], dim=1)
        yield (forwards[chosen], written), target


def data(batch_size=32):
    order = torch.randperm(len(words()[0]), generator=torch.Generator().manual_seed(0))
    return batches(order[: len(order) * 9 // 10], batch_size)


def evaluate_data(batch_size=32):
    order = torch.randperm(len(words()[0]), generator=torch.Generator().manual_seed(0))
    return batches(order[len(order) * 9 // 10 :], batch_size)


def example_inputs(batch_size):
    return next(iter(data(batch_size)))


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=2e-3)
