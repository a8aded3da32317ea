"""Cut the recording of one call of the script's model into stages with the planner, and write the stage files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.errors import PlanError, ProfileError, TraceError
from autopipe.generate.parts import divide
from autopipe.generate.write import generate
from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile, WorkloadSpec
from autopipe.measure.estimate import estimate
from autopipe.planning.api import make_plan
from autopipe.planning.clusters import this_machine, usable_gpu_bytes
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.planning.options import PlanOptions
from autopipe.script.calls.called import Recording
from autopipe.script.calls.parameter_uses import is_serial, used_often
from autopipe.script.calls.script_functions import write_functions
from autopipe.script.devices import CPU


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


# seconds per operation, byte and kernel of a processor of today: only their ratio matters for the cut
_FLOP, _BYTE, _KERNEL = 1 / 2e10, 1 / 5e9, 1e-5


def plan_of(recording: Recording, count: int, parts: int = 1, replicas: int = 1, device: torch.device = CPU) -> Plan:
    """Return the planner's cut for ``count`` ranks, with times from counted operations. Ranks are not in the plan.

    ``parts``: of a batch, each of which the recording computes. ``replicas``: copies of the model, each with its share
    of the ranks; 0: as many as are fastest and fit. ``device``: of the script's model.

    Raises: PlanError if the model cannot be cut into as many stages.
    """
    profile = _profile_of(recording)
    cluster = _cluster_of(profile, count, device)
    always: dict[str, Any] = {"num_ranks": count, "recompute": "never", "exact_ties": "always"}
    if replicas == 1:
        return make_plan(profile, cluster, PlanOptions(batch_size=1, num_microbatches=1, **always))
    plans: list[Plan] = []
    errors: list[PlanError] = []
    numbers = [number for number in range(1, min(count, parts) + 1) if count % number == 0]
    for number in [replicas] if replicas else numbers:
        own: dict[str, Any] = {"replicas": number, "sharded": number > 1, "schedule": "gpipe"}
        count_of_parts = max(parts, number)  # without parts, replicas compute the script's calls in turn
        options = PlanOptions(batch_size=count_of_parts, num_microbatches=count_of_parts, **own, **always)
        try:
            plans.append(make_plan(profile, cluster, options))
        except PlanError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.predicted.step_seconds)


def _profile_of(recording: Recording) -> Profile:
    """Return a profile of the recording with counted operations."""
    leaves: dict[str, Tensor] = {
        node.name: node.meta["val"] for node in recording.capture.module.graph.nodes if node.op == "placeholder"
    }
    real = {
        name: torch.zeros(tuple(value.shape), dtype=value.dtype, device=CPU).as_strided(value.shape, value.stride())
        if value.is_contiguous()
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        for name, value in leaves.items()
    }
    try:
        counted = estimate(recording.capture, _Call(real), microbatch_sizes=[1])
        measurement = _timed(counted.measurements[0])
    except ProfileError:  # a decision on numbers, which tensors without data do not have
        measurement = _by_bytes(recording.graph)
    return Profile(_Call.spec, recording.graph, Device("cpu", "counted", 0), (measurement,), batch_size=1)


def _cluster_of(profile: Profile, count: int, device: torch.device) -> Cluster:
    """Return the ranks of this machine: values travel through the memory of the host on every device."""
    cluster = this_machine(count, profile.device, None)
    if device.type == CPU.type:
        return cluster
    room = usable_gpu_bytes(torch.cuda.get_device_properties(device).total_memory)
    return dataclasses.replace(
        cluster, devices=tuple(dataclasses.replace(entry, memory_bytes=room) for entry in cluster.devices), cores=0.0
    )


def _by_bytes(graph: Graph) -> Measurement:
    """Return costs by the bytes of parameters and results alone."""
    costs = {}
    for node in graph.nodes:
        moved = sum(graph.parameters[name].num_bytes({}) for name in node.parameters)
        result = node.spec.num_bytes({}) if node.spec is not None else 0
        seconds = (moved + result) * _BYTE + _KERNEL
        costs[node.name] = NodeCost(seconds, 2 * seconds, result, result)
    return Measurement(1, costs)


def _timed(measurement: Measurement) -> Measurement:
    def seconds(work: PassWork) -> float:
        return work.flops * _FLOP + (work.matrix_bytes + work.other_bytes) * _BYTE + work.kernels * _KERNEL

    costs = {}
    for name, cost in measurement.costs.items():
        work = measurement.work.get(name, NodeWork())
        costs[name] = dataclasses.replace(
            cost, forward_seconds=seconds(work.forward), backward_seconds=seconds(work.backward)
        )
    return dataclasses.replace(measurement, costs=costs)


@dataclass(frozen=True)
class Draw:
    """A call that draws random numbers: its stage and its node."""

    stage: int
    node: fx.Node


@dataclass(frozen=True)
class Program:
    """A recording cut into stages, whose files are written."""

    number: int
    recording: Recording
    plan: Plan
    folder: str  # of the stage files, inside the folder of the run
    draws: tuple[Draw, ...]  # in the order of the forward
    buffers_written: frozenset[str]
    serial: bool  # see ``parameter_uses``
    uses_often: str  # a parameter that a call may use several times

    def forms(self, model: nn.Module, names: dict[int, str]) -> list[dict[str, Any]]:
        """Return what each rank gets of the program, without tensors. ``names``: as for ``module_form``.

        Raises: UnsendableError if a stage calls a module that is not torch's.
        """
        from autopipe.script.codec import attributes_of, module_form

        graph, plan = self.recording.graph, self.plan
        crossings = [
            (
                index,
                b.value,
                b.producer,
                b.consumers,
                b.spec.concrete({}),
                getattr(torch, b.spec.dtype),
                b.spec.requires_grad,
            )
            for index, b in enumerate(plan.boundaries)
        ]
        forms = []
        for part in divide(graph, plan):
            modules = {path: module_form(model.get_submodule(path), names) for path in part.modules}
            inside = {
                (path, below): attributes_of(module)
                for path in part.modules
                for below, module in model.get_submodule(path).named_modules()
            }
            forms.append(
                {
                    "number": self.number,
                    "folder": self.folder,
                    "graph": graph.digest,
                    "plan": plan.digest,
                    "sends": [entry for entry in crossings if entry[2] == part.index],
                    "receives": [entry for entry in crossings if part.index in entry[3]],
                    "modules": modules,
                    "attributes": inside,
                    "names": {name: graph.aliases.get(name, name) for name in (*part.parameters, *part.buffers)},
                    "reads": sorted(
                        {
                            *plan.stages[part.index].parameters,
                            *(
                                n
                                for node in part.nodes
                                for n in (*node.parameters, *node.buffers, *node.buffers_written)
                            ),
                            *(graph.aliases.get(name, name) for name in (*part.parameters, *part.buffers)),
                        }
                    ),
                }
            )
        return forms


def program_of(recording: Recording, number: int, plan: Plan, folder: Path) -> Program:
    """Write the stage files of a recording into ``folder``, and return the program.

    Raises: TraceError, ArtifactError.
    """
    name = f"call_{number}"
    generate(recording.capture, plan, folder / name, of_a_call=True)
    write_functions(folder / name)
    graph = recording.graph
    stage_of = {node.name: stage.index for stage in plan.stages for node in graph.nodes[stage.start : stage.stop]}
    draws = tuple(
        Draw(stage_of[node.name], node)
        for node in recording.capture.module.graph.nodes
        if node.name in stage_of and node.meta.get("random", (0, 0))[1]
    )
    _refuse_host_values(recording, plan)
    for draw in draws:
        if _draws_by_values(draw.node, recording):
            raise TraceError(f"{draw.node.name} draws as many random numbers as its values demand")
    written = frozenset(buffer for node in graph.nodes for buffer in node.buffers_written)
    return Program(number, recording, plan, name, draws, written, is_serial(graph, plan), used_often(graph))


def _refuse_host_values(recording: Recording, plan: Plan) -> None:
    """Refuse values on the host that would cross between stages on GPUs: they would arrive on the device."""
    crossing = {boundary.value for boundary in plan.boundaries}
    values = {
        node.name: node.meta["val"].device.type
        for node in recording.capture.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }
    kinds = set(values.values()) - {CPU.type}
    for name in sorted(crossing & values.keys()):
        if kinds and values[name] == CPU.type:
            raise TraceError(f"{name} is on the CPU, in a forward on {kinds.pop()}, and would cross between stages")


# how many numbers these consume depends on their input: the script's generator could not follow
_BY_VALUES = {"poisson", "binomial", "rrelu", "rrelu_", "_standard_gamma", "standard_gamma", "_sample_dirichlet"}


def _draws_by_values(node: fx.Node, recording: Recording) -> bool:
    if node.op == "call_module":
        return isinstance(recording.capture.module.get_submodule(str(node.target)), nn.RReLU)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).removesuffix(".default") in _BY_VALUES


def remapped(first: Recording, plan: Plan, recording: Recording) -> Plan:
    """Return the plan of another recording whose stages have the parameters of the first plan's.

    Raises: PlanError.
    """
    return map_cuts_to(plan, first.graph, recording.graph, all_connected=True)
