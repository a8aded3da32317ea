"""The dispatcher's class of DTensors: fake tensors do not import the actual one, and DTensors work afterwards."""

import subprocess
import sys

PROGRAM = """
import sys

from autopipe.launch.rank.deferred import defer

defer()  # torch._dynamo imports the class, too

import torch

from autopipe.launch.rank.dtensors import defer_dtensors

defer_dtensors()

from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    print((torch.empty(3, 4).view(12) + 1).shape, "torch.distributed.tensor" in sys.modules)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


whole = torch.arange(16.0).reshape(4, 4)
sharded = distribute_tensor(whole, mesh, [Shard(0)])
product = (sharded @ sharded.t()).relu()
equal = torch.equal(product.full_tensor(), whole @ whole.t())
print(type(product) is DTensor, product.placements == (Shard(0),), equal)
with FakeTensorMode():
    print((torch.empty(2) + 1).shape)
dist.destroy_process_group()
"""

COMMAND = """
import sys

from autopipe.cli import launching
from autopipe.cli.terminal import Terminal

launching.fork_early(Terminal(owns_process=True))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    torch.empty(3, 4).view(12) + 1
late = ("torch.distributed.tensor", "torch._dynamo.convert_frame")
print([name for name in late if name in sys.modules], "sympy" in sys.modules)
sys.stdout.flush()
import os

os._exit(0)  # as the command ends
"""


def run(program: str) -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


def test_fake_tensors_do_not_import_the_class_and_dtensors_work_afterwards():
    assert run(PROGRAM) == [
        "torch.Size([12]) False",
        "True True True",
        "torch.Size([2])",
    ]


def test_a_command_captures_without_the_modules_that_it_does_not_need():
    assert run(COMMAND) == ["[] True"]
