"""What the Python of a model does otherwise from step to step, found in a process that trains nothing."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopipe.commands.settings import ignore_event
from autopipe.errors import AutopipeError, RunError
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.planning.cut_mapping import homes
from autopipe.trace.result import Capture
from autopipe.trace.state.observing.bytecode import with_inner
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.tape.survey import Survey
from autopipe.trace.tape.surveying import decoded, look
from autopipe.workers.worker import Worker, result_of
from autopipe.workload import Workload

COMPILED = "compiled stages (--compile) would be compiled again for each change"
_MOST_KNOWN = 8
_KNOWN: dict[Any, Survey] = {}
"""Specification and states of the files -> what was found."""


class Looking:
    """A process that looks for it, started early: a command captures the model meanwhile."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        states = tuple((path, Path(path).stat().st_mtime_ns) for path in workload.files)
        self._key, doing = (artifact.canonical(workload.spec), states), "looking for what changes from step to step"
        self._worker = None if self._key in _KNOWN else Worker(look, json.loads(self._key[0]), doing=doing)

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *error: object) -> None:
        if self._worker is not None and not self._worker.ended:
            self._worker.end()

    def survey(self) -> Survey:
        """Return what changes from step to step, or why such a model cannot be trained."""
        if self._worker is not None:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[self._key], self._worker = _survey_of(self._worker), None
        survey, why = _KNOWN[self._key], _why_not(self._workload)
        return survey if survey.first is None or not why else survey._replace(numbers=None, why=why)


def _why_not(workload: Workload) -> str:
    if workload.spec.team > 1:
        return "a team runs each stage"
    if "split" in workload.hooks:
        return "the split hook runs in the ranks"
    code = getattr(workload.functions().get("after_step"), "__code__", None)
    names = {name for each in with_inner(code) for name in each.co_names} if code is not None else {"requires_grad"}
    if "after_step" in workload.hooks and not names.isdisjoint(("requires_grad", "requires_grad_")):
        return "after_step reads or sets requires_grad, which forward and loss may set beside the ranks"
    return ""


def _survey_of(worker: Worker) -> Survey:
    try:
        return decoded(result_of(worker, ignore_event))
    except AutopipeError as error:
        return Survey(None, error.what)


def with_homes(captured: Capture, workload: Workload, stored: Graph | None) -> Capture:
    """Assign the state that only other calls of a model that varies read to the stages that will need it.

    ``stored``: of an earlier profile; if it is equal, its assignment holds.
    """
    graph, owned = captured.graph, dict(captured.graph.homes)
    is_known = not graph.varies or (stored is not None and stored.digest == graph.digest)
    with Looking(workload) if not is_known else contextlib.nullcontext() as looking:
        others = () if looking is None else looking.survey().others
    for other in others:
        owned.update({name: home for name, home in homes(graph, other).items() if name not in owned})
    return captured if owned == graph.homes else replace(captured, graph=replace(graph, homes=owned))


def refuse_varying(graph: Graph, what: str) -> None:
    """Refuse what a process without the model's Python cannot do. ``what``: the end of the sentence.

    Raises: RunError naming a number that changes, if one is known.
    """
    if graph.varies:
        where = next((entry.number.place for entry in graph.numbers if entry.number is not None), graph.name)
        raise RunError(
            f"the model's Python changes what forward and loss do from step to step, and {what}",
            where=where,
            remedy=KEEP,
        )
