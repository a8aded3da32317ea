"""A recurrent model without an optimizer: ``p.data.add_(p.grad, alpha=-lr)``, a hidden state, tied weights."""

from pathlib import Path

import torch
from torch import nn

torch.manual_seed(3)
torch.set_num_threads(1)


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(30, 16)
        self.rnn, self.decoder = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, 30)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, 30), dim=1), hidden


model, criterion, rate = RNN(), nn.NLLLoss(), 5.0
data = torch.randint(30, (61, 6))
model.train()
for _ in range(2):
    hidden = (torch.zeros(2, 6, 16), torch.zeros(2, 6, 16))
    total = 0.0
    for i in range(0, 60, 15):
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data[i : i + 15], hidden)
        loss = criterion(output, data[i + 1 : i + 16].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-rate)
        total += loss.item()
        print(f"{loss.item():.17g}")
    rate /= 2
    with Path("recurrent.pt").open("wb") as f:
        torch.save(model, f)
print(f"{total:.17g}", hidden[0].sum().item())
