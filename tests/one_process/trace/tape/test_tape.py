"""The Python of model and loss, run for every microbatch on fakes, is compared with the graph of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.guarded import graph_of, in_child, microbatches
from support.models.state import BASE, net
from support.pipelines import BATCH, captured
from torch._subclasses.fake_tensor import FakeTensor

from autopipe.trace.tape import Difference, Tape
from autopipe.workload import LoadOptions, Workload, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")


def run(tape: Tape, workload: Workload, part: Any, graph: Any) -> Difference | None:
    leaves = workload.leaves(part)
    return tape.run(part, {"": (graph, {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols})})


def reported(text: str, folder: Path, steps: int = 8) -> tuple[tuple[int, int] | None, str]:
    """Return the (minibatch, microbatch) at which a model of two microbatches is stopped, and the text."""
    path = folder / "model.py"
    path.write_text(BASE + text)
    _, graph = in_child(graph_of, path)
    workload = load_workload(LoadOptions(str(path)))
    tape = Tape(workload, workload.build_model(empty=True))
    for step, index, part in microbatches(workload, steps, 2):
        difference = run(tape, workload, part, graph)
        if difference is not None:
            return (step, index), f"{difference.recorded} -> {difference.now}"
    return None, ""


@pytest.mark.parametrize("sample", list(BATCH))
def test_the_python_of_the_samples_is_that_of_their_graphs_and_propagates_no_shapes_again(sample: str) -> None:
    subject = captured(sample)
    workload, graph = subject.workload, subject.capture.graph
    model = workload.build_model(empty=True)
    tape = Tape(workload, model)
    first = next(iter(workload.items(BATCH[sample])))
    for _ in range(3):
        for part in workload.split(first, 2):
            assert run(tape, workload, part, graph) is None
    assert tape.performed == 0
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))


CHANGES = {
    "a counter": net("self.k = 0", "self.k += 1\n        if self.k > 5: x = x * 0.5"),
    "a number": net("self.k = 0", "self.k += 1\n        x = x * (1.0 if self.k < 6 else 0.5)"),
    "a type of a number": net("self.k = 0", "self.k += 1\n        x = x * (1 if self.k < 6 else 1.0)"),
    "a sign of zero": net("self.k = 0", "self.k += 1\n        x = x + (0.0 if self.k < 6 else -0.0)"),
    "a constant": net("self.m = torch.ones(8); self.k = 0", "self.k += 1\n        x = x * self.m\n"
                      "        if self.k == 5: self.m = torch.full((8,), 0.5)"),
    "memory of numpy between two uses": net(
        "self.m = np.ones(8, dtype=np.float32); self.t = torch.from_numpy(self.m); self.k = 0",
        "self.k += 1\n        x = x * self.t\n        self.m[3] = 1.0 if self.k < 6 else 0.0\n        x = x + self.t"),
    "an attribute of a layer after its call": net(
        "self.act = nn.LeakyReLU(0.1); self.k = 0",
        "x = self.act(x)\n        self.k += 1\n        if self.k == 5: self.act.negative_slope = 0.5"),
    "a mode after its call": net(
        "self.drop = nn.Dropout(0.5); self.k = 0",
        "x = self.drop(x)\n        self.k += 1\n        if self.k == 5: self.drop.eval()"),
    "a frozen layer": net("self.k = 0", "self.k += 1\n        if self.k == 6: self.h[0].requires_grad_(False)"),
    "a hook": net(
        "self.k = 0", "self.k += 1\n        if self.k == 6: self.o.register_forward_hook(lambda m, i, o: o * 0.5)"),
    "a call that no longer fails": net(
        "self.k = 0",
        "self.k += 1\n        n = 3 if self.k < 6 else 8\n        try: x = x @ torch.ones(n, 8)\n"
        "        except RuntimeError: x = x * 2"),
    "a draw outside of torch": net("self.k = 0", "self.k += 1\n        if self.k > 5: random.random()"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_at_the_sixth_call_is_reported_there(name: str, tmp_path: Path) -> None:
    where, text = reported(CHANGES[name], tmp_path)
    assert where == (2, 1), text


BUFFER = "self.register_buffer('b', torch.ones(5))"
KEPT = {
    "an earlier output": "prev = y.detach() if self.p is None else self.p; self.p = y.detach(); y = y + prev",
    "the same place of an earlier call": "prev = y if self.p is None else self.p; self.p = y; y = y + prev",
    "a drawn mask": "self.p = (torch.rand(5) > 0.5).float() if self.p is None else self.p; y = y * self.p",
    "a mask that decays": "self.p = torch.ones(5) if self.p is None else self.p; y = y + self.p; self.p.mul_(0.9)",
    "a table of a buffer that is written": "self.p = self.b * 2 if self.p is None else self.p; y = y + self.p; "
    "self.b.mul_(0.9)",
    "a table of a buffer of which a view is written": "self.p = (self.b + 1).cos() if self.p is None else self.p; "
    "y = y + self.p; self.b[:2].zero_()",
    "a table of a buffer that is bound to another tensor": "self.p = self.b * 2 if self.p is None else self.p; "
    "y = y + self.p; self.b = self.b * 0.9",
    "a table of a parameter": "self.p = self.o.bias * 2 if self.p is None else self.p; y = y + self.p",
}


@pytest.mark.parametrize("name", list(KEPT))
def test_a_tensor_of_an_earlier_call_is_not_taken_for_one_of_this_call(name: str, tmp_path: Path) -> None:
    where, text = reported(net(f"self.p = None; {BUFFER}", "pass", KEPT[name]), tmp_path)
    assert where == (0, 1), text


@pytest.mark.parametrize("table", ["(self.b * 2).cos()", "torch.outer(torch.arange(5.0), self.b)[1]"])
def test_a_table_that_the_first_call_computes_from_a_buffer_is_the_same_in_each(table: str, tmp_path: Path) -> None:
    keeps = f"self.p = {table} if self.p is None else self.p; y = y * self.p"
    assert reported(net(f"self.p = None; {BUFFER}", "pass", keeps), tmp_path) == (None, "")


def test_an_exception_leaves_the_model_its_tensors_and_torch_its_functions(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(BASE + net("self.k = 0", "self.k += 1\n        x = x @ torch.ones(8 if self.k < 6 else 3, 8)"))
    _, graph = in_child(graph_of, path)
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    call, weights = torch.nn.Module.__call__, dict(model.named_parameters())
    tape = Tape(workload, model)
    parts = [part for _, _, part in microbatches(workload, 3, 2)]
    differences = [run(tape, workload, part, graph) for part in parts]
    assert differences[:5] == [None] * 5
    assert differences[5] is not None
    assert "it raises RuntimeError: " in differences[5].now
    assert torch.nn.Module.__call__ is call
    assert all(model.get_parameter(name) is weight for name, weight in weights.items())
