"""A convolutional net over images of three sizes; the number of pooling layers depends on the size."""

import torch
import torch.nn.functional as F
from torch import nn

SIZES = ((12, 12), (9, 14), (24, 24), (12, 12), (9, 14))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.register_buffer("grid", torch.linspace(0, 1, 9), persistent=False)

    def forward(self, images):
        x = F.relu(self.norm(self.stem(images)))
        for conv in self.body:
            x = x + F.relu(conv(x))
            if x.shape[-1] > 8:
                x = F.max_pool2d(x, 2)
        scale = torch.tensor([float(x.shape[-1])])
        return self.head(x.mean((2, 3)) / scale + self.grid[:8])


loss = nn.CrossEntropyLoss()


def data(batch_size=6):
    generator = torch.Generator().manual_seed(3)
    for height, width in SIZES:
        images = torch.randn(batch_size, 3, height, width, generator=generator)
        yield images, torch.randint(0, 5, (batch_size,), generator=generator)
