"""A profile in PipeDream's format, planned with autopipe's cost model."""

import pytest
from support.pipedream_cases import GOLDEN, TEXT

from autopipe.ir.cuts import Cuts
from autopipe.planning import PlanOptions, make_plan, uniform_cluster
from autopipe.planning.pipedream.file_format import parse_pipedream
from autopipe.planning.pipedream.profile import profile_from_pipedream, profile_of_layers


def test_layers_become_nodes_with_their_seconds_and_bytes():
    profile = profile_of_layers(parse_pipedream(TEXT), "text", samples=2)
    assert [(node.name, node.inputs, node.parameters) for node in profile.graph.nodes] == [
        ("node2", ("batch",), ("node2.weight",)),
        ("node3", ("node2",), ()),
    ]
    cost = profile.at(2).costs["node2"]
    assert (cost.forward_seconds, cost.backward_seconds, cost.output_bytes) == (0.0015, 0.0025, 8)
    assert profile.graph.parameters["node2.weight"].num_bytes({}) == 4
    assert Cuts(profile.graph).crossing_bytes(1, 2) == 8


@pytest.mark.skipif(not GOLDEN.exists(), reason="PipeDream's profiles are not beside the repository")
@pytest.mark.parametrize("replicas", [True, False])
@pytest.mark.parametrize("name", ["vgg16", "gnmt", "resnet50"])
def test_a_plan_of_a_published_profile_has_every_parameter_in_a_stage(name, replicas):
    profile = profile_from_pipedream(GOLDEN / f"{name}.txt", samples=64)
    options = PlanOptions(num_ranks=4, batch_size=1024, num_microbatches=16, may_replicate=replicas, schedule="1f1b")
    plan = make_plan(profile, uniform_cluster(4, memory="64GiB", link="10GB/s"), options)
    assert {n for stage in plan.stages for n in stage.parameters} == set(profile.graph.parameters)
    single = sum(c.forward_seconds + c.backward_seconds for c in profile.at(64).costs.values())
    assert single / 4 <= plan.predicted.bottleneck_seconds < single
    assert plan.num_ranks <= 4


def test_a_profile_file_becomes_a_profile(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(TEXT)
    profile = profile_from_pipedream(path)
    assert profile.graph.name == "graph.txt"
    assert [node.name for node in profile.graph.nodes] == ["node2", "node3"]
