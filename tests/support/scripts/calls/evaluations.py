"""A forward that prints, logs, counts and collects, and evaluations that read numbers or cannot be recorded."""

import logging
import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
count, rows, seen = 0, {"all": []}, []
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.calls, self.log = 0, {"means": [[]]}

    def forward(self, x):
        global count
        self.calls += 1
        count += 1
        rows["all"].append(len(x))
        h = torch.relu(self.norm(self.a(x)))
        self.log["means"][0].append(h.detach().mean())
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        print("forward", self.calls, count, rows, len(self.log["means"][0]), self.training)
        if not self.training:
            logging.info("rows %s", len(x))
            h = h * float(h.detach().numpy().std())
            if len(x) == 3:
                seen.append(h)
        return self.c(torch.tanh(self.b(h)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    loss = model(torch.randn(6, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logging.info("step %s, %s tensors", step, len(seen))
    print(step, f"{loss.item():.17g}", f"{model.log['means'][0][-1].item():.17g}")
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            print("evaluation", f"{model(torch.ones(2 + step % 2, 8)).sum().item():.17g}", model.calls, count)
        model.train()
        with torch.no_grad():
            print("no_grad", f"{model(torch.ones(3, 8)).sum().item():.17g}", model.calls, count)
torch.save(model.state_dict(), "evaluations.pt")
