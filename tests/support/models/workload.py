"""A model file as a text, with consecutive numbers as data."""

import pytest

from autopipe.errors import ModelFileError

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)
def build_model():
    return Net()
def loss(output, target):
    return (output - target).square().mean()
"""
DATA = """
def data(batch_size):
    x = torch.arange(30.0).view(10, 3)
    return list(zip(x.split(batch_size), x[:, :2].split(batch_size)))
"""


def fails(call):
    with pytest.raises(ModelFileError) as caught:
        call()
    return caught.value
