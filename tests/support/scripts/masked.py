"""A transformer that keeps its mask as an attribute, trained by hand, and saved as a whole, in the best epoch."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Positions(nn.Module):
    def __init__(self, width, longest=64):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        place = torch.arange(longest).unsqueeze(1)
        scale = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, 1, width)
        table[:, 0, 0::2], table[:, 0, 1::2] = torch.sin(place * scale), torch.cos(place * scale)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(0)])


class Transformer(nn.Transformer):
    def __init__(self, words, width):
        super().__init__(d_model=width, nhead=2, dim_feedforward=width, num_encoder_layers=2, num_decoder_layers=1)
        self.mask = None
        self.positions, self.embed = Positions(width), nn.Embedding(words, width)
        self.decoder, self.width = nn.Linear(width, words), width

    def forward(self, source):
        if self.mask is None or self.mask.size(0) != len(source):
            self.mask = torch.log(torch.tril(torch.ones(len(source), len(source))))
        x = self.positions(self.embed(source) * math.sqrt(self.width))
        return F.log_softmax(self.decoder(self.encoder(x, mask=self.mask)), dim=-1)


def parts(words, length):
    for start in range(0, len(words) - 1, length):
        end = min(start + length, len(words) - 1)
        yield words[start:end], words[start + 1 : end + 1].reshape(-1)


def evaluate(model, words):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for source, target in parts(words, 8):
            output = model(source)
            total += len(source) * F.nll_loss(output.view(-1, output.size(-1)), target).item()
    return total / (len(words) - 1)


if __name__ == "__main__":
    torch.manual_seed(11)
    torch.set_num_threads(1)
    words = torch.randint(0, 20, (30, 4)).cumsum(0) % 20
    model = Transformer(20, 16)
    rate, best = 0.5, math.inf
    for epoch in range(3):
        model.train()
        for source, target in parts(words, 8):
            model.zero_grad()
            output = model(source)
            loss = F.nll_loss(output.view(-1, 20), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-rate)
            print(f"{epoch} {loss.item():.17g} {tuple(model.mask.shape)}")
        value = evaluate(model, words)
        print(f"{epoch} {value:.17g} {tuple(model.mask.shape)}")
        if value < best:
            torch.save(model, "masked_model.pt")
            best = value
        else:
            rate /= 4
    loaded = torch.load("masked_model.pt", weights_only=False)
    print(tuple(loaded.mask.shape), f"{evaluate(loaded, words):.17g}")
    torch.save(loaded.state_dict(), "masked.pt")
