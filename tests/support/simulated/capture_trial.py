"""A capture that is proven on a simulated device."""

import gc
from pathlib import Path

import torch

from autopipe.trace import capture
from autopipe.workload import LoadOptions, Workload

GPU = torch.device("cuda", 0)
MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 3)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        if "Fake" not in type(x).__name__:
            with open("devices", "a") as file:
                file.write(x.device.type + "\\n")
        return self.last(self.first(x).relu() * self.scale)


loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1)


def data(batch_size=6):
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(batch_size, 64, generator=generator), torch.arange(batch_size) % 3


def build_model():
    torch.manual_seed(0)
    return Model()
"""


def main() -> None:
    """Capture the model on the device; it is on the CPU before and afterwards, with the same tensors."""
    Path("model.py").write_text(MODEL)
    workload = Workload(LoadOptions("model.py").spec())
    model = workload.build_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    captured = capture(workload, model=model, device=GPU)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        same, value = before[name]
        assert tensor is same and tensor.is_cpu and torch.equal(tensor, value)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    gc.collect()
    assert torch.cuda.memory_allocated(0) == 0
    assert captured.exact and set(Path("devices").read_text().split()) == {"cuda"}
    assert captured.divisor is not None and captured.divisor.constants


main()
