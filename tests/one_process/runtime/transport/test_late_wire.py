"""Results do not depend on when a transport reads what is sent, or on the memory order of the wire."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.nccl.late_wire import LateHub
from support.pipelines import assert_equals_oracle, build, captured, minibatches, plan_for, profile_of
from support.schedule_cases import SCHEDULES, Case, compared, hold

from autopipe.ir.schedule import Op
from autopipe.measure.on_device import nodes_on
from autopipe.runtime.executor import Executor
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.transport import threads
from autopipe.runtime.transport.base import ThreadHub
from autopipe.strides import memory_order
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

CASES = [
    *(Case(schedule, "gpt" if schedule != "pipedream" else "unet", (1, 1), "2p") for schedule in SCHEDULES),
    Case("1f1b", "unet", (1, 1, 1), "2p"),  # with skips
    Case("interleaved", "gpt", (1, 1), "2p", loops=2),
    Case("1f1b", "resnet", (2, 1), "2p"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}-{case.model}-{case.loops}")
def test_a_wire_that_reads_late_changes_nothing(case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "ThreadHub", LateHub)
    assert hold(case, tmp_path) == ("reordered" if max(case.replicas) > 1 else "plain")


def test_a_write_after_a_send_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Executor._send

    def send(self: Executor, step, offset) -> None:
        sent = [tensor for message in self._mail.values() for tensor in message.values()]
        original(self, step, offset)
        if step.op == Op.SEND_BACKWARD:  # the sender does not need a gradient that it has sent
            for tensor in sent:
                tensor.zero_()

    monkeypatch.setattr(Executor, "_send", send)
    subject = captured("gpt")
    plan = Case("gpipe", "gpt", (1, 1), "2").plan(subject)
    assert compared(subject, plan, tmp_path / "usual", steps=1).bitwise  # the usual wire reads at once
    monkeypatch.setattr(threads, "ThreadHub", LateHub)
    assert not compared(subject, plan, tmp_path / "late", steps=1).bitwise


def test_a_read_before_a_wait_sees_no_number() -> None:
    transport, tensor = LateHub(1).transport(0), torch.ones(3)
    pending = transport.start_all_reduce((0,), tensor)
    assert tensor.isnan().all()
    assert pending.wait().tolist() == [1.0, 1.0, 1.0] == tensor.tolist()


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).relu().to(memory_format=torch.channels_last) * 2
        return self.head(self.second(x).flatten(2).transpose(1, 2) * 2).mean(1)

def build_model():
    return Net()

def data(batch_size=4):
    g = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(batch_size, 3, 8, 8, generator=g), torch.randint(0, 4, (batch_size,), generator=g)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.mark.parametrize("planned_orders", [False, True])
def test_values_arrive_in_the_memory_order_that_they_have_on_the_device(
    planned_orders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between GPUs only elements are sent. A receiver gets the order that the CPU sends along."""
    (tmp_path / "model.py").write_text(MODEL)
    workload = load_workload(LoadOptions(str(tmp_path / "model.py")))
    taken = capture(workload, verify=False)
    nodes = nodes_on(torch.device("cpu"), taken, workload.leaves(workload.example_item(5)))
    subject = profile_of(workload, replace(taken, graph=replace(taken.graph, nodes=nodes)))
    plan = plan_for(subject, 3, "1f1b", 2, 8)
    orders = {boundary.value: boundary.spec.order for boundary in plan.boundaries}
    assert any(orders.values())
    arrived: dict[str, tuple[int, ...]] = {}
    original = StageRunner.forward

    def forward(self, key, inputs, received, factor, recording=""):
        for name, tensor in received.items():
            arrived[name] = () if tensor.is_contiguous() else tuple(memory_order(tensor))
        return original(self, key, inputs, received, factor, recording)

    monkeypatch.setattr(StageRunner, "forward", forward)
    monkeypatch.setattr(threads, "ThreadHub", functools.partial(ThreadHub, planned_orders=planned_orders))
    pipeline = build(subject, plan, tmp_path / "run")
    items = minibatches(workload, 2, 8)
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))
    assert arrived == orders
