"""The Python numbers of a model that change from step to step, found in a process that trains nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.settings import ignore_event
from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, RunError
from autopipe.ir import artifact, decoding
from autopipe.ir.graph import Graph, Input
from autopipe.ir.profile import WorkloadSpec
from autopipe.runtime.batches.guard import built
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.state.trying.isolation import isolated
from autopipe.trace.tape.survey import changing_numbers
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, result_of
from autopipe.workload import Workload

COMPILED = "compiled stages (--compile) would be compiled again for each of them"
_MOST_SECONDS = 60.0


def changing(workload: Workload) -> tuple[tuple[Input, ...], str]:
    """Return the numbers that a model's Python changes, as inputs of its graph; else () and the reason."""
    in_ranks = any(hook in workload.hooks for hook in ("after_step", "split"))
    if in_ranks or workload.spec.team > 1:
        return (), "after_step or split may change them, too" if in_ranks else "a team runs each stage"
    states = tuple((path, Path(path).stat().st_mtime_ns) for path in workload.files)
    return _changing(artifact.canonical(workload.spec), states)


@functools.lru_cache(maxsize=8)
def _changing(spec: str, _: Any) -> tuple[tuple[Input, ...], str]:
    try:
        worker = Worker(survey, json.loads(spec), doing="looking for numbers that change")
        answer = result_of(worker, ignore_event)
    except AutopipeError as error:
        return (), error.what
    return tuple(decoding.decode(Input, value, "input") for value in answer["numbers"]), answer["why"]


def survey(task: Any, link: Link) -> Any:
    """Find the numbers, in the process for them. ``task``: a workload's spec as JSON values."""
    workload = Workload.from_spec(decoding.decode(WorkloadSpec, task, "spec"))
    with isolated(_MOST_SECONDS):
        with exclusive(), torch.random.fork_rng(devices=()):
            model = built(workload)
        numbers, why = changing_numbers(workload, model)
    return {"numbers": [artifact.encode(entry) for entry in numbers], "why": why}


def refuse_numbers(graph: Graph, what: str) -> None:
    """Refuse what a process without the model's Python cannot do. ``what``: the end of the sentence.

    Raises: RunError naming a number that changes.
    """
    number = next((entry.number for entry in graph.numbers), None)
    if number is not None:
        raise RunError(
            f"numbers of the model's Python change from step to step, and {what}",
            where=number.place,
            remedy=KEEP,
        )
