"""A U-Net that removes noise from handwritten digits. Its skip connections join both ends of the model."""

import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def double_convolution(channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width=8, levels=3):
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(double_convolution(a, b) for a, b in zip([1, *sizes], sizes[:-1], strict=False))
        self.middle = double_convolution(sizes[-2], sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(sizes[:-1]))
        self.join = nn.ModuleList(double_convolution(2 * a, a) for a in reversed(sizes[:-1]))
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, noisy):
        x, skips = noisy, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)


def build_model(width=8, levels=3):
    return UNet(width, levels)


loss = nn.BCEWithLogitsLoss


@functools.cache
def pairs():
    """Return digits of 16 x 16 pixels with noise, and masks of their strokes."""
    images = torch.tensor(load_digits().data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images = F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.5 * noise, (images > 0.5).float()


def data(batch_size=32):
    noisy, strokes = pairs()
    return list(zip(noisy[:1500].split(batch_size), strokes[:1500].split(batch_size), strict=True))


def evaluate_data(batch_size=32):
    noisy, strokes = pairs()
    return list(zip(noisy[1500:].split(batch_size), strokes[1500:].split(batch_size), strict=True))


def example_inputs(batch_size):
    noisy, strokes = pairs()
    return noisy[:batch_size], strokes[:batch_size]
