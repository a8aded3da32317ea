"""What the Python of a model does otherwise from step to step, found in a process that trains nothing."""

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

COMPILED = "compiled stages (--compile) would be compiled again for each change"
_MOST_SECONDS = 60.0


def changing(workload: Workload) -> tuple[tuple[Input, ...] | None, str]:
    """Return the numbers that a model's Python changes, as inputs of its graph; None and the reason if it cannot."""
    if "split" in workload.hooks or workload.spec.team > 1:
        return None, "a team runs each stage" if workload.spec.team > 1 else "the split hook runs in the ranks"
    states = tuple((path, Path(path).stat().st_mtime_ns) for path in workload.files)
    return _changing(artifact.canonical(workload.spec), states)


@functools.lru_cache(maxsize=8)
def _changing(spec: str, _: Any) -> tuple[tuple[Input, ...] | None, str]:
    try:
        worker = Worker(survey, json.loads(spec), doing="looking for what changes from step to step")
        answer = result_of(worker, ignore_event)
    except AutopipeError as error:
        return None, error.what
    if answer["numbers"] is None:
        return None, answer["why"]
    return tuple(decoding.decode(Input, value, "input") for value in answer["numbers"]), ""


def survey(task: Any, link: Link) -> Any:
    """Look for it, in the process for that. ``task``: a workload's spec as JSON values."""
    workload = Workload.from_spec(decoding.decode(WorkloadSpec, task, "spec"))
    with isolated(_MOST_SECONDS):
        with exclusive(), torch.random.fork_rng(devices=()):
            model = built(workload)
        numbers, why = changing_numbers(workload, model)
    return {"numbers": None if numbers is None else [artifact.encode(entry) for entry in numbers], "why": why}


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
