"""A script that trains two steps and then ends in the way that its argument names."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
how = sys.argv[1]
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def train():
    opt.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    opt.step()
    return loss.item()


def children():
    """Return the ranks: sessions in the folder of this process, whose parent is in it, too."""
    ranks = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, AttributeError):  # no parent
            is_session = os.getsid(process.pid) == process.pid != os.getpid()
            if is_session and process.cwd() == process.parent().cwd() == str(Path.cwd()):
                ranks.append(process.pid)
    return sorted(ranks)


def kill_a_starting_rank():
    while not (started := children()):
        time.sleep(0.01)
    os.kill(started[-1], signal.SIGKILL)


if how == "starting":
    threading.Thread(target=kill_a_starting_rank, daemon=True).start()
print(f"{train():.17g}")
print(f"{train():.17g}", flush=True)
if how == "exception":
    raise ValueError("of the script")
if how == "exit":
    sys.exit(7)
if how == "text":
    sys.exit("the end")
if how == "hard":
    os._exit(9)
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
if how == "killed":
    print(*children(), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if how == "rank":
    for child in children()[1:]:
        os.kill(child, signal.SIGKILL)
for _ in range(200):
    last = train()
print(f"{last:.17g}")
