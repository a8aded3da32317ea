"""Recurrent layers with dropout on packed sequences: how many numbers they draw depends on the lengths."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.rnn = nn.GRU(16, 16, 3, batch_first=True, dropout=0.2, bidirectional=True)
        self.top = nn.LSTM(32, 8, 2, dropout=0.3)
        self.out = nn.Linear(8, 5)

    def forward(self, x, lengths):
        x = F.dropout(self.enter(x), 0.1, self.training)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(self.top(y)[0])


model = Speech()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    for lengths in ([12, 9, 7, 5 + step], [3, 12, 4, 6]):
        loss = model(torch.randn(4, 12, 8), torch.tensor(lengths)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.rand(1).item())
torch.save(model.state_dict(), "packed.pt")
