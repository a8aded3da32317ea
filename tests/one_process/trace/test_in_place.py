"""No cut separates a tensor from a change in place of its memory."""

import torch
from support.models.trace import Base, Toy, vectors, workload

from autopipe.ir.cuts import Cuts
from autopipe.trace import capture


def test_no_cut_lies_before_a_change_in_place():
    graph = capture(workload("batch norm")).graph
    act = next(node for node in graph.nodes if node.target == "act")
    assert act.mutates == ("norm",)
    assert graph.position[act.name] not in Cuts(graph).legal


def test_no_cut_lies_between_the_first_and_the_last_change_of_a_base():
    graph = capture(workload("in place")).graph
    first = min(graph.position[node.name] for node in graph.nodes if node.mutates)
    last = max(graph.position[node.name] for node in graph.nodes if node.mutates and not node.input_only)
    assert not [position for position in Cuts(graph).legal if first <= position <= last]


def test_no_cut_separates_a_base_from_a_view_that_is_changed_later():
    class Late(Base):
        def forward(self, x):
            h = self.a(x) * 2
            left = h[:, :2]
            other = torch.tanh(self.a(x))
            left.mul_(3)
            return (h + other).pow(2).mean()

    graph = capture(Toy(Late, vectors)).graph
    view = next(node for node in graph.nodes if node.name == "left")
    assert view.storage == "h"
    change = next(graph.position[node.name] for node in graph.nodes if node.mutates)
    assert not [cut for cut in Cuts(graph).legal if graph.position["h"] < cut <= change]
