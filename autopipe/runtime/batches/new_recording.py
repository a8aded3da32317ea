"""Capture a batch of a new shape or form, and write its stage code, or that of what a model that varies did.

Imported by a rank only when it meets such a batch: importing the capture takes as long as importing torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopipe.draws import exclusive
from autopipe.errors import RunError
from autopipe.generate import generate
from autopipe.ir import artifact
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.planning import map_cuts_to
from autopipe.runtime.batches.members import of_same_team
from autopipe.runtime.batches.unseen_forms import OneBatch
from autopipe.runtime.context import RunContext
from autopipe.trace import Capture, capture, with_own_constants
from autopipe.trace.loss.divisor import has_known_divisor
from autopipe.trace.numbers import WithNumbers
from autopipe.trace.result import with_divisor
from autopipe.trace.sizes.lengths import varying_lengths
from autopipe.workload import Workload
from autopipe.workload.batches.forms import form_of


def write_recording(captured: Capture, plan: Plan, graph: Graph, folder: Path) -> None:
    """Cut a capture at the places where ``plan`` cuts ``graph``, and write its stage files, graph and plan.

    Raises: PlanError if the capture has no legal cut at one of these places.
    """
    captured = with_own_constants(captured, folder.name)
    cut = map_cuts_to(plan, graph, captured.graph)
    generate(captured, cut, folder)
    artifact.save(captured.graph, folder / "graph.json")
    artifact.save(cut, folder / "plan.json")


def write_recorded(
    captured: Capture, workload: Workload, part: Any, context: RunContext, folder: Path, kind: str
) -> None:
    """Write the recording of what a model that varies did for a part of a minibatch. ``kind``: of the ranks' devices.

    Raises: AutopipeError if it cannot be cut like the plan, or if microbatches would count otherwise than before.
    """
    own, graph = context.graph, captured.graph
    if any(node.checkpoint for node in graph.nodes):
        raise RunError("torch.utils.checkpoint runs Python twice")
    batch: Any = WithNumbers(OneBatch(workload, part), graph.numbers)  # type: ignore[arg-type]  # as of a workload
    captured = with_divisor(captured, batch.leaves(part))
    if captured.graph.divisor != own.divisor or len(graph.outputs) != len(own.outputs):
        raise RunError(f"its loss divides by {captured.graph.divisor or 'another number'}, and the first one does not")
    if not (own.divisor or context.plan.num_microbatches == 1 or has_known_divisor(graph, captured.module)):
        raise RunError("it is not known by what its loss divides", remedy="return (loss, weight) from the loss")
    refuse_other_state(captured, own)
    form = replace(graph.batch, unread=own.batch.unread)
    captured = replace(captured, graph=replace(captured.graph, batch=form))
    with exclusive():
        write_recording(described_on(kind, captured, batch), context.plan, own, folder)


def refuse_other_state(captured: Capture, own: Graph) -> None:
    """Refuse a recording that trains other parameters than stages can."""
    trained = sorted(captured.graph.trained - own.trained)
    if trained or (captured.graph.trained != own.trained and captured.graph.cast_once):
        names = ", ".join(trained or sorted(own.trained - captured.graph.trained))
        raise RunError(f"it sets requires_grad of {names}", remedy="freeze parameters where the model is built")


def differing(
    workload: Workload, part: Any, form: BatchForm, examples: Sequence[Any]
) -> tuple[list[Any], frozenset[tuple[str, int]]]:
    """Return the ``examples`` of the form of a part, and the inputs and dimensions in which their sizes differ."""
    forms = [form_of(example) for example in examples]
    others = [
        example
        for example, its in zip(examples, forms, strict=True)
        if (its.structure, its.leaves) == (form.structure, form.leaves)
    ]
    samples = {} if workload.is_fixed(part) else workload.batch_dims(part)
    lengths = varying_lengths(workload.leaves(part), [workload.leaves(other) for other in others], samples)
    return others, frozenset(place for length in lengths for place in length.places)


def write_new_recording(
    workload: Workload,
    form: BatchForm,
    context: RunContext,
    folder: Path,
    *,
    device_kind: str,
    allow_data_dependent: bool,
    training: bool,
    others: Sequence[Any] = (),
) -> Capture:
    """Capture the batch of a workload, which has this form, write its recording, and return the capture.

    ``device_kind``: of the device that the ranks compute on. ``others``: batches of this form with other shapes; the
    sizes that differ may vary if the model supports it.

    Raises: AutopipeError if the batch cannot be captured, or not cut like the plan.
    """
    with exclusive(), torch.enable_grad():
        record = functools.partial(capture, workload, allow_data_dependent=allow_data_dependent, training=training)
        captured = record(others=others)
        if context.graph.samples is None and captured.graph.divisor != context.graph.divisor:
            # no input counts the samples, and a count that is a constant of the plan's graph is a size here: parts of
            # one minibatch would count by two units
            if context.graph.divisor:
                captured = record(others=())
            else:
                captured = replace(captured, divisor=None, graph=replace(captured.graph, divisor=""))
        captured = described_on(device_kind, captured, workload)
    with torch.enable_grad():  # the members are threads that draw, so this one must not hold the generator
        captured = of_same_team(captured, context.plan, folder.parent, workload)
        # the strides of a batch of few samples may differ from those of more samples
        followed = captured.graph.batch
        form = replace(form, reads=followed.reads, unread=followed.unread)
        captured = replace(captured, graph=replace(captured.graph, batch=form))
        write_recording(captured, context.plan, context.graph, folder)
    return captured
