"""A generator and a discriminator, both trained: the loss of each goes through both."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(3):
    real = torch.randn(16, 8)
    fake = generator(torch.randn(16, 4))
    opt_d.zero_grad()
    of_fakes = criterion(discriminator(fake.detach()), torch.zeros(16, 1))
    loss_d = criterion(discriminator(real), torch.ones(16, 1)) + of_fakes
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = criterion(discriminator(fake), torch.ones(16, 1))
    loss_g.backward()
    opt_g.step()
    print(step, loss_d.item(), loss_g.item())
