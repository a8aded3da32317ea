"""Profiles of the captured sample models."""

import sys

import pytest
import torch
from support.samples import NAMES, load_sample

from autopipe.measure import measure
from autopipe.trace import capture


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_measured_and_its_saved_bytes_are_those_of_one_forward(name, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    workload = load_sample(name)
    traced = capture(workload, verify=False)
    profile = measure(traced, workload, device="cpu", microbatch_sizes=(2,))
    sys.modules.pop(name, None)

    root = traced.module
    own = {t.untyped_storage().data_ptr() for t in (*root.parameters(), *root.buffers(), *traced.constants.values())}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    leaves = {key: leaf.clone() for key, leaf in workload.leaves(workload.example_item(2)).items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = root(*[leaves[entry.name] for entry in traced.graph.inputs])
    expected = sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in own)
    costs = profile.measurements[0].costs
    assert outputs is not None
    assert sum(cost.saved_bytes for cost in costs.values()) == expected
    assert list(costs) == [node.name for node in traced.graph.nodes]
    assert profile.optimizer_seconds_per_byte > 0
