"""Capture a batch of a new shape or form, and write its stage code.

Imported by a rank only when it meets such a batch: importing the capture takes as long as importing torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from autopipe.draws import exclusive
from autopipe.generate import generate
from autopipe.ir import artifact
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.planning import map_cuts_to
from autopipe.runtime.batches.members import of_same_team
from autopipe.runtime.context import RunContext
from autopipe.trace import Capture, capture, with_own_constants
from autopipe.workload import Workload


def write_recording(captured: Capture, plan: Plan, graph: Graph, folder: Path) -> None:
    """Cut a capture at the places where ``plan`` cuts ``graph``, and write its stage files, graph and plan.

    Raises: PlanError if the capture has no legal cut at one of these places.
    """
    captured = with_own_constants(captured, folder.name)
    cut = map_cuts_to(plan, graph, captured.graph)
    generate(captured, cut, folder)
    artifact.save(captured.graph, folder / "graph.json")
    artifact.save(cut, folder / "plan.json")


def write_new_recording(
    workload: Workload,
    form: BatchForm,
    context: RunContext,
    folder: Path,
    *,
    device_kind: str,
    allow_data_dependent: bool,
    training: bool,
) -> str:
    """Capture the batch of a workload, which has this form, and write its recording. Return the capture's method.

    ``device_kind``: of the device that the ranks compute on.

    Raises: AutopipeError if the batch cannot be captured, or not cut like the plan.
    """
    with exclusive(), torch.enable_grad():
        captured = capture(workload, allow_data_dependent=allow_data_dependent, training=training)
        captured = described_on(device_kind, captured, workload)
    with torch.enable_grad():  # the members are threads that draw, so this one must not hold the generator
        captured = of_same_team(captured, context.plan, folder.parent, workload)
        # the strides of a batch of few samples may differ from those of more samples
        followed = captured.graph.batch
        form = replace(form, reads=followed.reads, unread=followed.unread)
        captured = replace(captured, graph=replace(captured.graph, batch=form))
        write_recording(captured, context.plan, context.graph, folder)
    return captured.method
