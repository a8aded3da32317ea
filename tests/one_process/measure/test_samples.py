"""Profiles of the captured sample models."""

import sys

import pytest
import torch
from support.measuring.saved_bytes import with_saved_bytes
from support.samples import NAMES, load_sample

from autopipe.measure import measure
from autopipe.measure.clock import Clock
from autopipe.measure.measure import SizeMeasurement
from autopipe.trace import capture


def saved_by_one_forward(traced, workload):
    """Return the bytes that one forward keeps for its backward."""
    root = traced.module
    leaves = {key: leaf.clone() for key, leaf in workload.leaves(workload.example_item(2)).items()}
    inputs = [leaves[entry.name] for entry in traced.graph.inputs]
    own = (*root.parameters(), *root.buffers(), *traced.constants.values())
    outputs, total = with_saved_bytes(lambda: root(*inputs), own)
    assert outputs is not None
    return total


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_measured_and_its_saved_bytes_are_those_of_one_forward(name, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    workload = load_sample(name)
    traced = capture(workload, verify=False)
    profile = measure(traced, workload, device="cpu", microbatch_sizes=(2,))
    sys.modules.pop(name, None)

    expected = saved_by_one_forward(traced, workload)
    costs = profile.measurements[0].costs
    assert sum(cost.saved_bytes for cost in costs.values()) == expected
    assert list(costs) == [node.name for node in traced.graph.nodes]
    assert profile.optimizer_seconds_per_byte > 0


@pytest.mark.parametrize("least_seconds", [1e-9, 10.0])
def test_the_states_of_an_lstm_are_counted_whatever_is_measured_together(least_seconds, monkeypatch):
    """The decoder keeps the states of the encoder, which keeps only its other results."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    workload = load_sample("seq2seq_lstm")
    traced = capture(workload, verify=False)
    sys.modules.pop("seq2seq_lstm", None)
    batch, clock = workload.leaves(workload.example_item(2)), Clock(torch.device("cpu"))
    measured = SizeMeasurement(traced, clock, 2, batch, least_seconds=least_seconds).measurement()
    assert sum(cost.saved_bytes for cost in measured.costs.values()) == saved_by_one_forward(traced, workload)
