"""The third strategy to capture a model: torch.export, if a call bypasses the recorder."""

import pytest
import torch
import torch.nn.functional as F
from support.chain import differences, even_cuts, plan_of
from support.models.trace import StraightThrough, Toy, vectors, workload
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import capture
from autopipe.trace.exported import NotExportable, export
from autopipe.trace.strategies import CaptureStrategies
from autopipe.trace.verify import verify


class Mapped(nn.Module):
    """Calls torch.vmap, whose inner tensors the recorder does not know."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.second, self.drop = nn.Linear(8, 4), nn.Dropout(0.3)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        with torch.no_grad():
            scale = x.abs().mean(1, keepdim=True) + 1
        h = self.drop(self.second(h)) * scale
        return torch.vmap(lambda row: torch.dot(row, row))(h).mean()  # the map


class Estimating(Mapped):
    def forward(self, x):
        return torch.vmap(lambda row: torch.dot(row, row))(StraightThrough.apply(self.first(x))).mean()  # the map


class Unrecordable(Mapped):
    def forward(self, x):
        rows = torch.vmap(lambda row: torch.dot(row, row))(self.first(x))
        return rows.mean() * (2.0 if rows.sum() > 0 else 1.0)  # the branch


def test_a_model_with_vmap_is_captured_by_torch_export():
    captured = capture(Toy(Mapped, vectors))
    assert captured.exact
    assert captured.method == captured.graph.captured_by == "torch.export (calls of the model, at two batch sizes)"
    assert "the map" in captured.notes[0]
    assert {node.module_path for node in captured.graph.nodes} >= {"first", "norm", "second", "drop"}


@pytest.mark.parametrize("batch_size", [4, 6])
def test_stages_of_an_exported_model_equal_the_model(tmp_path, batch_size):
    work = Toy(Mapped, vectors)
    captured = capture(work, verify=False)
    plan = plan_of(captured.graph, even_cuts(captured.graph, 2))
    assert len(plan.stages) == 2
    assert differences(work, captured, plan, tmp_path, batch_size, (0, 0, 0)) == []


def test_export_of_a_model_with_a_custom_backward_is_refused():
    with pytest.raises(TraceError) as caught:
        capture(Toy(Estimating, vectors))
    assert "the map" in caught.value.where
    assert "tried too: torch.export (StraightThrough is an autograd.Function" in caught.value.remedy


def test_a_failed_export_is_reported_with_the_first_reason():
    with pytest.raises(TraceError) as caught:
        capture(Toy(Unrecordable, vectors))
    assert "tried too: torch.export" in caught.value.remedy


EXPORTABLE = ["plain", "tied", "shared layer", "frozen", "in place", "experts", "dataclass output", "rotary"]


@pytest.mark.parametrize("name", [*EXPORTABLE, "lstm cell", "weight and spectral norm", "hooks", "plain tensors"])
def test_an_exported_graph_equals_the_model(name):
    """Two strategies that share little code have equal loss, gradients, buffers and draws."""
    work = workload(name)
    model = work.build_model()
    items = [work.example_item(5), work.example_item(3)]
    strategies = CaptureStrategies(work, model, items[0], 5, forward=export(work, model, items[0]))
    exported = strategies.capture()
    exact, notes = verify(work, model, exported.module, exported.graph, items)
    assert exact and not notes
    if name == "rotary":
        contexts = {node.context for node in exported.graph.nodes}
        assert "no_grad" in contexts and any(context.startswith("autocast(cpu, bfloat16") for context in contexts)


def test_a_buffer_that_export_loses_is_found_by_verification():
    """torch.export drops the change of a buffer that is bound to a new tensor."""
    work = workload("running buffer")
    model = work.build_model()
    item = work.example_item(5)
    strategies = CaptureStrategies(work, model, item, 5, forward=export(work, model, item))
    exported = strategies.capture()
    with pytest.raises(TraceError, match="the captured graph is not the model: buffer mean differs"):
        verify(work, model, exported.module, exported.graph, [item])


def test_a_custom_backward_is_never_exported():
    work = workload("custom function")
    with pytest.raises(NotExportable, match=r"StraightThrough is an autograd\.Function"):
        export(work, work.build_model(), work.example_item(5))


def test_export_does_not_change_the_model():
    work = Toy(Mapped, vectors)
    model = work.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    capture(work, model=model)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
