"""Stage code for evaluation, for models whose graph differs in evaluation mode.

If only arguments differ (dropout's probability), the stage files hold both. If the calls differ (drop-path, layerdrop),
the model is captured a second time, in evaluation mode, and cut like the plan; see ``runtime.batches.graph_variants``.
"""

from __future__ import annotations

import shutil

from autopipe.commands.models import Model, device_kind
from autopipe.commands.settings import ProfileSettings
from autopipe.commands.store import Work
from autopipe.errors import AutopipeError, RunError
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.runtime.batches.graph_variants import EVALUATION
from autopipe.runtime.batches.members import of_same_team
from autopipe.runtime.batches.new_recording import write_recording
from autopipe.trace import capture
from autopipe.workload import Workload


def record(model: Model, plan: Plan, settings: ProfileSettings, work: Work) -> str:
    """Write separate stage code for evaluation if it is needed. Return the reason if it cannot be made, else ""."""
    note, folder = model.evaluation_note, work.store.stages / EVALUATION
    shutil.rmtree(folder, ignore_errors=True)
    if not note or model.graph.varies:
        return note
    kind = device_kind(settings, work)
    try:
        captured = capture(
            model.workload,
            model=model.built,
            allow_data_dependent=settings.allow_data_dependent,
            verify=settings.verify and kind == "cpu",  # the comparison of the first steps includes an evaluation
            lengths=len(model.graph.symbols) > 1,
            training=False,
        )
        captured = of_same_team(described_on(kind, captured, model.workload), plan, work.store.stages, model.workload)
        write_recording(captured, plan, model.graph, folder)
    except AutopipeError as why:
        shutil.rmtree(folder, ignore_errors=True)
        return f"{note}; captured in evaluation mode: {why.what}"
    lack = "" if kind == "cpu" else ", which only the comparison of the first steps compares, if it evaluates"
    work.notes.append(f"{note}: separate stage code for evaluation in {folder}{lack}")
    return ""


def note_of(model: Model, work: Work) -> str:
    """Return the reason why the stored stages cannot evaluate, or ""."""
    written = (work.store.stages / EVALUATION / "plan.json").is_file()
    return "" if written else model.evaluation_note


def refuse_impossible(workload: Workload, note: str, batch_size: int | None, remedy: str) -> None:
    """Refuse an impossible evaluation before ranks start. ``note``: the reason why the stages cannot evaluate, or "".

    Raises: RunError with that reason; ModelFileError if evaluation data is missing, or not in batches of this size.
    """
    if note:
        raise RunError(f"this model cannot be evaluated in stages: {note}", remedy=remedy)
    workload.evaluation_items(batch_size)
