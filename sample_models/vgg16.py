"""VGG16: the 13 convolutions and 3 linear layers of the paper with fewer channels, on digits of 32 x 32 pixels.

``--arg width=1.0`` gives the paper's channels.
"""

import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

LAYOUT = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


class VGG16(nn.Module):
    def __init__(self, width, classes=10):
        super().__init__()
        layers, channels = [], 1
        for entry in LAYOUT:
            if entry == "M":
                layers.append(nn.MaxPool2d(2))
                continue
            out_channels = max(round(entry * width), 1)
            layers += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out_channels
        hidden = max(round(4096 * width), 1)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def build_model(width=0.125):
    return VGG16(width)


loss = nn.CrossEntropyLoss


@functools.cache
def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False), torch.tensor(labels)


def data(batch_size=32):
    images, labels = digits()
    return list(zip(images[:1500].split(batch_size), labels[:1500].split(batch_size), strict=True))


def evaluate_data(batch_size=32):
    images, labels = digits()
    return list(zip(images[1500:].split(batch_size), labels[1500:].split(batch_size), strict=True))


def example_inputs(batch_size):
    images, labels = digits()
    return images[:batch_size], labels[:batch_size]


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-3)
