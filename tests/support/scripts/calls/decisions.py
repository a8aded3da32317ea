"""The forward decides by the numbers of its mask, activations and weights, and keeps masks, outputs and inputs."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
causal = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.weights, self.calls, self.last = [self.a.weight], 0, None
        self.info = {"rows": 0, "means": []}

    def forward(self, x, mask=None, scale=1.0, *, doubled=True):
        self.calls += 1
        h = self.words(x)
        if mask is not None and not mask.all():
            h = h * mask[..., None]
        if doubled:
            h = h + F.linear(h, self.weights[0])
        length = x.shape[1]
        if length not in causal:
            causal[length] = torch.full((length, length), float("-inf"))
            causal[length].triu_(1)
        self.last, self.shared = x, [self.a.weight]
        attention = (h @ h.transpose(1, 2) + causal[length]).softmax(-1)
        self.info["means"].append(attention.detach().mean())
        self.info["rows"] = len(x)
        h, _ = self.rnn(attention @ h * scale)
        if h.abs().max() > 0.5 or self.a.weight.abs().max() > 0.26:
            h = h * 0.5
        h = self.a(h)
        self.state = (h.detach(), {"mean": h.mean()})
        return {"logits": self.head(h), "length": length, "loss": None}


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(24):
    length = 5 + step % 3
    x, y = torch.randint(20, (4, length)), torch.randint(20, (4, length))
    mask = None if step % 4 == 0 else torch.rand(4, length) > (0.0 if step % 4 == 1 else 0.3)
    model.train()
    output = model(x, mask, scale=1.0 + (step // 8) * 0.5, doubled=step % 5 != 4)
    loss = F.cross_entropy(output["logits"].flatten(0, 1), y.flatten()) + 0.01 * model.state[1]["mean"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert model.last is x
    assert model.shared[0] is model.a.weight
    print(step, f"{loss.item():.17g}", model.calls, model.info["rows"], len(model.info["means"]), output["length"])
    print(f"{model.info['means'][-1].item():.17g}", {key: tuple(value.shape) for key, value in causal.items()})
    if step % 6 == 0:
        model.eval()
        with torch.no_grad():
            print("no_grad", f"{model(x)['logits'].sum().item():.17g}", model.calls, model.state[0].sum().item())
        with torch.inference_mode():
            print("inference", f"{model(x[:, :3])['logits'].sum().item():.17g}", model.calls)
torch.save(model.state_dict(), "decisions.pt")
