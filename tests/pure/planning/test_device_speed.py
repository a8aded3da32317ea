"""A plan for a faster device: all compute is scaled, including the optimizer step."""

import dataclasses
import itertools

import pytest
from support.planning_cases import by_name, chain

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning import PlanOptions, comparison, make_plan
from autopipe.planning.clusters import parse_cluster
from autopipe.planning.cost import predict
from autopipe.planning.cost.datasheets import device_like

# links without cost, so that a step is the time of the devices
FREE = Level("free", 4, 1e30, 0.0)


def profile():
    """Return a profile of eight layers whose optimizer takes about as long as their compute."""
    return dataclasses.replace(chain(8, weight=2**20), optimizer_seconds_per_byte=1e-7)


def machine(*devices):
    return Cluster((FREE,), devices, "test")


@pytest.mark.parametrize("replicas", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
def test_a_faster_device_takes_proportionally_less_time(replicas, schedule):
    options = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16, schedule=schedule, may_replicate=replicas)
    plans = {}
    for speed in (1.0, 5000.0):
        cluster = machine(ClusterDevice("device", 0, speed))
        plans[speed] = make_plan(profile(), cluster, options), cluster
    (slow, here), (fast, there) = plans[1.0], plans[5000.0]
    assert fast.predicted.step_seconds == pytest.approx(slow.predicted.step_seconds / 5000)
    simulated = predict.predict(slow, profile(), here), predict.predict(fast, profile(), there)
    assert simulated[1].step_seconds == pytest.approx(simulated[0].step_seconds / 5000)


def test_every_row_of_the_comparison_is_scaled():
    options = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16)
    rows = [by_name(comparison(profile(), machine(ClusterDevice("d", 0, speed)), options)) for speed in (1.0, 5000.0)]
    for name, slow in rows[0].items():
        fast = rows[1][name].plan
        assert fast.predicted.step_seconds == pytest.approx(slow.plan.predicted.step_seconds / 5000), name


def test_the_optimizer_runs_at_the_memory_speed_if_known():
    options = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16)
    steps = {}
    for compute, memory in itertools.product((1.0, 10.0), (1.0, 10.0)):
        cluster = machine(ClusterDevice("device", 0, compute, memory))
        plan = make_plan(profile(), cluster, options)
        steps[compute, memory] = plan.predicted.step_seconds, predict.predict(plan, profile(), cluster).step_seconds
    for formula in (0, 1):
        optimizer = steps[1, 1][formula] - steps[1, 10][formula]  # nine tenths of the time
        compute = steps[1, 1][formula] - steps[10, 1][formula]
        assert optimizer > 0
        assert compute > 0
        assert steps[1, 1][formula] == pytest.approx((optimizer + compute) / 0.9)
        assert steps[10, 10][formula] == pytest.approx(steps[1, 1][formula] / 10)


def test_a_stage_on_unequal_devices_steps_at_the_slowest_speed():
    cluster = machine(*(ClusterDevice("device", 0, speed) for speed in (4.0, 1.0, 2.0, 8.0)))
    assert cluster.update_speed_of((0, 2)) == 2.0
    assert cluster.speed_of((0, 1, 3)) == 1.0


def test_a_datasheet_and_a_cluster_file_give_the_memory_speed():
    device = device_like("V100-16GB", "H100-80GB", "fp16")
    assert device.update_speed == pytest.approx(3350 / 900)
    assert device.speed != device.update_speed
    document = {"level": [{"count": 2, "bandwidth": "1GB/s"}], "device": {"speed": 20, "memory_speed": 6}}
    assert parse_cluster(document, "here").device(0).update_speed == 6
    del document["device"]["memory_speed"]
    assert parse_cluster(document, "here").device(0).update_speed == 20
    document["device"]["memory_speed"] = 0
    with pytest.raises(PlanError, match="memory_speed is 0; it must be a number larger than 0"):
        parse_cluster(document, "here")
