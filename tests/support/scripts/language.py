"""A small GPT with tied weights: accumulation, clipping, a schedule by hand, evaluation, a checkpoint, resuming."""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads, rate):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(rate)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.one(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.two(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width, blocks, rate):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, rate) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.head(self.norm(x[:, [-1]])), None
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = (torch.arange(4000) * 7 + torch.randint(0, 3, (4000,))) % 50

    def batch():
        rows = torch.randint(len(data) - 17, (4,))
        return torch.stack([data[i : i + 16] for i in rows]), torch.stack([data[i + 1 : i + 17] for i in rows])

    model = GPT(50, 16, 32, 3, 0.1)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    first = 0
    if options.resume:
        saved = torch.load("language.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(first, first + options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.5 + 0.5 * math.cos(math.pi * step / 20))
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {sum(model(*batch())[1].item() for _ in range(2)):.17g}")
            model.train()
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                _, loss = model(*batch())
                loss = loss / 4
            scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item() * 4:.17g}, norm {norm.item():.17g}")
    model.eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(4):
            probabilities = F.softmax(model(tokens)[0][:, -1], dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
    print(tokens.tolist())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "language.pt.new")
    Path("language.pt.new").replace("language.pt")


if __name__ == "__main__":
    main()
