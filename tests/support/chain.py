"""Stages run one after another in one process, as in a pipeline: values between stages are detached.

Gradients return along the chains of ``ir.plan.Boundary``: the last consumer sends its gradient to the previous one,
which passes on the sum. Shares no code with the runtime.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.draws import Draws, flat_checkpoints
from autopipe.generate import generate, load_constants, load_stage
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Boundary, Plan, Prediction, Stage, Tie
from autopipe.ir.profile import WorkloadSpec
from autopipe.trace import capture


def even_cuts(graph: Graph, num_stages: int) -> list[int]:
    """Return the legal cuts nearest to stages of equal numbers of nodes, or fewer if there are not enough."""
    legal = list(Cuts(graph).legal)
    chosen: list[int] = []
    for number in range(1, num_stages):
        left = [position for position in legal if not chosen or position > chosen[-1]]
        if left:
            wanted = len(graph.nodes) * number / num_stages
            chosen.append(min(left, key=lambda position: abs(position - wanted)))
    return chosen


def plan_of(graph: Graph, positions: Sequence[int]) -> Plan:
    """Return a plan that cuts at these positions."""
    cuts = Cuts(graph)
    edges = [0, *positions, len(graph.nodes)]
    stages = []
    owned: set[str] = set()
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        nodes = cuts.stage_nodes(start, stop, graph.outputs if stop == len(graph.nodes) else ())
        parameters = dict.fromkeys(name for node in nodes for name in node.parameters)
        owned.update(parameters)
        first, last = graph.nodes[start].name, graph.nodes[stop - 1].name
        stages.append(Stage(index, start, stop, first, last, (index,), tuple(parameters), 0.0, 0.0, 0))
    unread = tuple(name for name in graph.parameters if name not in owned)
    first = stages[0]
    stages[0] = Stage(
        0, first.start, first.stop, first.first, first.last, (0,), (*first.parameters, *unread), 0.0, 0.0, 0
    )
    holders = {name: [stage.index for stage in stages if name in stage.parameters] for name in graph.parameters}
    ties = tuple(Tie(name, users[0], tuple(users[1:]), False) for name, users in holders.items() if len(users) > 1)
    boundaries = tuple(Boundary(v, p, c, cuts.spec(v), 0) for v, p, c in cuts.boundaries(positions))
    return Plan(
        graph_digest=graph.digest,
        workload=WorkloadSpec("toy.py", arguments={}, hooks={}, inputs=(), seed=0),
        num_ranks=len(stages),
        stages=tuple(stages),
        boundaries=boundaries,
        ties=ties,
        schedule="1f1b",
        schedule_options={},
        batch_size=2 * len(stages),
        num_microbatches=len(stages),
        microbatch_size=2,
        predicted=Prediction(0.0, 0.0, 0.0, 0.0),
    )


def load(capture: Any, plan: Plan, folder: Path, model: torch.nn.Module) -> list[Any]:
    """Write the stage files, load them, and let them adopt the model."""
    generate(capture, plan, folder)
    constants = load_constants(folder)
    return [
        load_stage(folder, stage.index, graph_digest=plan.graph_digest, plan_digest=plan.digest).adopt(model, constants)
        for stage in plan.stages
    ]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, on which the rounding of sums depends."""
    if 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def forward(stages: Sequence[Any], plan: Plan, leaves: dict[str, torch.Tensor], where: Any) -> Any:
    """Return the results of the last stage, and the received and sent values of each stage."""
    carrying = {boundary.value for boundary in plan.boundaries if boundary.spec.requires_grad}
    sent: dict[str, torch.Tensor] = {}
    flights = []
    for stage in stages:
        received = {value: copied(sent[value].detach()) for value in stage.RECEIVES}
        arrived: dict[str, torch.Tensor] = {}
        for value, tensor in received.items():
            if value in carrying:
                # with its own strides; ``grad`` would have the strides of the value, and sums would round differently
                tensor.requires_grad_().register_hook(functools.partial(arrived.__setitem__, value))
        stage.seed(where)
        results = stage(*(leaves[name] for name in stage.INPUTS), *received.values())
        named = dict(zip((*stage.SENDS, *stage.RETURNS), results, strict=True))
        sent.update(named)
        flights.append((received, named, arrived))
    return tuple(sent[value] for value in stages[-1].RETURNS), flights


def backward(stages: Sequence[Any], flights: Sequence[Any]) -> None:
    """Run every stage's backward, last stage first, and leave the gradients in the parameters."""
    handed: dict[str, torch.Tensor] = {}
    for stage, (received, named, arrived) in reversed(list(zip(stages, flights, strict=True))):
        roots, gradients = [], []
        for value in (*stage.SENDS, *stage.RECEIVES):
            if value in handed:
                roots.append(named[value] if value in stage.SENDS else received[value])
                gradients.append(handed[value])
        for parameter in stage.parameters():
            if parameter.grad is not None:  # a later stage uses it, too: its gradient comes first
                roots.append(parameter)
                gradients.append(parameter.grad)
                parameter.grad = None
        if stage.RETURNS:
            roots.append(named[stage.RETURNS[0]])
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)
        handed.update(arrived)


def eager(workload: Any, model: torch.nn.Module, item: Any, where: Any) -> Any:
    """Run the user's model, forward and backward."""
    with Draws(*where), flat_checkpoints():
        loss, weight = workload.loss(model, item)
    loss.backward()
    return (loss,) if weight is None else (loss, weight)


def differences(
    workload: Any, capture: Any, plan: Plan, folder: Path, batch_size: int, where: Any, *, detailed: bool = False
) -> list[Any]:
    """Return the results, gradients and buffers of the stages that are not equal to the model's, bit for bit.

    ``detailed``: as (name, largest relative error), which is infinite if one side is missing.
    """
    plain, model = workload.build_model(), workload.build_model()
    item = workload.example_item(batch_size)
    stages = load(capture, plan, folder, model)
    expected = eager(workload, plain, item, where)
    leaves = {name: leaf.clone() for name, leaf in workload.leaves(workload.example_item(batch_size)).items()}
    output, flights = forward(stages, plan, leaves, where)
    backward(stages, flights)
    pairs = [(f"result {index}", a, b) for index, (a, b) in enumerate(zip(output, expected, strict=True))]
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        pairs.append((f"gradient of {name}", ours.grad, theirs.grad))
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        pairs.append((f"buffer {name}", ours, theirs))
    wrong = [(name, _error(ours, theirs)) for name, ours, theirs in pairs if not _equal(ours, theirs)]
    return wrong if detailed else [f"{name}: {error}" for name, error in wrong]


def in_stages(
    workload: Any, folder: Path, num_stages: int, *, batch_sizes: Sequence[int] = (4, 7)
) -> tuple[str, Graph]:
    """Assert that the stages of a model equal the model; return the text of the stage files and the graph.

    Fewer than ``num_stages`` stages, but at least two, if the model has fewer legal cuts.
    """
    captured = capture(workload)
    plan = plan_of(captured.graph, even_cuts(captured.graph, num_stages))
    assert len(plan.stages) > 1
    for batch_size in batch_sizes:
        assert differences(workload, captured, plan, folder, batch_size, (0, 0, 0)) == []
    return "".join(path.read_text() for path in sorted(folder.glob("stage_*.py"))), captured.graph


def _equal(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs) or bool(ours.isnan().all() and theirs.isnan().all())


def _error(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return float("inf")
    scale = theirs.double().abs().max().clamp(min=1e-12)
    return float((ours.double() - theirs.double()).abs().max() / scale)
