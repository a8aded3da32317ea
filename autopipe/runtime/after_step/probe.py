"""Check, without training, that ``after_step`` does the same in stages as over the complete model.

The hook runs over the parameters of each stage, with those that it borrows, and over the parameters of the complete
model. The stage's own must be equal to the last bit. This detects what the recording of operations cannot see: numbers
read from tensors (a norm over all parameters by ``item()``), positions in the list, the number of parameters.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from autopipe.draws import exclusive
from autopipe.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.messages import loans, owners
from autopipe.ir.plan import Plan
from autopipe.trace.after_step import WHOLE_BYTES, copies, state_restored
from autopipe.workload import Workload

STEPS = (0, 1, 2, 9, 10, 99, 100, 1000)
# the change of the weights before each call, relative to their largest value
_MOVES = (0.1, 3.0, 1e-3)


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference between the hook over a stage and over the complete model."""

    parameter: str  # the one that differs; the first that the hook changes, if it failed
    stage: int
    step: int  # at which the hook was called
    failure: str = ""  # the error of the hook, or "" if it did not fail


def probe(workload: Workload, plan: Plan, graph: Graph, model: nn.Module) -> Finding | None:
    """Return the first difference between the hook over a stage and over the complete model, or None."""
    parameters = dict(model.named_parameters())
    cut = sum(p.numel() * p.element_size() for p in parameters.values()) > WHOLE_BYTES
    with exclusive(), state_restored(workload):
        if cut:
            try:
                return _probe(workload, plan, graph, copies(parameters, cut=True))
            except (AutopipeError, RuntimeError):  # it relies on the numbers of elements
                pass
        return _probe(workload, plan, graph, copies(parameters, cut=False))


def _probe(workload: Workload, plan: Plan, graph: Graph, whole: dict[str, nn.Parameter]) -> Finding | None:
    owner = owners(plan)
    stages: dict[int, dict[str, nn.Parameter]] = {}
    for name in graph.after_step:
        if owner[name] not in stages:
            own = {other: p for other, p in whole.items() if owner[other] == owner[name]}
            stages[owner[name]] = copies(own, cut=False)
    lent = loans(plan, graph)
    for index, step in enumerate(STEPS):
        _move(whole, step, _MOVES[index % len(_MOVES)])
        before = {name: parameter.detach().clone() for name, parameter in whole.items()}
        workload.after_step(list(whole.items()), step)
        for stage, own in stages.items():
            for name, parameter in own.items():
                parameter.data = before[name].clone()
            guests = copies({loan.parameter: whole[loan.parameter] for loan in lent if loan.reader == stage}, cut=False)
            for name, guest in guests.items():
                guest.data = before[name].clone()
            given = {**own, **guests}
            try:
                workload.after_step([(name, given[name]) for name in whole if name in given], step)
            except AutopipeError as error:
                return Finding(next(name for name in own if name in graph.after_step), stage, step, error.what)
            for name, parameter in own.items():
                if not torch.equal(parameter.detach().nan_to_num(), whole[name].detach().nan_to_num()):
                    return Finding(name, stage, step)
    return None


def _move(parameters: dict[str, nn.Parameter], step: int, by: float) -> None:
    """Change every value, depending only on name and step."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        largest = float(parameter.detach().abs().max()) if parameter.numel() else 0.0
        parameter.data = parameter.detach() + (noise * by * (largest or 1.0)).to(parameter.dtype)
