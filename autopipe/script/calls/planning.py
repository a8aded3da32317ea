"""Plan the recording of one call of the script's model: the planner's cut, with the times of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopipe.errors import PlanError, ProfileError
from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile, WorkloadSpec
from autopipe.measure.estimate import estimate
from autopipe.planning.api import make_plan
from autopipe.planning.clusters import this_machine, usable_gpu_bytes
from autopipe.planning.options import PlanOptions
from autopipe.script.devices import CPU
from autopipe.trace.graph.replay import Replay
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.result import Capture

_LEAST_SECONDS = 0.02  # of the forward of a batch whose times are used
_LEAST_PART_SECONDS = 0.002  # of that of a part
_REPEATED_SECONDS = 0.5  # of the first forward, if it is repeated
_MOST_RATIO = 4.0  # of a backward and a forward


class _Call:
    """What the measurement asks of a workload, from one call of the model."""

    spec = WorkloadSpec("script", arguments={}, hooks={}, inputs=(), seed=0)

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        self.tensors = leaves

    def leaves(self, item: Any) -> dict[str, Tensor]:
        return dict(item)

    def example_item(self, count: int) -> Any:
        return self.tensors

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


_KERNEL = 1e-5  # seconds
_CPU_RATES = 1 / 2e10, 1 / 5e9
"""Seconds per operation and byte of a processor of today."""
_GPU_RATES = 1 / 5e13, 1 / 1e12
"""Those of a GPU of today: stages and replicas exchange values through the host, whose speed is the same."""


def plan_of(
    capture: Capture,
    seconds: Mapping[str, float],
    count: int,
    parts: int = 1,
    replicas: int = 1,
    device: torch.device = CPU,
) -> Plan:
    """Return the planner's cut for ``count`` ranks. Ranks are not in the plan.

    ``seconds``: of forwards by node, as ``forward_seconds`` returns them; others are from counted operations.
    ``parts``: of a batch, each of which the recording computes. ``replicas``: copies of the model, each with its share
    of the ranks; 0: as many as are fastest and fit. ``device``: of the script's model.

    Raises: PlanError if the model cannot be cut into as many stages.
    """
    profile = _profile_of(capture, seconds, _CPU_RATES if device.type == CPU.type else _GPU_RATES)
    cluster = this_machine(count, profile.device, None)  # values travel through the memory of the host on every device
    always: dict[str, Any] = {"num_ranks": count, "recompute": "never", "exact_ties": "always"}
    if replicas == parts == 1:
        return make_plan(profile, cluster, PlanOptions(batch_size=1, num_microbatches=1, **always))
    plans: list[Plan] = []
    errors: list[PlanError] = []
    numbers = [number for number in range(1, min(count, parts) + 1) if count % number == 0]
    for number in [replicas] if replicas else numbers:
        own: dict[str, Any] = {"replicas": number, "sharded": number > 1, "schedule": "gpipe"}
        count_of_parts = max(parts, number)  # without parts, replicas compute the script's calls in turn
        options = PlanOptions(batch_size=count_of_parts, num_microbatches=count_of_parts, **own, **always)
        try:
            plans.append(make_plan(profile, cluster if number == 1 else _with_room(cluster, device), options))
        except PlanError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.predicted.step_seconds)


def _profile_of(capture: Capture, seconds: Mapping[str, float], rates: tuple[float, float]) -> Profile:
    """Return a profile of the recording with counted operations, and times where they are known.

    ``rates``: seconds per operation and byte.
    """
    leaves: dict[str, Tensor] = {
        node.name: node.meta["val"] for node in capture.module.graph.nodes if node.op == "placeholder"
    }
    real = {
        name: torch.zeros(tuple(value.shape), dtype=value.dtype, device=CPU).as_strided(value.shape, value.stride())
        if value.is_contiguous()
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        for name, value in leaves.items()
    }
    try:
        counted = estimate(capture, _Call(real), microbatch_sizes=[1])
        measurement = _timed(counted.measurements[0], *rates)
    except ProfileError:  # a decision on numbers, which tensors without data do not have
        measurement = _by_bytes(capture.graph, rates[1])
    measurement = _with_seconds(measurement, seconds)
    return Profile(_Call.spec, capture.graph, Device("cpu", "counted", 0), (measurement,), batch_size=1)


def _with_room(cluster: Cluster, device: torch.device) -> Cluster:
    """Return the ranks with the memory of a GPU: replicas that do not fit are not chosen."""
    if device.type == CPU.type:
        return cluster
    room = usable_gpu_bytes(torch.cuda.get_device_properties(device).total_memory)
    devices = tuple(dataclasses.replace(entry, memory_bytes=room) for entry in cluster.devices)
    return dataclasses.replace(cluster, devices=devices, cores=0.0)


def _by_bytes(graph: Graph, byte: float) -> Measurement:
    """Return costs by the bytes of parameters and results alone."""
    costs = {}
    for node in graph.nodes:
        moved = sum(graph.parameters[name].num_bytes({}) for name in node.parameters)
        result = node.spec.num_bytes({}) if node.spec is not None else 0
        seconds = (moved + result) * byte + _KERNEL
        costs[node.name] = NodeCost(seconds, 2 * seconds, result, result)
    return Measurement(1, costs)


def _timed(measurement: Measurement, flop: float, byte: float) -> Measurement:
    def seconds(work: PassWork) -> float:
        return work.flops * flop + (work.matrix_bytes + work.other_bytes) * byte + work.kernels * _KERNEL

    costs = {}
    for name, cost in measurement.costs.items():
        work = measurement.work.get(name, NodeWork())
        costs[name] = dataclasses.replace(
            cost, forward_seconds=seconds(work.forward), backward_seconds=seconds(work.backward)
        )
    return dataclasses.replace(measurement, costs=costs)


def _with_seconds(measurement: Measurement, seconds: Mapping[str, float]) -> Measurement:
    """Replace times of forwards; a backward takes as many times as long as before, or twice as long."""
    costs = dict(measurement.costs)
    for name, measured in seconds.items():
        if name in costs:
            counted = costs[name]
            ratio = counted.backward_seconds / counted.forward_seconds if counted.forward_seconds > 2 * _KERNEL else 2.0
            costs[name] = dataclasses.replace(
                counted, forward_seconds=measured, backward_seconds=min(ratio, _MOST_RATIO) * measured
            )
    return dataclasses.replace(measurement, costs=costs)


class _Stopwatch(Replay):
    """Runs a recording, and notes the seconds of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, (0, 0, 0))
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        begin = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n.name] = time.perf_counter() - begin
        return result


def forward_seconds(capture: Capture, leaves: Mapping[str, Tensor], parts: int = 1) -> dict[str, float]:
    """Return the seconds of each node in a forward of a model on the CPU, for inputs by name: one of ``parts``.

    Nothing for a model that is so fast that the times would be noise, and for one that cannot run here as recorded.
    What the forward prints is not shown, and the state of the model and of generators is restored.
    """
    module = capture.module
    try:
        with torch.no_grad(), left_as_it_was(module), contextlib.redirect_stdout(None):
            times: list[dict[str, float]] = []
            for most in (math.inf, _REPEATED_SECONDS):  # the first run allocates
                if times and sum(times[0].values()) > most:
                    break
                inputs = [leaves[node.name].clone() for node in module.graph.nodes if node.op == "placeholder"]
                run = _Stopwatch(module)
                run.run(*inputs)
                times.append(run.seconds)
    except Exception:
        return {}
    least = {name: min(entry[name] for entry in times) for name in times[0]}
    return least if sum(least.values()) >= max(_LEAST_SECONDS / parts, _LEAST_PART_SECONDS) else {}
