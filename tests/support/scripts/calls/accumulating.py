"""Several microbatches in each step, with a loss inside of the model, tied weights, dropout, and a layer that repeats.

``--read``: each loss is read. ``--once``: each weight is used once. ``--together``: one backward through two calls.
``--norm``: batch norm. ``--freeze``: a layer is frozen after some steps. ``--cast``: autocast.
"""

import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, once, norm):
        super().__init__()
        self.token, self.one = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.two, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 20, bias=False)
        self.times = 1 if once else 3
        if not once:
            self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        h = self.token(tokens)
        for _ in range(self.times):
            h = h + self.drop(torch.tanh(self.one(h)))
        h = self.norm(self.two(h).transpose(1, 2)).transpose(1, 2)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    for name in ("read", "once", "together", "norm", "freeze", "cast"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Net(options.once, options.norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_of_batch():
        tokens = torch.randint(20, (options.samples, 6))
        cast = torch.autocast("cpu", torch.bfloat16) if options.cast else contextlib.nullcontext()
        with cast:
            return model(tokens, tokens.roll(1))[1]

    for step in range(5):
        model.two.weight.requires_grad_(not options.freeze or step < 3)
        total = 0
        for _ in range(4):
            loss = loss_of_batch()
            if options.together:
                loss = loss + loss_of_batch()
            if options.read:
                print(loss.item())
            (loss / 4).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step, total.item(), norm.item())
        if step == 2:
            model.eval()
            with torch.no_grad():
                print(loss_of_batch().item())
            model.train()
    torch.save(model.state_dict(), "accumulating.pt")


if __name__ == "__main__":
    main()
