"""Does a plan belong to a graph? Asked wherever the two meet again after they lay in files.

``Plan`` and ``Graph`` each say what is impossible by itself; what only the two together can say is here: a plan that is
cut elsewhere than it says, sends other values than its cuts, or lacks a parameter, would train another model.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.errors import ArtifactError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan


def refuse_disagreement(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that is not one of this graph.

    Raises: ArtifactError naming the first thing that differs.
    """
    what = next(_disagreements(plan, graph), "")
    if what:
        raise ArtifactError(
            f"the plan is damaged: {what}",
            where=f"plan of {graph.name}",
            remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
        )


def _disagreements(plan: Plan, graph: Graph) -> Iterator[str]:
    if plan.graph_digest != graph.digest:
        yield f"it is of model {plan.graph_digest}, and the model is {graph.digest}"
    if len(graph.outputs) > 2:
        yield f"the model has {len(graph.outputs)} outputs; the loss is wanted, and its weight where it has one"
    if plan.stages[-1].stop != len(graph.nodes):
        yield f"its stages end at node {plan.stages[-1].stop} of {len(graph.nodes)}"
        return
    for stage in plan.stages:
        cut_names = graph.nodes[stage.start].name, graph.nodes[stage.stop - 1].name
        if (stage.first, stage.last) != cut_names:
            stated = f"{stage.first} .. {stage.last}"
            yield f"stage {stage.index} is said to be {stated}, and its cuts say {cut_names[0]} .. {cut_names[1]}"
    cuts = Cuts(graph)
    for stage in plan.stages[1:]:
        if stage.start not in cuts.legal:
            yield f"stage {stage.index} begins at node {stage.start}, where no cut may be"
            return
    crossing = cuts.boundaries([stage.start for stage in plan.stages[1:]])
    said_to_cross = [(boundary.value, boundary.producer, boundary.consumers) for boundary in plan.boundaries]
    if said_to_cross != crossing:
        yield f"its boundaries are {_values(said_to_cross)}, and its cuts send {_values(crossing)}"
        return
    for boundary in plan.boundaries:
        if boundary.spec != cuts.spec(boundary.value):
            yield f"it sends {boundary.value} as {boundary.spec}, and the model makes {cuts.spec(boundary.value)}"
    yield from _state(plan, graph, cuts)


def _values(boundaries: list[tuple[str, int, tuple[int, ...]]]) -> str:
    return ", ".join(f"{value} from {producer} to {list(to)}" for value, producer, to in boundaries[:8]) or "none"


def _state(plan: Plan, graph: Graph, cuts: Cuts) -> Iterator[str]:
    holders: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
        last = stage.stop == len(graph.nodes)
        for node in cuts.stage_nodes(stage.start, stage.stop, graph.outputs if last else ()):
            for name in node.parameters:
                if name not in stage.parameters:
                    yield f"stage {stage.index} runs {node.name} without its parameter {name}"
    for name in graph.parameters:
        if name not in holders:
            yield f"parameter {name} is in no stage"
    for name, stages in holders.items():
        if name not in graph.parameters:
            yield f"stage {stages[0]} holds parameter {name}, which the model does not have"
    tied = {tie.parameter: [tie.owner, *tie.copies] for tie in plan.ties}
    shared = {name: stages for name, stages in holders.items() if len(stages) > 1}
    for name in {**tied, **shared}:
        if tied.get(name) != shared.get(name):
            yield f"{name} is tied over stages {tied.get(name, [])}, and is held by {holders.get(name, [])}"
