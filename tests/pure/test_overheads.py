"""What the runtime takes is found again in the record of a run that was simulated with it."""

import itertools
from dataclasses import replace

import pytest

from autopipe.ir.cluster import Cluster, ClusterDevice, HostCosts, Level
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile, WorkloadSpec
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import PlanOptions, make_plan
from autopipe.workflow.overheads import Record, under_load
from autopipe.workflow.predict import costs_of, predict, timeline_of

MINIBATCHES = 4


def cluster(host):
    return Cluster((Level("host", 2, 1e9, 1e-4),), (ClusterDevice("cpu", 1 << 34),), "measured", host)


def even_profile(num_layers=8, seconds=1e-3, *, skips=False):
    """Return layers that cost the same, a thousand floats a sample between them. ``skips``: each reads two earlier."""
    nodes = tuple(
        Node(
            f"n{i}",
            "call_function",
            "f",
            tuple(f"n{k}" for k in range(max(i - 1 - skips, 0), i)) or ("x",),
            TensorSpec(("s0", 1000), "float32", True),
            parameters=(f"layers.{i}.weight",),
        )
        for i in range(num_layers)
    )
    graph = Graph(
        name="even",
        inputs=(Input("x", TensorSpec(("s0", 3), "float32")),),
        symbols=(Symbol("s0", "x", 0, 4),),
        nodes=nodes,
        outputs=(nodes[-1].name,),
        parameters={f"layers.{i}.weight": TensorSpec((1000,), "float32", True) for i in range(num_layers)},
        buffers={},
        aliases={},
    )
    costs = {node.name: NodeCost(seconds, 2 * seconds, 0, 0, 0) for node in nodes}
    workload = WorkloadSpec("model.py", {}, {}, (), 0)
    return Profile(workload, graph, Device("cpu", "test", 0), (Measurement(4, costs),), 1e-9, 1.0)


def record(host, schedule, factor=1.0):
    """Return a run of two ranks as the simulator has it, its computations ``factor`` times as long as profiled."""
    profile = even_profile()
    made = make_plan(profile, cluster(HostCosts()), PlanOptions(2, 16, schedule=schedule, num_microbatches=4))
    stages = tuple(
        replace(s, forward_seconds=factor * s.forward_seconds, backward_seconds=factor * s.backward_seconds)
        for s in made.stages
    )
    ran = replace(made, stages=stages)
    once = timeline_of(ran, profile, cluster(host))
    seconds = predict(ran, profile, cluster(host)).step_seconds
    rows = []
    for rank in range(2):
        row = []
        for number in range(MINIBATCHES):
            for span in sorted((span for span in once.spans if span.rank == rank), key=lambda span: span.start_seconds):
                begin, end = (moment + number * seconds for moment in (span.start_seconds, span.end_seconds))
                if row and span.instruction.op != "F":
                    begin = row[-1].end_seconds  # a rank waits in the instruction that it waits for
                row.append(replace(span, start_seconds=begin, end_seconds=end))
        rows.append(tuple(row))
    return Record(made, profile, cluster(HostCosts()), tuple(rows))


@pytest.mark.parametrize(("late", "factor"), list(itertools.product((0.0, 0.3e-3, 2e-3), (1.0, 1.4))))
def test_the_delay_of_messages_is_found_whatever_the_pace(late, factor):
    host = HostCosts(compute_seconds=1e-4, send_seconds=5e-5, receive_seconds=5e-5)
    planted = replace(host, step_seconds=3e-3, delivery_seconds=late)
    runs = [record(planted, schedule, pace) for schedule in ("gpipe", "1f1b") for pace in (1.0, factor, 1.0)]
    found = under_load(host.send_seconds_per_byte, runs)
    assert found.delivery_seconds == pytest.approx(late, rel=0.02, abs=1e-5)
    assert found.step_seconds == pytest.approx(3e-3, rel=0.01)
    assert found.compute_seconds == pytest.approx(1e-4, rel=0.01)
    assert found.send_seconds == pytest.approx(5e-5, rel=0.01)
    assert found.receive_seconds == pytest.approx(5e-5, rel=0.01)


@pytest.mark.parametrize(("late", "factor"), list(itertools.product((0.0, 0.3e-3, 2e-3), (1.0, 1.4))))
def test_no_run_need_have_the_pace_of_its_profile_for_the_delay(late, factor):
    host = HostCosts(compute_seconds=1e-4, send_seconds=5e-5, receive_seconds=5e-5)
    planted = replace(host, step_seconds=3e-3, delivery_seconds=late)
    found = under_load(0.0, [record(planted, "1f1b", pace) for pace in (factor, 1.1, 1.2)])
    assert found.step_seconds == pytest.approx(3e-3, rel=0.01)
    assert found.delivery_seconds == pytest.approx(late, rel=0.02, abs=1e-5)


def test_a_later_message_makes_a_longer_step():
    made = record(HostCosts(), "1f1b")
    seconds = [predict(made.plan, made.profile, cluster(HostCosts(delivery_seconds=d))).step_seconds for d in (0, 1e-3)]
    assert seconds[1] > seconds[0] + 1e-3


def test_every_value_that_crosses_is_a_message_with_its_costs():
    host = HostCosts(send_seconds=1e-3, receive_seconds=2e-3)
    for skips, messages in ((False, 1), (True, 2)):
        profile = even_profile(skips=skips)
        made = make_plan(profile, cluster(host), PlanOptions(2, 16, schedule="1f1b", num_microbatches=4))
        edge = costs_of(made, profile, cluster(host)).edges[0, 1]
        assert edge.send_seconds == pytest.approx(messages * 1e-3)
        assert edge.receive_seconds == pytest.approx(messages * 2e-3)
