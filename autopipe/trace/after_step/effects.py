"""Which parameters the ``after_step`` hook changes, and on which others their new values depend.

The hook is run on copies of all parameters, at many step numbers, with every operation watched. What it finds becomes
part of the graph: a stage then knows which parameters of other stages it needs, and frozen ones that it changes have
versions.
"""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, ModelFileError
from autopipe.trace.after_step.flow import Flow
from autopipe.trace.state.snapshot import Snapshot, is_users_module
from autopipe.workload import Workload
from autopipe.workload.isolation import PrivateRandom

# beyond so many bytes of parameters, every dimension of every tensor is cut down to so many elements
WHOLE_BYTES, CUT = 4 * 2**20, 16
# a hook may act at some steps only: every so many, or from some step on
_PERIODS = (16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 5000, 10_000, 100_000)
STEPS = (*range(13), *(step for period in _PERIODS for step in (period - 1, period)))
_IN_PARAMETERS = (
    "a checkpoint does not hold it, and each stage would have its own: keep it as parameters of the model with "
    "requires_grad=False, which the hook gets by name; for averaged weights --ema DECAY needs no hook"
)


@dataclass(frozen=True, slots=True)
class Effects:
    """``reads``: parameter that the hook changes -> the other parameters that its new value depends on."""

    reads: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()


def effects_of(workload: Workload, model: nn.Module) -> Effects:
    """Run the hook and return what it does. Model and Python state are left as they were.

    Raises: ModelFileError where it fails on the parameters of the whole model, draws random numbers, changes a shape,
    or keeps tensors of its own.
    """
    parameters = dict(model.named_parameters())
    whole = sum(p.numel() * p.element_size() for p in parameters.values()) <= WHOLE_BYTES
    with exclusive(), state_restored(workload) as state:
        if not whole:
            try:  # it may take numbers of elements for granted
                return _run(workload, copies(parameters, cut=True), state)
            except (AutopipeError, RuntimeError):
                state.restore()
        return _run(workload, copies(parameters, cut=False), state)


def copies(parameters: Mapping[str, nn.Parameter], *, cut: bool) -> dict[str, nn.Parameter]:
    """Return parameters of the same values, flags and attributes on the CPU; random ones of those without memory."""
    made = {}
    for name, parameter in parameters.items():
        data = parameter.detach()
        if cut:
            data = data[tuple(slice(0, CUT) for _ in range(data.dim()))]
        if data.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            data = torch.randn(data.shape, generator=generator).to(data.dtype)
        made[name] = nn.Parameter(data.to("cpu").clone(), requires_grad=parameter.requires_grad)
        made[name].__dict__.update(parameter.__dict__)
    return made


def _run(workload: Workload, parameters: dict[str, nn.Parameter], state: Snapshot) -> Effects:
    hook = workload.hooks["after_step"]
    specs = {name: (p.shape, p.dtype) for name, p in parameters.items()}
    reads: dict[str, set[str]] = {}
    own = PrivateRandom(0)
    strange: tuple[int, ...] | None = None
    behind = state
    for step in STEPS:
        flow = Flow(parameters)
        with own.active():
            before = _generators()
            with flow:
                workload.after_step(list(parameters.items()), step)
            if before != _generators():
                raise _refused(
                    workload,
                    f"{hook.label} draws random numbers, and each stage, and a resumed run, would draw others",
                    "leave the draws out, or make them part of the forward, where they are the same at every layout",
                )
        for name in flow.changed():
            reads.setdefault(name, set()).update(flow.sources(name) - {name})
        for name, parameter in parameters.items():
            if (parameter.shape, parameter.dtype) != specs[name]:
                raise _refused(
                    workload,
                    f"{hook.label} gives {name} another shape or dtype",
                    "a stage's code is written for one shape; build the model with the other one",
                )
        if step > 1:  # what is made by the first call is there
            strange = strange or flow.strange
        if step == 1:
            behind = _state(workload)
    order = {name: index for index, name in enumerate(parameters)}
    notes = _refuse_state(workload, behind, strange)
    return Effects({n: tuple(sorted(reads[n], key=order.__getitem__)) for n in order if n in reads}, notes)


def _refuse_state(workload: Workload, behind: Snapshot, strange: tuple[int, ...] | None) -> tuple[str, ...]:
    """Refuse tensors that the hook keeps from step to step, and return a note on other state.

    Raises: ModelFileError.
    """
    hook, now = workload.hooks["after_step"], _state(workload)
    changed = [place for place in now.changed_since(behind) if place[0] in now.owners]
    for place in changed:
        if isinstance(_value(now.owners[place[0]], place[1]), Tensor):
            raise _refused(workload, f"{hook.label} keeps tensors of its own: {now.names[place]}", _IN_PARAMETERS)
    if strange is not None:
        raise _refused(
            workload,
            f"{hook.label} changes a tensor of shape {list(strange)} that it was not given",
            _IN_PARAMETERS,
        )
    if not changed:
        return ()
    names = ", ".join(dict.fromkeys(now.names[place] for place in changed))
    return (f"after_step changes {names}: no checkpoint holds it, so it begins again where a run is resumed",)


def _refused(workload: Workload, what: str, remedy: str) -> ModelFileError:
    return ModelFileError(what, where=workload.hooks["after_step"].place, remedy=remedy)


@contextlib.contextmanager
def state_restored(workload: Workload) -> Iterator[Snapshot]:
    """Leave the Python state that the hook can reach as it was before the block."""
    before = _state(workload)
    try:
        yield before
    finally:
        before.restore()


def _state(workload: Workload) -> Snapshot:
    """Take a snapshot of the Python state that the hook can reach."""
    function: Any = workload.hooks["after_step"].function
    roots = [("after_step", function)]
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    if module is not None and is_users_module(module.__name__):
        roots.append((module.__name__, module))
    return Snapshot.of(roots)


def _value(owner: Any, key: Any) -> Any:
    """Return what is at a place, None where that cannot be said."""
    if isinstance(owner, Tensor):
        return owner
    try:
        if isinstance(owner, (dict, list, tuple)):
            return owner[key]
        return owner.cell_contents if key == "" else vars(owner)[key]
    except (LookupError, TypeError, AttributeError, ValueError):
        return None


def _generators() -> tuple[bytes, str, int]:
    """Return what changes as soon as one of the global generators is drawn from."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()), hash(random.getstate())
