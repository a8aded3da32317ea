"""A small ResNet with BatchNorm that classifies handwritten digits (scikit-learn's, 8 x 8 pixels)."""

import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width=16, blocks=(2, 2, 2)):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        layers, channels = [], width
        for level, count in enumerate(blocks):
            for index in range(count):
                out_channels = width * 2**level
                layers.append(Block(channels, out_channels, 2 if level and not index else 1))
                channels = out_channels
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, 10)

    def forward(self, images):
        x = self.layers(self.stem(images))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build_model(width=16):
    return ResNet(width)


loss = nn.CrossEntropyLoss


@functools.cache
def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return images, torch.tensor(labels)


def data(batch_size=32):
    images, labels = digits()
    dataset = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    return torch.utils.data.DataLoader(dataset, batch_size, shuffle=True)


def evaluate_data(batch_size=32):
    images, labels = digits()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[1500:], labels[1500:]), batch_size)


def example_inputs(batch_size):
    images, labels = digits()
    return images[:batch_size], labels[:batch_size]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)
