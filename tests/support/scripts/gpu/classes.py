"""A classifier on a GPU; the first word names what else the script does."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

what = sys.argv[1]
torch.manual_seed(0)
rate = 0.2 if what == "dropout" else 0.0
body = [
    nn.Linear(32, 64),
    nn.ReLU(),
    nn.Dropout(rate),
    nn.LayerNorm(64),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Dropout(rate),
]
model = nn.Sequential(*body, nn.Linear(64, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused="fused" in what)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127 if "infinite" in what else 2.0**10, enabled="scaler" in what)
generator = torch.Generator().manual_seed(1)
for step in range(4):
    for _ in range(2):
        x = torch.randn(16, 32, generator=generator).to("cuda")
        y = torch.randint(0, 10, (16,), generator=generator).to("cuda")
        if what == "noise":
            x = x + torch.randn_like(x)
        with torch.autocast("cuda", torch.bfloat16, enabled="autocast" in what):
            output = model(x)
            loss = F.cross_entropy(output, y) / 2
        if what == "drawn from outputs":
            loss = loss + (F.dropout(output, 0.5) * 1e-2).sum()
        scaler.scale(loss).backward()
    if what == "clipping":
        scaler.unscale_(optimizer)
        print(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if what == "evaluation":
        model.eval()
        with torch.no_grad():
            print(model(x).argmax(-1).cpu().tolist())
        model.train()
    if what == "moved":
        print(output.to("cuda:0").device, output.cpu().sum(), output.cuda(0).max(), output.new_zeros(2, device="cuda"))
    print(step, loss, output.dtype, torch.cuda.get_rng_state().view(torch.int64).tolist(), torch.rand(1).item())
print(f"{sum(p.double().abs().sum().item() for p in model.parameters()):.17g}", scaler.get_scale())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "classes.pt")
print(torch.load("classes.pt", weights_only=True)["model"]["0.weight"].device)
