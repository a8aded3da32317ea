"""What the Python of a model does otherwise from step to step, found in a process that trains nothing."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.settings import ignore_event
from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, RunError
from autopipe.ir import artifact, decoding
from autopipe.ir.graph import Graph, Input
from autopipe.ir.profile import WorkloadSpec
from autopipe.planning.cut_mapping import homes
from autopipe.trace.result import Capture
from autopipe.trace.state.observing.bytecode import with_inner
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.state.trying.isolation import isolated
from autopipe.trace.tape.guard import built
from autopipe.trace.tape.survey import Survey, survey
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, result_of
from autopipe.workload import Workload

COMPILED = "compiled stages (--compile) would be compiled again for each change"
_MOST_SECONDS = 60.0


def changing(workload: Workload) -> Survey:
    """Return what a model's Python does otherwise from step to step, or why its model cannot be trained so."""
    if "split" in workload.hooks or workload.spec.team > 1:
        return Survey(None, "a team runs each stage" if workload.spec.team > 1 else "the split hook runs in the ranks")
    if "after_step" in workload.hooks and _reads_requires_grad(workload.functions()["after_step"]):
        return Survey(None, "after_step reads or sets requires_grad, which forward and loss may set beside the ranks")
    states = tuple((path, Path(path).stat().st_mtime_ns) for path in workload.files)
    return _changing(artifact.canonical(workload.spec), states)


def _reads_requires_grad(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    names = {name for each in with_inner(code) for name in each.co_names} if code is not None else {"requires_grad"}
    return not names.isdisjoint(("requires_grad", "requires_grad_"))


@functools.lru_cache(maxsize=8)
def _changing(spec: str, _: Any) -> Survey:
    try:
        worker = Worker(look, json.loads(spec), doing="looking for what changes from step to step")
        answer = result_of(worker, ignore_event)
    except AutopipeError as error:
        return Survey(None, error.what)
    if answer["numbers"] is None:
        return Survey(None, answer["why"])
    numbers = tuple(decoding.decode(Input, value, "input") for value in answer["numbers"])
    return Survey(numbers, "", tuple(decoding.decode(Graph, value, "graph") for value in answer["others"]))


def look(task: Any, link: Link) -> Any:
    """Look for it, in the process for that. ``task``: a workload's spec as JSON values."""
    workload = Workload.from_spec(decoding.decode(WorkloadSpec, task, "spec"))
    with isolated(_MOST_SECONDS):
        with exclusive(), torch.random.fork_rng(devices=()):
            model = built(workload)
        surveyed = survey(workload, model)
    return {
        "numbers": None if surveyed.numbers is None else [artifact.encode(entry) for entry in surveyed.numbers],
        "why": surveyed.why,
        "others": [artifact.encode(graph) for graph in surveyed.others],
    }


def with_homes(captured: Capture, workload: Workload, stored: Graph | None) -> Capture:
    """Assign the state that only other calls of a model that varies read to the stages that will need it.

    ``stored``: of an earlier profile; if it is equal, its assignment holds.
    """
    graph, owned = captured.graph, dict(captured.graph.homes)
    is_known = not graph.varies or (stored is not None and stored.digest == graph.digest)
    for other in () if is_known else changing(workload).others:
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
