"""Whether a plan belongs to a graph. Checked whenever both are loaded from files.

``Plan`` and ``Graph`` each validate themselves. This module validates what depends on both: a plan whose stages do not
match its cuts, that sends values which its cuts do not cross, or that lacks a parameter would train another model.
"""

from __future__ import annotations

from autopipe.errors import ArtifactError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan


def refuse_disagreement(plan: Plan, graph: Graph, *, of_a_call: bool = False) -> None:
    """Refuse a plan that does not belong to this graph. Raises: ArtifactError naming the first difference."""
    what = _disagreement(plan, graph, of_a_call=of_a_call)
    if what:
        raise ArtifactError(
            f"the plan is damaged: {what}",
            where=f"plan of {graph.name}",
            remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
        )


def _disagreement(plan: Plan, graph: Graph, *, of_a_call: bool) -> str:
    """Return the first difference, or ""."""
    if plan.graph_digest != graph.digest:
        return f"it was made for model {plan.graph_digest}, and the model is {graph.digest}"
    if len(graph.outputs) > 2 and not of_a_call:
        return f"the model has {len(graph.outputs)} outputs; expected the loss, or the loss and its weight"
    if plan.stages[-1].stop != len(graph.nodes):
        return f"its stages end at node {plan.stages[-1].stop} of {len(graph.nodes)}"
    for stage in plan.stages:
        cut_names = graph.nodes[stage.start].name, graph.nodes[stage.stop - 1].name
        if (stage.first, stage.last) != cut_names:
            stated = f"{stage.first} .. {stage.last}"
            return f"stage {stage.index} is named {stated}, but its cuts are at {cut_names[0]} .. {cut_names[1]}"
    cuts = Cuts(graph)
    for stage in plan.stages[1:]:
        if stage.start not in cuts.legal:
            return f"stage {stage.index} begins at node {stage.start}, which is not a legal cut"
    for stage in plan.stages:
        legal = {stage.start, stage.stop, *cuts.legal}
        for position in (position for unit in stage.units for position in unit):
            if position not in legal:
                return f"stage {stage.index} recomputes from or to node {position}, which is not a legal cut"
    crossing = cuts.boundaries([stage.start for stage in plan.stages[1:]])
    stated_crossing = [(boundary.value, boundary.producer, boundary.consumers) for boundary in plan.boundaries]
    if stated_crossing != crossing:
        return f"it sends {_values(stated_crossing)}, but its cuts send {_values(crossing)}"
    for boundary in plan.boundaries:
        if boundary.spec != cuts.spec(boundary.value):
            return f"it sends {boundary.value} as {boundary.spec}, but in the model it is {cuts.spec(boundary.value)}"
    return _state_disagreement(plan, graph, cuts)


def _values(boundaries: list[tuple[str, int, tuple[int, ...]]]) -> str:
    return ", ".join(f"{value} from {producer} to {list(to)}" for value, producer, to in boundaries[:8]) or "nothing"


def _state_disagreement(plan: Plan, graph: Graph, cuts: Cuts) -> str:
    holders: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
        last = stage.stop == len(graph.nodes)
        for node in cuts.stage_nodes(stage.start, stage.stop, graph.outputs if last else ()):
            for name in node.parameters:
                if name not in stage.parameters:
                    return f"stage {stage.index} runs {node.name} without its parameter {name}"
    for name in graph.parameters:
        if name not in holders:
            return f"parameter {name} is in no stage"
    for name, stages in holders.items():
        if name not in graph.parameters:
            return f"stage {stages[0]} has parameter {name}, which the model does not have"
    tied = {tie.parameter: [tie.owner, *tie.copies] for tie in plan.ties}
    shared = {name: stages for name, stages in holders.items() if len(stages) > 1}
    for name in {**tied, **shared}:
        if tied.get(name) != shared.get(name):
            return f"{name} is tied over stages {tied.get(name, [])}, but stages {holders.get(name, [])} have it"
    return ""
