"""The causes of differences between a plan and plain training, each with its location and a remedy."""

from __future__ import annotations

from torch import nn

from autopipe.commands.steps import Prepared
from autopipe.errors import RunError, counted
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan
from autopipe.runtime.after_step import borrowed
from autopipe.runtime.after_step.probe import probe as probe_after_step
from autopipe.runtime.context import RunContext
from autopipe.verify.check import staleness
from autopipe.verify.comparison import Comparison
from autopipe.verify.optimizer_probe import Finding, probe
from autopipe.workload import Workload
from autopipe.workload.model.shared_memory import overlapping

_ONE_STAGE = "or train in one stage (--gpus 1)"
_MOST_BORROWED = 8  # parameters of other stages that one depends on: these are sent after every step


def seen_beforehand(prepared: Prepared) -> RunError | None:
    """Return the error for what no few steps show for certain; None where there is nothing of the kind.

    It is an optimizer that does not step each parameter by itself, parameters of several stages in one memory, and an
    ``after_step`` hook that looks beyond its stage.

    Raises: ModelFileError as the optimizer hook does.
    """
    if len(prepared.plan.stages) == 1:
        return None
    model = prepared.workload.build_model()
    overlap = _overlap(prepared, model)
    if overlap is not None:
        return overlap
    behind = refusal_of_after_step(prepared.workload, prepared.plan, prepared.graph, model)
    if behind is not None:
        return behind
    copies = {(tie.parameter, stage) for tie in prepared.plan.ties for stage in tie.copies}
    stages = [
        [name for name in stage.parameters if (name, stage.index) not in copies] for stage in prepared.plan.stages
    ]
    finding = probe(prepared.workload, stages, model)
    return None if finding is None else looks_beyond(finding, prepared)


def _overlap(prepared: Prepared, model: nn.Module) -> RunError | None:
    pair = overlapping(model)
    if pair is None:
        return None
    one, other = ({stage.index for stage in prepared.plan.stages if name in stage.parameters} for name in pair)
    if one == other and not staleness(RunContext.of(prepared.plan, prepared.graph)):
        return None
    return RunError(
        f"parameters {pair[0]} (stages {sorted(one)}) and {pair[1]} (stages {sorted(other)}) are two parameters over "
        "the same memory, so a step of one changes the other; stages, and weight versions, have no memory in common",
        where=prepared.workload.name,
        remedy=f"tie them by using one nn.Parameter in both places, which is found and kept equal; {_ONE_STAGE}",
    )


def refusal_of_after_step(
    workload: Workload, plan: Plan, graph: Graph, model: nn.Module | None = None
) -> RunError | None:
    """Return the error for a hook ``after_step`` that looks beyond its stage; None for any other."""
    if not graph.after_step or len(plan.stages) == 1:
        return None
    hook = workload.hooks["after_step"]
    far = {name: others for name, others in borrowed(plan, graph).items() if len(others) > _MOST_BORROWED}
    for name, others in far.items():
        return RunError(
            f"after_step looks beyond its stage: the new value of {name} depends on {len(others)} parameters of other "
            f"stages ({', '.join(others[:2])}, ...), as a norm over all parameters does",
            where=hook.place,
            remedy="let each parameter depend on itself and on the few that belong to it, such as a teacher's on its "
            f"student's, one by one; {_ONE_STAGE}",
        )
    finding = probe_after_step(workload, plan, graph, model or workload.build_model())
    if finding is None:
        return None
    count = counted(len(plan.stages[finding.stage].parameters), "parameter")
    if finding.failure:
        return RunError(
            f"after_step fails on the {count} of stage {finding.stage}, and not on those of the whole model: "
            f"{finding.failure}",
            where=hook.place,
            remedy="go through the pairs of name and parameter that are given, and take none for granted that is not "
            f"among them; {_ONE_STAGE}",
        )
    return RunError(
        f"after_step looks beyond its stage: given the {count} of stage {finding.stage}, it changes "
        f"{finding.parameter} otherwise than given those of the whole model (at step {finding.step} of its trial)",
        where=hook.place,
        remedy="take no number out of the tensors (item(), float()) that decides over another parameter, and go by "
        f"names, not by places or by how many parameters there are; {_ONE_STAGE}",
    )


def looks_beyond(finding: Finding, prepared: Prepared) -> RunError:
    """Return the error for a finding of the probe."""
    where = prepared.workload.stepping.optimizer_place
    seen = (
        f"with the same gradients it steps {finding.parameter} otherwise in {_label(prepared, finding.stage)} than "
        f"over "
        f"the whole model (by {finding.error:.1e} of its largest value, in step {finding.step} of the probe)"
    )
    if finding.draws:
        return RunError(
            f"the optimizer draws random numbers in its steps, and each stage would draw its own: {seen}",
            where=where,
            remedy=f"leave the draws out, or add the noise to the loss or in a layer; {_ONE_STAGE}",
        )
    return RunError(
        f"the optimizer looks beyond its stage: {seen}. Each stage has an optimizer for its own parameters, so a norm, "
        "a scale or a position taken over all of them is another one there",
        where=where,
        remedy="for a norm over all gradients give --clip-grad-norm X and leave it out of the optimizer; decide "
        f"learning rates and groups by a parameter's name, not by its place or by how many there are; {_ONE_STAGE}",
    )


def unequal(comparison: Comparison, prepared: Prepared) -> RunError:
    """Return the error for a comparison that is not equal: what differs first, in which stage, and why."""
    graph, plan = prepared.graph, prepared.plan
    worst = max(comparison.differences, key=lambda d: d.error)
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
            "the optimizer steps otherwise in stages: the gradients of the first step are those of plain training to "
            f"the last bit, and the weights after it are not ({worst.name} differs by {worst.error:.1e} in "
            f"{_label(prepared, worst.owner)})",
            where=prepared.workload.stepping.optimizer_place,
            remedy="let the optimizer step each parameter by its own gradient and state alone: no norm or count over "
            "all parameters (--clip-grad-norm X clips over all stages), no place in the list, no random numbers, no "
            f"parameters that it was not given; {_ONE_STAGE}",
        )
    name, stage, node_ = _first_wrong(comparison, graph, RunContext.of(plan, graph))
    label = plan.stages[stage].label
    where = f"{node_.place}, node {node_.name} of {label}" if node_ is not None else label
    if comparison.first_gradients:
        what = "the first step is plain training to the last bit, and a later one is not"
        cause = "something outside of parameters, buffers and the batch changes from step to step"
    elif comparison.losses[:1] != comparison.reference_losses[:1]:
        what = f"the loss of the first step is {comparison.losses[0]!r} in stages and "
        f"{comparison.reference_losses[0]!r} plainly"
        cause = "the forward takes another way, or reads what is neither parameter, buffer nor batch"
    else:
        what = "the loss of the first step is that of plain training, and its gradients are not"
        cause = "a backward of the model's own (an autograd.Function, a hook) reads more than what it saved"
    return RunError(
        f"one step in stages is not one step of plain training: {what}; nearest to the loss {name} is off, and most of "
        f"all {worst.name}, by {worst.error:.1e}, in {_label(prepared, worst.owner)}",
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

    Backward runs from the loss to the first stage: what is wrong began where the call is latest.
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
