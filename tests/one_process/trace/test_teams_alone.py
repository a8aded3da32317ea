"""A member without the others: what is measured has the shapes of a member, and the user's model does not change."""

import pytest
import torch
from support.pipelines import captured

from autopipe.ir.teams.axis_sets import choose
from autopipe.measure import measure
from autopipe.trace.axes import find_axes
from autopipe.trace.graph.replay import Replay
from autopipe.trace.teams import alone, of_team


class Shapes(Replay):
    """Compares the shape of every value with the graph's."""

    def run_node(self, n):
        value = super().run_node(n)
        described = n.meta.get("node")
        if isinstance(value, torch.Tensor) and described is not None and described.spec is not None:
            expected = described.spec.concrete(self.sizes)
            assert tuple(value.shape) == expected, n.name
            self.seen += 1
        return value


@pytest.mark.parametrize("sample", ["gpt", "hf_llama"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_member_alone_has_its_own_shapes(sample, size):
    whole = captured(sample)
    before = {name: parameter.clone() for name, parameter in whole.capture.module.named_parameters()}
    axes = choose(whole.capture.graph, find_axes(whole.capture).axes, size)
    if not axes:
        pytest.skip(f"{sample} has no axis for {size} members")
    member = of_team(whole.capture, axes, size)
    single = alone(member)
    assert alone(whole.capture) is whole.capture
    leaves = whole.workload.leaves(whole.workload.example_item(3))
    run = Shapes(single.module, (0, 0, 0))
    run.sizes, run.seen = {s.name: leaves[s.input].shape[s.dimension] for s in member.graph.symbols}, 0
    inputs = [leaves[node.name] for node in single.module.graph.nodes if node.op == "placeholder"]
    run.run(*inputs)[0].backward()
    assert run.seen > 50
    for name, parameter in single.module.named_parameters():
        spec = member.graph.parameters[member.graph.aliases.get(name, name)]
        assert tuple(parameter.shape) == spec.shape, name
        parameter.grad = None
    for name, parameter in whole.capture.module.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_member_is_measured_with_its_own_parameters():
    whole = captured("gpt")
    member = of_team(whole.capture, choose(whole.capture.graph, find_axes(whole.capture).axes, 2), 2)
    profile = measure(alone(member), whole.workload, device="cpu", microbatch_sizes=(2,))
    assert profile.graph is member.graph
    complete = measure(whole.capture, whole.workload, device="cpu", microbatch_sizes=(2,))
    assert profile.trained_bytes < 0.6 * complete.trained_bytes
    # a member does half of the products, and all of what is not sharded
    assert 0.45 < profile.measurements[0].model_flops / complete.measurements[0].model_flops < 0.6
