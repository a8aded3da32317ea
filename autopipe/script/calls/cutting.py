"""Cut the recording of one call of the script's model into stages with the planner, and write the stage files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.errors import TraceError
from autopipe.generate.parts import divide
from autopipe.generate.write import generate
from autopipe.ir.plan import Plan
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.script.calls.called import Recording
from autopipe.script.calls.parameter_uses import is_serial, twice_in_a_call, used_often
from autopipe.script.calls.script_functions import write_functions
from autopipe.script.devices import CPU


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
    twice = twice_in_a_call(recording.capture.module)
    written = frozenset(buffer for node in graph.nodes for buffer in node.buffers_written)
    return Program(
        number,
        recording,
        plan,
        name,
        draws,
        written,
        is_serial(graph, plan, twice),
        used_often(graph, graph.nodes, twice),
    )


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
