"""Modules named like Python keywords: captured, measured, generated and run like any other."""

import pytest
import torch
from support.chain import differences, even_cuts, plan_of
from support.models.trace import Toy, vectors
from torch import nn

from autopipe.measure.clock import Clock
from autopipe.measure.measure import SizeMeasurement
from autopipe.trace import capture


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(4, 8), "class": nn.Linear(8, 4), "None": nn.Linear(4, 4)})
        self.register_parameter("lambda", nn.Parameter(torch.ones(4)))
        self.register_buffer("import", torch.full((4,), 0.5))

    def forward(self, x):
        h = self.parts["class"](self.parts["in"](x).relu()) * getattr(self, "lambda")
        return (self.parts["None"](h) + getattr(self, "import")).pow(2).mean()


def test_keyword_names_are_captured_with_an_underscore():
    captured = capture(Toy(Words, vectors))
    assert captured.exact
    assert {"in_", "class_", "None_"} <= {node.name for node in captured.graph.nodes}
    assert set(captured.graph.parameters) >= {"lambda", "parts.class.weight"}


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_with_keyword_names_equal_the_model(num_stages, tmp_path):
    work = Toy(Words, vectors)
    captured = capture(work, verify=False)
    plan = plan_of(captured.graph, even_cuts(captured.graph, num_stages))
    assert differences(work, captured, plan, tmp_path, 4, (0, 0, 0)) == []
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("stage_*.py")))
    assert 'self.parts["class"]' in text and 'self["lambda"]' in text


def test_modules_with_keyword_names_are_measured():
    work = Toy(Words, vectors)
    captured = capture(work, verify=False)
    batch = work.leaves(work.example_item(4))
    measured = SizeMeasurement(captured, Clock(torch.device("cpu")), 4, batch).measurement()
    assert set(measured.costs) == {node.name for node in captured.graph.nodes}
