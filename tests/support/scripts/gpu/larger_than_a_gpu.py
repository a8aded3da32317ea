"""A model whose training needs more than one GPU has: evaluation, steps, a checkpoint, and its return."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
blocks = [part for _ in range(12) for part in (nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU())]
model = nn.Sequential(nn.Embedding(50, 128), nn.Flatten(), nn.Linear(512, 128), *blocks, nn.Linear(128, 10))
model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch():
    tokens = torch.randint(0, 50, (8, 4), generator=generator)
    return tokens.to("cuda", non_blocking=True), torch.randint(0, 10, (8,), generator=generator).cuda()


@torch.no_grad()
def evaluate():
    model.eval()
    x, y = batch()
    print("evaluation", F.cross_entropy(model(x), y))
    model.train()


evaluate()
for step in range(4):
    for _ in range(2):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        evaluate()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "larger.pt")
        saved = torch.load("larger.pt", map_location="cpu", weights_only=True)
        print({value.device.type for value in torch.load("larger.pt", mmap=True, map_location="cpu")["model"].values()})
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
print(sum(p.double().abs().sum().item() for p in model.parameters()), {p.device for p in model.parameters()})
print(len(optimizer.state), model(x).argmax(-1))
if torch.cuda.max_memory_allocated() > 3 << 20:
    print("peak", torch.cuda.max_memory_allocated())
else:
    del x, y
    print("memory", torch.cuda.memory_allocated())
