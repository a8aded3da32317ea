"""Saves all that a run needs to go on, is killed at a step, and goes on when it is started again."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(5)
np.random.seed(5)
random.seed(5)
torch.set_num_threads(1)
last = int(sys.argv[1])  # the step at which it is killed, if it is less than 8
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.ReLU())
model.append(nn.Linear(16, 4))
opt = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=20)
path, begin = Path("resuming.pt"), 0
if path.exists():
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["random"])
    begin = state["step"]
    print("resumed at", begin)
for step in range(begin, 8):
    for _ in range(2):
        x = torch.randn(6, 8) * random.random() + float(np.random.rand())
        loss = model(x).pow(2).mean()
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    scheduler.step()
    print(f"{step} {loss.item():.17g} {scheduler.get_last_lr()[0]:.17g}", flush=True)
    if step % 2:
        state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "scheduler": scheduler.state_dict()}
        state |= {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        torch.save(state | {"step": step + 1}, path)
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)
torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, "weights.pt")
