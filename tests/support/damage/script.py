"""The small model in a training script, for `autopipe run`."""

import torch
from model import build_model, data, evaluate_data, loss, optimizer, scheduler

torch.manual_seed(0)
model = build_model()
steps = optimizer(list(model.named_parameters()))
rates = scheduler(steps)
for _, (tokens, target) in zip(range(4), data(), strict=False):
    steps.zero_grad()
    value = loss(model(tokens), target)
    value.backward()
    steps.step()
    rates.step()
    print(f"{value.item():.6f}")
model.eval()
with torch.no_grad():
    for tokens, target in evaluate_data():
        print(f"evaluated: {loss(model(tokens), target).item():.6f}")
