"""Capture later forms of batches before training, and make a plan that supports them, or refuse training.

While ranks run, code is generated for a batch of another form, with the parameters that each stage has. A layer that
only such batches use may be in another stage than the one that needs it. So the first minibatches are read here, and
their forms captured. If a stage lacks state that they need, the plan is made again with that state in the right stage.
If that does not help, training is refused.

Refuse a forward that changes its batch in place, if the data yields the same memory in every epoch.

In plain training, the change remains in the user's data, and the next epoch reads the changed data. Stages work on
copies, and would train on other numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopipe.bits import same_bits
from autopipe.commands.artifact_steps import batch_size_of
from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Progress
from autopipe.commands.store import Work
from autopipe.errors import AutopipeError, PlanError, RunError
from autopipe.generate.parts import divide
from autopipe.ir import artifact
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.planning.cut_mapping import homes, map_cuts_to
from autopipe.runtime.batches.members import of_same_team
from autopipe.runtime.batches.unseen_forms import OTHER_LAYERS, OneBatch, other_batch, too_many
from autopipe.trace import capture
from autopipe.workload.batches.digests import digest_of
from autopipe.workload.batches.forms import form_of
from autopipe.workload.model.size_limits import build_within_memory

# how many minibatches are read: LEAST, and until there are MOST, or as many forms, or the seconds are over
LEAST_MINIBATCHES, MOST_MINIBATCHES, MOST_SECONDS = 3, 64, 1.0


@dataclass(frozen=True, slots=True)
class SeenForm:
    """A form of a microbatch."""

    minibatch: int  # the first of the training data that has it, from 0
    form: BatchForm


@dataclass(frozen=True, slots=True)
class FirstMinibatches:
    """What the first minibatches of the training data show."""

    forms: tuple[SeenForm, ...] = ()
    digest: str = ""  # of the first one


def first_minibatches(prepared: Prepared) -> FirstMinibatches:
    """Read the first minibatches of a prepared run. What fails here ends the reading: training reports it."""
    workload, count = prepared.workload, prepared.plan.num_microbatches
    deadline = time.monotonic() + MOST_SECONDS
    forms: dict[str, SeenForm] = {}
    digest = ""
    with contextlib.suppress(Exception):
        items = workload.items(batch_size_of(workload, prepared.plan))
        for index, item in enumerate(itertools.islice(items, MOST_MINIBATCHES)):
            digest = digest or digest_of(item).hex()
            for part in workload.split(item, count):
                form = form_of(part)
                forms.setdefault(artifact.canonical(form), SeenForm(index, form))
            enough = time.monotonic() > deadline or len(forms) >= MOST_MINIBATCHES
            if enough and index + 1 >= LEAST_MINIBATCHES:
                break
    return FirstMinibatches(tuple(forms.values()), digest)


@dataclass(frozen=True, slots=True)
class _Other:
    """A microbatch of another form."""

    minibatch: int
    text: str  # a description of the difference
    graph: Graph


def covered(
    prepared: Prepared,
    seen: Sequence[SeenForm],
    work: Work,
    again: Callable[[], Prepared],
    *,
    steps: int = 0,
    progress: Progress | None = None,
) -> Prepared:
    """Return the prepared run, or the one that ``again`` prepares if other forms need another plan.

    ``seen``: forms of the first minibatches. ``steps``: the number of minibatches to train, 0 for all.

    Raises: RunError for a batch that no plan supports, with the difference and a remedy.
    """
    if prepared.graph.varies:  # the process that runs the model's Python records other forms when they come
        return prepared
    own = prepared.graph.batch
    other = [entry for entry in seen if _differs(own, entry.form) and (not steps or entry.minibatch < steps)]
    kinds = dict.fromkeys(_kind(own, entry.form) for entry in other)
    if not kinds:
        return prepared
    parts = _parts(prepared, other)
    if len(kinds) > prepared.max_shapes:
        last = other[-1]
        refusal = too_many(own, parts[last.minibatch, _kind(own, last.form)], last.form, prepared.max_shapes)
        refusal.where = f"minibatch {last.minibatch} of data, before training"
        raise refusal
    others = [_captured(prepared, index, part, progress) for (index, _), part in parts.items()]
    if _first_misfit(prepared, others) is None:
        return prepared
    graph, known = prepared.profile.graph, dict[str, str]()
    for entry in reversed(others):
        known |= homes(graph, entry.graph)
    profile = dataclasses.replace(prepared.profile, graph=dataclasses.replace(graph, homes=known))
    if known and known != graph.homes:
        artifact.save(profile, work.store.profile)
        choose_plan(profile, prepared.record.request, work, prepared.plan.batch_size)
        first = others[0]
        why = f"planned again so that a stage has {min(known)} for {first.text} (minibatch {first.minibatch} of data)"
        prepared = again()
        prepared = dataclasses.replace(prepared, notes=(*prepared.notes, why))
    misfit = _first_misfit(prepared, others)
    if misfit is not None:
        entry, error = misfit
        raise RunError(
            f"{entry.text} does not fit these stages: {error.what}",
            where=f"minibatch {entry.minibatch} of data, before training",
            remedy=OTHER_LAYERS,
        )
    return prepared


def _differs(own: BatchForm, form: BatchForm) -> bool:
    """Return whether a batch has other entries or values. Another memory layout is ignored: it uses the same layers."""
    return bool(own.structure) and (own.structure != form.structure or bool(own.varying(form)))


def _kind(own: BatchForm, form: BatchForm) -> tuple[Any, ...]:
    """Return the key by which two such batches need separate code."""
    leaves = dict(zip(form.paths, form.leaves, strict=True))
    return form.structure, tuple((path, text) for path, text in leaves.items() if path not in own.unread)


def _parts(prepared: Prepared, seen: Sequence[SeenForm]) -> dict[tuple[int, tuple[Any, ...]], Any]:
    """Read the data again, and return a microbatch of each kind, by minibatch and kind."""
    own, workload = prepared.graph.batch, prepared.workload
    wanted = {_kind(own, entry.form) for entry in seen}
    parts: dict[tuple[int, tuple[Any, ...]], Any] = {}
    items = workload.items(batch_size_of(workload, prepared.plan))
    for index, item in enumerate(itertools.islice(items, max(entry.minibatch for entry in seen) + 1)):
        for part in workload.split(item, prepared.plan.num_microbatches):
            kind = _kind(own, form_of(part))
            if kind in wanted:
                wanted.discard(kind)
                parts[index, kind] = part
    return parts


def _captured(prepared: Prepared, minibatch: int, part: Any, progress: Progress | None) -> _Other:
    text = other_batch(prepared.graph.batch, part, form_of(part))
    if progress is not None:
        progress(f"capturing {text}", 0.0)
    try:
        batch = OneBatch(prepared.workload, part)
        captured = capture(
            batch,  # type: ignore[arg-type]  # a workload in all but its examples
            model=build_within_memory(prepared.workload),
            allow_data_dependent=prepared.allow_data_dependent,
        )
        captured = described_on(prepared.profile.device.kind, captured, batch)
        captured = of_same_team(captured, prepared.plan, prepared.stages, batch)
    except AutopipeError as error:
        raise RunError(
            f"{text} cannot be captured: {error.what}",
            where=error.where or f"minibatch {minibatch} of data, before training",
            remedy=error.remedy or "pad the batches to one shape, with the entries of the first one",
        ) from error
    return _Other(minibatch, text, captured.graph)


def _first_misfit(prepared: Prepared, others: Sequence[_Other]) -> tuple[_Other, PlanError] | None:
    """Return the first form whose graph does not fit the stages, with the reason."""
    for entry in others:
        try:
            _refuse_lacking_modules(
                prepared.graph, prepared.plan, entry.graph, map_cuts_to(prepared.plan, prepared.graph, entry.graph)
            )
        except PlanError as error:
            return entry, error
    return None


def _refuse_lacking_modules(graph: Graph, plan: Plan, other: Graph, moved: Plan) -> None:
    """Refuse a graph in which a stage calls a module with state that the stage does not have.

    Raises: PlanError naming the stage and the module.
    """
    for ours, theirs in zip(divide(graph, plan), divide(other, moved), strict=True):
        whole = (*ours.modules, *ours.spare)
        inside = tuple(f"{path}." for path in whole)
        for path in theirs.modules:
            state = any(name.startswith(f"{path}.") for name in (*graph.parameters, *graph.buffers, *graph.aliases))
            if state and path not in whole and not path.startswith(inside):
                raise PlanError(f"stage {ours.index} would need {path}, which it does not have")


def _changed_inputs(graph: Graph) -> dict[str, Node]:
    """Return the tensors of the batch that the forward changes in place, each with the first call that changes it.

    Capture inserts a clone of such a tensor first. It is recognized by having no line of the user's code.
    """
    inputs = {entry.name for entry in graph.inputs}
    clones = {
        node.name: node.inputs[0]
        for node in graph.nodes
        if node.target == "clone" and not node.source and node.inputs[:1] and node.inputs[0] in inputs
    }
    changed: dict[str, Node] = {}
    for node in graph.nodes:
        for value in node.mutates:
            name = clones.get(value, value)
            if name in inputs:
                changed.setdefault(name, node)
    return changed


def refuse_changed_data(prepared: Prepared) -> None:
    """Change the first minibatch as the forward would, read it again, and refuse data that kept the change.

    Raises: RunError naming the tensor and the line of the forward.
    """
    workload = prepared.workload
    changed = _changed_inputs(prepared.graph)
    if not changed or not workload.has_data:
        return
    size = batch_size_of(workload, prepared.plan)

    def read() -> dict[str, Tensor]:
        return workload.leaves(next(workload.items(size)))

    first = read()
    for name, node in changed.items():
        if name in first and _stays(name, first[name], read):
            raise RunError(
                f"the forward changes {name} in place, and data yields the same memory in every epoch: plain training "
                "would read the changed numbers again, but stages work on copies",
                where=node.place,
                remedy=f"work on a copy ({name} = {name}.clone()) before that line, or clone the batch in data",
            )


def _stays(name: str, leaf: Tensor, read: Callable[[], Mapping[str, Tensor]]) -> bool:
    """Return whether a change of a batch's tensor appears in the batch that is read again. The change is undone."""
    before = leaf.detach().clone()
    other = ~before if before.dtype == torch.bool else before + 1
    with torch.no_grad():
        try:
            leaf.copy_(other)
            again = read().get(name)
            return again is not None and same_bits(again, other)
        finally:
            leaf.copy_(before)
