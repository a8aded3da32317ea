"""The causes of differences between a plan and plain training, each with its location and a remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from autopipe.commands.prepared import Prepared
from autopipe.errors import RunError, counted
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan
from autopipe.runtime.after_step import borrowed
from autopipe.runtime.after_step.probe import probe as probe_after_step
from autopipe.runtime.context import RunContext
from autopipe.runtime.step.sharding import shards
from autopipe.verify.check import staleness
from autopipe.verify.comparison import Comparison
from autopipe.verify.optimizer_probe import Finding, probe, probe_members
from autopipe.workload import Workload
from autopipe.workload.model.size_limits import build_within_memory

# What the members of a team cannot run: their tensors are parts, and a step or a hook may look at a complete one.

_ALONE = "or train without --tensor-parallel"


def refusal_of_team(workload: Workload, plan: Plan, graph: Graph, model: nn.Module | None = None) -> RunError | None:
    """Return the error for an optimizer, a hook or parameters that teams would change, or None.

    ``model``: the model, built if None. An optimizer is tried on synthetic gradients (``verify.optimizer_probe``).
    """
    if plan.team == 1:
        return None
    model = build_within_memory(workload) if model is None else model
    dimensions = _cut(graph, model)
    pair = _overlapping(model)
    if pair is not None and not dimensions.keys().isdisjoint(pair):
        return RunError(
            f"parameters {pair[0]} and {pair[1]} share memory, and the members of a team cut them apart",
            where=workload.name,
            remedy=f"use one nn.Parameter in both places, which autopipe treats as tied; {_ALONE}",
        )
    changed = [name for name in graph.after_step if name in dimensions]
    if changed:
        return RunError(
            f"after_step changes {changed[0]}, of which every member of a team has a part: the hook would see a tensor "
            "of another shape",
            where=workload.hooks["after_step"].place,
            remedy=f"let the hook change only parameters that are not cut; {_ALONE}",
        )
    finding = probe_members(workload, dimensions, plan.team, model)
    return None if finding is None else _looks_beyond(finding, workload, plan)


def _cut(graph: Graph, model: nn.Module) -> dict[str, int]:
    """Return the dimension along which each parameter is cut: the one whose size is another one in the model."""
    dimensions = {}
    for name, parameter in model.named_parameters():
        local = graph.parameters[name].shape if name in graph.parameters else tuple(parameter.shape)
        for dimension, (own, whole) in enumerate(zip(local, parameter.shape, strict=True)):
            if own != whole:
                dimensions[name] = dimension
    return dimensions


def _looks_beyond(finding: Finding, workload: Workload, plan: Plan) -> RunError:
    return RunError(
        f"the optimizer does not step each element on its own: with the same gradients, its step of a part of "
        f"{finding.parameter} differs from that of the whole (by {finding.error:.1e} of its largest value, in step "
        f"{finding.step} of the probe). Every member of a team of {plan.team} has a part",
        where=workload.stepping.optimizer_place,
        remedy="use an optimizer without norms or factors of a whole tensor, such as SGD, Adam or AdamW (Adafactor, "
        f"LAMB, Muon and Shampoo have them); {_ALONE}",
    )


# Whether two builds of a model have equal attributes: a class may count its objects.

_NUMBERS = (bool, int, float, complex, tuple)  # a name or an identifier is rarely the cause


def differing_attribute(workload: Workload) -> str:
    """Build the model twice, and return the first attribute that differs with its two values, or ""."""
    one, other = workload.build_model(), workload.build_model()
    parts = dict(other.named_modules())
    for path, part in one.named_modules():
        for name, value in vars(part).items():
            second: Any = vars(parts[path]).get(name) if path in parts else None
            if isinstance(value, _NUMBERS) and type(value) is type(second) and repr(value) != repr(second):
                return f"{path}.{name} is {value!r} in one build and {second!r} in the next".lstrip(".")
    return ""


__all__ = ["differing_attribute"]


_ONE_STAGE = "or train in one stage (--gpus 1)"
_COMPLETE = "or let every replica step all parameters of its stage (--shard-optimizer never)"
_MOST_BORROWED = 8  # parameters of other stages that one parameter may depend on; they are sent after every step


def hidden_cause(prepared: Prepared) -> RunError | None:
    """Return the error for a cause of differences that a few steps may not show; None if there is no such cause.

    Such causes are an optimizer whose result for one parameter depends on others, parameters of several stages that
    share memory, and an ``after_step`` hook whose result depends on parameters of other stages.

    Raises: ModelFileError if the optimizer hook fails.
    """
    plan, workload = prepared.plan, prepared.workload
    if len(plan.stages) == 1 and not plan.shard_optimizer and plan.team == 1:
        return None
    model = build_within_memory(workload) if prepared.placeholders is None else prepared.placeholders
    refused = refusal_of_team(workload, plan, prepared.graph, model)
    if refused is not None or (len(plan.stages) == 1 and not plan.shard_optimizer):
        return refused
    overlap = _overlap(prepared, model)
    if overlap is not None:
        return overlap
    error = refusal_of_after_step(workload, plan, prepared.graph, model)
    if error is not None:
        return error
    copies = {(tie.parameter, stage) for tie in plan.ties for stage in tie.copies}
    stages = [[name for name in stage.parameters if (name, stage.index) not in copies] for stage in plan.stages]
    finding = probe(workload, stages, model)
    if finding is not None:
        return looks_beyond(finding, prepared)
    if not plan.shard_optimizer:
        return None
    parameters = dict(model.named_parameters())
    parts = [
        (stage.index, part)
        for stage, names in zip(plan.stages, stages, strict=True)
        for part in shards({name: parameters[name] for name in names if name in parameters}, plan.sharing(stage))
    ]
    finding = probe(workload, [part for _, part in parts], model)
    if finding is None:
        return None
    return looks_beyond(dataclasses.replace(finding, stage=parts[finding.stage][0]), prepared, shard=True)


def _overlap(prepared: Prepared, model: nn.Module) -> RunError | None:
    pair = _overlapping(model)
    if pair is None:
        return None
    plan = prepared.plan
    one, other = ({stage.index for stage in plan.stages if name in stage.parameters} for name in pair)
    apart = one != other or staleness(RunContext.of(plan, prepared.graph))
    if not apart and not any(plan.sharing(plan.stages[index]) > 1 for index in one):
        return None
    return RunError(
        f"parameters {pair[0]} (stages {sorted(one)}) and {pair[1]} (stages {sorted(other)}) share memory, so a step "
        "of one changes the other; stages, weight versions and replicas that divide the optimizer state do not share "
        "memory",
        where=prepared.workload.name,
        remedy="use one nn.Parameter in both places, which autopipe treats as tied; "
        f"{_ONE_STAGE if apart else _COMPLETE}",
    )


def refusal_of_hooks(workload: Workload, plan: Plan, graph: Graph) -> RunError | None:
    """Return the error for hooks that a plan cannot run, whether it is compared with plain training or not."""
    return refusal_of_team(workload, plan, graph) or refusal_of_after_step(workload, plan, graph)


def refusal_of_after_step(
    workload: Workload, plan: Plan, graph: Graph, model: nn.Module | None = None
) -> RunError | None:
    """Return the error for an ``after_step`` hook that depends on too many parameters of other stages; else None."""
    if not graph.after_step or len(plan.stages) == 1:
        return None
    hook = workload.hooks["after_step"]
    far = {name: others for name, others in borrowed(plan, graph).items() if len(others) > _MOST_BORROWED}
    for name, others in far.items():
        return RunError(
            f"after_step: the new value of {name} depends on {len(others)} parameters of other stages "
            f"({', '.join(others[:2])}, ...); at most {_MOST_BORROWED} are supported",
            where=hook.place,
            remedy="let the new value of a parameter depend on few others, such as a teacher's on its student's, and "
            f"not on a norm over all parameters; {_ONE_STAGE}",
        )
    finding = probe_after_step(workload, plan, graph, model or build_within_memory(workload))
    if finding is None:
        return None
    count = counted(len(plan.stages[finding.stage].parameters), "parameter")
    if finding.failure:
        return RunError(
            f"after_step fails when called with the {count} of stage {finding.stage}, but not with those of the whole "
            f"model: {finding.failure}",
            where=hook.place,
            remedy="iterate over the (name, parameter) pairs that are passed, and do not assume that a certain "
            f"parameter is among them; {_ONE_STAGE}",
        )
    return RunError(
        f"after_step depends on parameters of other stages: called with the {count} of stage {finding.stage}, it "
        f"changes {finding.parameter} differently than when called with those of the whole model (at step "
        f"{finding.step} of its trial)",
        where=hook.place,
        remedy="do not use numbers from one parameter (item(), float()) to change another, and identify parameters by "
        f"name, not by position or count; {_ONE_STAGE}",
    )


def looks_beyond(finding: Finding, prepared: Prepared, *, shard: bool = False) -> RunError:
    """Return the error for a finding of the optimizer's probe.

    ``shard``: optimizers over complete stages are right, and those over the parts of their replicas are not.
    """
    where = prepared.workload.stepping.optimizer_place
    whole = "all parameters of the stage" if shard else "the whole model"
    label = _label(prepared, finding.stage)
    what = f"its state {finding.state} over" if finding.state else f"its step of {finding.parameter} in"
    difference = (
        f"with the same gradients, {what} {label} differs from that over {whole} (by {finding.error:.1e} of its "
        f"largest value, in step {finding.step} of the probe)"
    )
    others, each = ("other replicas", "replica") if shard else ("other stages", "stage")
    instead = _COMPLETE if shard else _ONE_STAGE
    if finding.draws:
        return RunError(
            f"the optimizer draws random numbers, which would differ in each {each}: {difference}",
            where=where,
            remedy=f"remove the draws, or add the noise to the loss or in a layer; {instead}",
        )
    return RunError(
        f"the optimizer depends on parameters of {others}: {difference}. Each {each} has an optimizer for its own "
        "parameters, so a norm, a scale or a position among all parameters is different there",
        where=where,
        remedy="clip the norm over all gradients with --clip-grad-norm X instead of in the optimizer; choose learning "
        f"rates and groups by a parameter's name, not by its position or the number of parameters; {instead}",
    )


def unequal(comparison: Comparison, prepared: Prepared) -> RunError:
    """Return the error for a comparison that is not equal: the first difference, its stage and the likely cause."""
    graph, plan = prepared.graph, prepared.plan
    worst = max(comparison.differences, key=lambda d: d.error)
    if comparison.different_evaluation and all(d.bitwise for d in comparison.differences):
        return RunError(
            f"the evaluation of a minibatch is {comparison.evaluation[0]!r} in stages, and "
            f"{comparison.evaluation[1]!r} by the model in evaluation mode, with the same weights and buffers",
            where=prepared.workload.spec.target,
            remedy="let what the model does in evaluation mode depend on module.training alone; or evaluate elsewhere: "
            "autopipe export",
        )
    written = _changes_input(graph)
    if written is not None and not comparison.first_gradients:
        node, name = written
        return RunError(
            f"the forward changes its input {name} in place, and another stage reads it unchanged: "
            f"{_by(comparison, prepared)}",
            where=node.place,
            remedy=f"work on a copy ({name} = {name}.clone()) before that line",
        )
    if comparison.first_gradients and not comparison.first_weights:
        return RunError(
            "the optimizer's step in stages differs from plain training: the gradients of the first step are equal bit "
            f"for bit, but the weights after it are not ({worst.name} differs by {worst.error:.1e} in "
            f"{_label(prepared, worst.owner)})",
            where=prepared.workload.stepping.optimizer_place,
            remedy="let the optimizer step each parameter from its own gradient and state: without a norm or count "
            "over all parameters (--clip-grad-norm X clips over all stages), a position in the list, random numbers, "
            f"or parameters that were not passed to it; {_COMPLETE if plan.shard_optimizer else _ONE_STAGE}",
        )
    if comparison.unequal_states and comparison.first_gradients and worst.name in comparison.unequal_states:
        return RunError(
            f"the state of the optimizer differs from plain training after {counted(len(comparison.losses), 'step')}, "
            f"for {counted(len(comparison.unequal_states), 'parameter')} such as {worst.name} "
            f"in {_label(prepared, worst.owner)}",
            where=prepared.workload.stepping.optimizer_place,
            remedy="let the optimizer keep for each parameter what its own gradients give, and in a group nothing that "
            f"depends on the other parameters; {_COMPLETE if plan.shard_optimizer else _ONE_STAGE}",
        )
    attribute = "" if comparison.first_gradients else differing_attribute(prepared.workload)
    if attribute:
        return RunError(
            f"two builds of the model differ: {attribute}; so stages and plain training do not have the same model",
            where=prepared.workload.spec.target,
            remedy="pass a position or a number to the constructor instead of counting objects in a class or a global "
            "variable, or start the count in the function that builds the model",
        )
    name, stage, node_ = _first_wrong(comparison, graph, RunContext.of(plan, graph))
    label = plan.stages[stage].label
    where = f"{node_.place}, node {node_.name} of {label}" if node_ is not None else label
    if comparison.first_gradients:
        what = "the first step is equal bit for bit, but a later one is not"
        cause = "something other than parameters, buffers and the batch changes from step to step"
    elif comparison.losses[:1] != comparison.reference_losses[:1]:
        what = (
            f"the loss of the first step is {comparison.losses[0]!r} in stages, and "
            f"{comparison.reference_losses[0]!r} in plain training"
        )
        cause = "the forward takes another branch, or reads a value that is not a parameter, buffer or batch"
    else:
        what = "the loss of the first step is equal, but its gradients are not"
        cause = "a custom backward (an autograd.Function, a hook) reads more than it saved"
    return RunError(
        f"training in stages differs from plain training: {what}; the parameter nearest to the loss that differs is "
        f"{name}, and the largest difference is {worst.error:.1e}, of {worst.name} in {_label(prepared, worst.owner)}",
        where=where,
        remedy=f"look at that line: {cause}. autopipe check lists every parameter; {_ONE_STAGE}",
    )


def _label(prepared: Prepared, stage: int) -> str:
    stages = prepared.plan.stages
    return stages[stage].label if 0 <= stage < len(stages) else "no stage"


def _by(comparison: Comparison, prepared: Prepared) -> str:
    worst = max(comparison.differences, key=lambda d: d.error)
    return f"{worst.name} differs by {worst.error:.1e} in {_label(prepared, worst.owner)}"


def _changes_input(graph: Graph) -> tuple[Node, str] | None:
    names = {entry.name for entry in graph.inputs}
    for node in graph.nodes:
        for value in node.mutates:
            if value in names:
                return node, value
    return None


def _first_wrong(comparison: Comparison, graph: Graph, context: RunContext) -> tuple[str, int, Node | None]:
    """Return the parameter nearest to the loss whose gradient is unequal, its stage, and the call that reads it.

    The backward runs from the loss to the first stage, so the difference begins at the latest call.
    """
    readers = {name: index for index, node in enumerate(graph.nodes) for name in node.parameters}
    names = comparison.unequal_gradients or tuple(d.name for d in comparison.differences if not d.bitwise)
    if not names:
        return "the loss", len(context.plan.stages) - 1, None
    name = max(names, key=lambda n: readers.get(n, -1))
    index = readers.get(name, -1)
    stages = context.plan.stages
    stage = next((s.index for s in stages if s.start <= index < s.stop), stages[0].index)
    return name, stage, graph.nodes[index] if index >= 0 else None


def _overlapping(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters whose elements share memory, such as a view of another; None if none do.

    One parameter under two names is a tie and does not count.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        start = int(parameter.storage_offset()) * parameter.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        end = start + int(extent) * parameter.element_size()
        others = spans.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_start, other_end, other in others:
            if start < other_end and other_start < end:
                return other, name
        others.append((start, end, name))
    return None
