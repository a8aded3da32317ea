import copy
import random

import numpy as np
import pytest
import torch
from support.models.trace import CASES, workload

from autopipe.ir.cuts import Cuts
from autopipe.trace import capture


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_is_captured_exactly(name):
    captured = capture(workload(name))
    assert captured.exact
    assert captured.graph.symbols[0].name == "s0"


@pytest.mark.parametrize("name", CASES)
def test_the_users_model_is_unchanged(name):
    work = workload(name)
    model = work.build_model()
    state = copy.deepcopy(model.state_dict())
    objects = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    capture(work, model=model)
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == objects
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        for key, value in vars(module).items():
            assert value is attributes[path][key], f"{path}.{key}"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert random.getstate() == seeds[1]
    assert np.array_equal(np.random.get_state()[1], seeds[2])


@pytest.mark.parametrize("name", CASES)
def test_the_module_and_the_graph_agree(name):
    captured = capture(workload(name), verify=False)
    calls = [n for n in captured.module.graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    assert [n.name for n in calls] == [n.name for n in captured.graph.nodes]
    assert [n.meta["node"] for n in calls] == list(captured.graph.nodes)
    placeholders = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
    assert placeholders == [entry.name for entry in captured.graph.inputs]
    assert isinstance(Cuts(captured.graph).legal, tuple)  # every field that cuts need is set


@pytest.mark.parametrize("name", CASES)
def test_a_second_capture_has_the_same_digest(name):
    work = workload(name)
    first, second = (capture(work, verify=False).graph.digest for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["plain", "tied", "batch norm", "rotary"])
def test_shapes_hold_for_other_batch_sizes(name):
    work = workload(name)
    captured = capture(work, verify=False)
    seen = {}

    class Look(torch.fx.Interpreter):
        def run_node(self, n):
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    leaves = work.leaves(work.example_item(7))
    Look(captured.module).run(*leaves.values())
    for node in captured.graph.nodes:
        if node.spec is not None:
            assert node.spec.concrete(captured.graph.sizes(7)) == tuple(seen[node.name].shape), node.name
