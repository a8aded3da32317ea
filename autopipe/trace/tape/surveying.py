"""A survey in a process of its own, whose task and result are JSON values."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from autopipe.draws import exclusive
from autopipe.ir import artifact, decoding
from autopipe.ir.graph import Graph, Input
from autopipe.ir.profile import WorkloadSpec
from autopipe.trace.state.isolation import limited
from autopipe.trace.tape.guard import built
from autopipe.trace.tape.survey import Change, Survey, survey
from autopipe.workload import Workload

_MOST_SECONDS = 60.0


def look(task: Any, link: object) -> Any:
    """Survey a model, in the process for that. ``task``: a workload's spec as JSON values. ``link``: not used."""
    nothing = os.open(os.devnull, os.O_WRONLY)  # the command itself shows what the model's Python prints
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    with limited(_MOST_SECONDS):
        workload = Workload.from_spec(decoding.decode(WorkloadSpec, task, "spec"))
        with exclusive(), torch.random.fork_rng(devices=()):
            model = built(workload)
        surveyed = survey(workload, model)
    return {
        "numbers": None if surveyed.numbers is None else [artifact.encode(entry) for entry in surveyed.numbers],
        "why": surveyed.why,
        "others": [artifact.encode(graph) for graph in surveyed.others],
        "first": None if surveyed.first is None else asdict(surveyed.first),
    }


def decoded(answer: Any) -> Survey:
    """Return the survey that ``look`` has returned."""
    numbers, first = answer["numbers"], answer["first"]
    return Survey(
        None if numbers is None else tuple(decoding.decode(Input, value, "input") for value in numbers),
        answer["why"],
        tuple(decoding.decode(Graph, value, "graph") for value in answer["others"]),
        None if first is None else Change(**first),
    )
