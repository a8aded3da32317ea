"""Two models that are trained in turn, each with its optimizer: a generator and a discriminator."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


generator = Generator(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = Discriminator(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
for _ in range(3):
    real, fake = torch.randn(6, 8), generator(torch.randn(6, 4))
    true, false = torch.ones(6, 1), torch.zeros(6, 1)
    of_discriminator.zero_grad()
    loss = F.binary_cross_entropy_with_logits(discriminator(real), true)
    loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), false)
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    of_both = F.binary_cross_entropy_with_logits(discriminator(fake), true)
    of_both.backward()
    of_generator.step()
    print(f"{loss.item():.17g} {of_both.item():.17g}")
torch.save([generator.state_dict(), discriminator.state_dict()], "gan.pt")
