"""One model, one batch for each step, and a loss over all of it.

``--cut M``: in plain torch, on M parts, joined. ``--replicas R``: gradients are added first over the parts of each of R
copies of the model, of which the last one keeps the running statistics.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.token, self.one = nn.Embedding(20, 16), nn.Linear(16, 32)
        self.drop, self.two = nn.Dropout(rate), nn.Linear(32, 16)
        self.norm, self.tag, self.value = nn.BatchNorm1d(16), nn.Linear(16, 20), nn.Linear(16, 1)

    def forward(self, tokens):
        x = self.two(self.drop(torch.tanh(self.one(self.token(tokens)))))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return {"tags": self.tag(x).flatten(0, 1), "value": self.value(x).squeeze(-1), "number": 3}


def cut(model, tokens, parts, replicas):
    if parts == 1 or not torch.is_grad_enabled():
        return model(tokens)
    pieces = tokens.tensor_split(min(parts, len(tokens)))
    if replicas == 1:
        outputs = [model(piece) for piece in pieces]
    else:
        chosen = [replicas - 1 - (len(pieces) - 1 - i) * replicas // len(pieces) for i in range(len(pieces))]
        outputs, copies = [], {}
        for piece, replica in zip(pieces, chosen, strict=True):
            if replica not in copies:
                copies[replica] = {name: p.view_as(p) for name, p in model.named_parameters()}
                if replica < replicas - 1:
                    copies[replica].update({name: b.clone() for name, b in model.named_buffers()})
            outputs.append(torch.func.functional_call(model, copies[replica], (piece,)))
    joined = {name: torch.cat([output[name] for output in outputs]) for name in ("tags", "value")}
    return {**joined, "number": outputs[0]["number"]}


def contrastive(value):
    scaled = F.normalize(value, dim=1)
    return F.cross_entropy(scaled @ scaled.T / 0.1, torch.arange(len(value)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--loss", choices=["mean", "ignored", "contrastive"], default="mean")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Tagger(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(options.accumulate):
            samples = options.samples - 3 * (step == 3)
            tokens, targets = torch.randint(20, (samples, 6)), torch.randint(20, (samples, 6))
            if options.loss == "ignored":
                targets[torch.rand(samples, 6) < 0.5] = -100
            output = cut(model, tokens, options.cut, options.replicas)
            loss = F.cross_entropy(output["tags"], targets.flatten()) + output["value"].pow(2).mean()
            if options.loss == "contrastive":
                loss = loss + contrastive(output["value"])
            (loss / options.accumulate).backward()
        right = output["tags"].argmax(-1).eq(targets.flatten()).sum()
        optimizer.step()
        print(step, repr(loss.item()), int(right), tuple(output["tags"].shape), output["number"])
        model.eval()
        with torch.no_grad():
            print(repr(cut(model, tokens, options.cut, options.replicas)["value"].sum().item()))
        model.train()
    torch.save(model.state_dict(), "batches.pt")


if __name__ == "__main__":
    main()
