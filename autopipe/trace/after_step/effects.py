"""Find which parameters the ``after_step`` hook changes, and on which others their new values depend.

The hook runs on copies of all parameters, at many step numbers, with every operation tracked. The result becomes part
of the graph: a stage then knows which parameters of other stages it needs, and frozen parameters that the hook changes
get versions.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.draws import exclusive, states_of_generators
from autopipe.errors import AutopipeError, ModelFileError
from autopipe.trace.after_step.flow import Flow
from autopipe.trace.state.snapshots.kinds import is_users_module
from autopipe.trace.state.snapshots.places import value_at
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.workload import Workload
from autopipe.workload.batches.isolation import PrivateRandom

# above this size of all parameters in bytes, limit every dimension of every tensor to this number of elements
WHOLE_BYTES, CUT = 4 * 2**20, 16
# a hook may act only at some steps: at intervals, or after a step
_PERIODS = (16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 5000, 10_000, 100_000)
STEPS = (*range(33), *(step for period in _PERIODS for step in (period - 1, period)))
# a hook may act depending on the scale of the weights: a norm above a limit
_SCALES, _MOVED_STEPS = (10.0, 0.01, 1.0), (0, 9, 99)
_IN_PARAMETERS = (
    "checkpoints do not store it, and each stage would have a different one: keep it as parameters of the model with "
    "requires_grad=False, which are passed to the hook by name; for averaged weights, use --ema DECAY without a hook"
)


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of the hook."""

    reads: dict[str, tuple[str, ...]]  # changed parameter -> the other parameters that its new value depends on
    notes: tuple[str, ...] = ()


def effects_of(workload: Workload, model: nn.Module) -> Effects:
    """Run the hook and return its effects. Model and Python state are restored.

    Raises: ModelFileError if the hook fails on the parameters of the complete model, draws random numbers, changes a
    shape, or keeps tensors.
    """
    parameters = dict(model.named_parameters())
    whole = sum(p.numel() * p.element_size() for p in parameters.values()) <= WHOLE_BYTES
    with exclusive(), state_restored(workload) as state:
        others = _other_models(workload, model, state)
        if not whole:
            try:  # the hook may rely on the original numbers of elements
                return _run(workload, copies(parameters, cut=True), others)
            except (AutopipeError, RuntimeError):
                state.restore()
        return _run(workload, copies(parameters, cut=False), others)


def copies(parameters: Mapping[str, nn.Parameter], *, cut: bool) -> dict[str, nn.Parameter]:
    """Return copies of parameters with values, flags and attributes on the CPU; meta tensors get random values."""
    copied = {}
    for name, parameter in parameters.items():
        data = parameter.detach()
        if cut:
            data = data[tuple(slice(0, CUT) for _ in range(data.dim()))]
        if data.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            data = torch.randn(data.shape, generator=generator).to(data.dtype)
        copied[name] = nn.Parameter(data.to("cpu").clone(), requires_grad=parameter.requires_grad)
        copied[name].__dict__.update(parameter.__dict__)
    return copied


def _other_models(workload: Workload, model: nn.Module, state: Snapshot) -> dict[str, Tensor]:
    """Return other parameters that a hook may reach and that a run does not train.

    These belong to the built model, to a model in the user's module, and to other instances of the same class.
    """
    modules = [o for o in state.owners.values() if isinstance(o, nn.Module) and type(o) is type(model)]
    modules += [o for o in (model, workload.builder.value) if isinstance(o, nn.Module)]
    trained = [module for module in modules if any(p.requires_grad for p in module.parameters())]
    return {f"{name} ({number})": p for number, m in enumerate(trained) for name, p in m.named_parameters()}


def _run(workload: Workload, parameters: dict[str, nn.Parameter], others: Mapping[str, Tensor]) -> Effects:
    first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    reads: dict[str, set[str]] = {}
    own = PrivateRandom(0)
    foreign_shape: tuple[int, ...] | None = None
    settled: Snapshot | None = None

    def call(step: int, *, may_fail: bool = False) -> Flow:
        flow = Flow(parameters, others)
        for name in _watched_call(workload, parameters, step, flow, own, may_fail=may_fail):
            reads.setdefault(name, set()).update(flow.sources(name) - {name})
        return flow

    for step in STEPS:
        flow = call(step)
        if step <= 1:
            settled = _state(workload)
            _refuse_kept(workload, settled, flow, parameters)
        else:  # state that the first call creates exists now
            foreign_shape = foreign_shape or flow.foreign_shape
    assert settled is not None
    notes = _refuse_state(workload, settled, foreign_shape)
    for scale in _SCALES:
        for step in _MOVED_STEPS:
            for name, parameter in parameters.items():
                parameter.data = _moved(name, first[name], step, scale)
            call(step, may_fail=True)  # the hook may rely on the scale of the weights
    order = {name: index for index, name in enumerate(parameters)}
    return Effects({n: tuple(sorted(reads[n], key=order.__getitem__)) for n in order if n in reads}, notes)


def _moved(name: str, value: Tensor, step: int, scale: float) -> Tensor:
    """Return other values that depend on name and step only, multiplied by ``scale``."""
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return value.clone()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    noise = torch.randn(value.shape, generator=generator).to(value.dtype)
    return (value + noise * 0.1 * (float(value.abs().max()) or 1.0)) * scale


def _watched_call(
    workload: Workload,
    parameters: Mapping[str, nn.Parameter],
    step: int,
    flow: Flow,
    own: PrivateRandom,
    *,
    may_fail: bool,
) -> set[str]:
    """Call the hook once and return the names of the parameters that it changed.

    Raises: ModelFileError for a change that a stage or a checkpoint cannot reproduce.
    """
    hook = workload.hooks["after_step"]
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with own.active():
        before = states_of_generators()
        try:
            with flow:
                workload.after_step(list(parameters.items()), step)
        except ModelFileError:
            if not may_fail:
                raise
        if before != states_of_generators():
            raise _refused(
                workload,
                f"{hook.label} draws random numbers, which would differ in each stage and in a resumed run",
                "remove the draws, or move them into the forward, where they are equal for every number of stages",
            )
    if flow.used:
        raise _refused(
            workload,
            f"{hook.label} uses {flow.used.partition(' ')[0]} of a model that it was not given: that object is not "
            "what is trained, and each stage has a part of the model alone",
            "take the parameters from named_parameters by name; a model that never changes is to be frozen "
            "(requires_grad_(False))",
        )
    changed = flow.changed()
    for name, parameter in parameters.items():
        if (parameter.shape, parameter.dtype) != (values[name].shape, values[name].dtype):
            raise _refused(
                workload,
                f"{hook.label} changes the shape or dtype of {name}",
                "build the model with that shape and dtype; the code of a stage is generated for one shape",
            )
        if not torch.equal(parameter.detach().nan_to_num(), values[name].nan_to_num()):
            changed.add(name)  # for example by NumPy on the same memory: the trial by stages finds its dependencies
    return changed


def _refuse_kept(workload: Workload, now: Snapshot, flow: Flow, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse tensors that the hook made from parameters and keeps. Raises: ModelFileError.

    A resumed run would compute them from other values, and so would a stage in a later call.
    """
    given = {id(parameter) for parameter in parameters.values()}
    for place, name in now.names.items():
        value = value_at(now.owners.get(place[0]), place[1])
        if isinstance(value, Tensor) and id(value) not in given and flow.depends(value):
            hook = workload.hooks["after_step"]
            raise _refused(workload, f"{hook.label} keeps tensors between steps: {name}", _IN_PARAMETERS)


def _refuse_state(workload: Workload, settled: Snapshot, foreign_shape: tuple[int, ...] | None) -> tuple[str, ...]:
    """Refuse tensors that the hook keeps between steps, and return a note on other state.

    Raises: ModelFileError.
    """
    hook, now = workload.hooks["after_step"], _state(workload)
    changed = [place for place in now.changed_since(settled) if place[0] in now.owners]
    for place in changed:
        if isinstance(value_at(now.owners[place[0]], place[1]), Tensor):
            raise _refused(workload, f"{hook.label} keeps tensors between steps: {now.names[place]}", _IN_PARAMETERS)
    if foreign_shape is not None:
        raise _refused(
            workload,
            f"{hook.label} changes a tensor of shape {list(foreign_shape)} that was not passed to it",
            _IN_PARAMETERS,
        )
    if not changed:
        return ()
    names = ", ".join(dict.fromkeys(now.names[place] for place in changed))
    return (f"after_step changes {names}, which checkpoints do not store: it starts from its initial value on resume",)


def _refused(workload: Workload, what: str, remedy: str) -> ModelFileError:
    return ModelFileError(what, where=workload.hooks["after_step"].place, remedy=remedy)


@contextlib.contextmanager
def state_restored(workload: Workload) -> Iterator[Snapshot]:
    """Restore the Python state that the hook can reach after the block."""
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
