"""Find which parameters the ``after_step`` hook changes, and on which others their new values depend.

The hook runs on copies of all parameters, at many step numbers, with every operation tracked. The result becomes part
of the graph: a stage then knows which parameters of other stages it needs, and frozen parameters that the hook changes
get versions.

``Flow`` tells which tensors a piece of code changes, and on which others the new values depend. Each memory has the set
of names that its content depends on. A call propagates the names of its inputs to its results and to the memory that it
writes. Python numbers read from tensors (``item()``) carry no names.
"""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.draws import exclusive, states_of_generators
from autopipe.errors import AutopipeError, ModelFileError
from autopipe.trace.state.snapshots.places import value_at
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.users_code import is_model_module
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

_ENTRY = re.compile(r"\[\d+\]$")
_Names = frozenset[str]


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
    names = ", ".join(dict.fromkeys(_ENTRY.sub("", now.names[place]) for place in changed))
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
    if module is not None and is_model_module(module.__name__):
        roots.append((module.__name__, module))
    return Snapshot.of(roots)


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """Tracks which named tensors the operations in the block write, and from which their new values come."""

    def __init__(self, named: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.named = dict(named)
        self.used = ""  # name of one of ``others``, which must not be used, that was used
        self.written: set[str] = set()  # names of the tensors whose memory was written
        # shape of a written tensor that was neither given nor made in the block
        self.foreign_shape: tuple[int, ...] | None = None
        self._content: dict[int, _Names] = {}
        self._name_of: dict[int, str] = {}
        self._alive: list[Any] = []  # keys are unique only among live memories
        for name, tensor in named.items():
            self._name_of[self._key(tensor)] = name
            self._content[self._key(tensor)] = frozenset({name})
        self._others = {self._key(tensor): name for name, tensor in (others or {}).items()}

    def sources(self, name: str) -> _Names:
        """Return the names that the current content of a tensor depends on, including its own."""
        tensor = self.named[name]
        return self._content.get(self._key(tensor), frozenset()) | {name}

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed from the named ones and is not one of them."""
        key = self._key(tensor)
        return key not in self._name_of and bool(self._content.get(key))

    def changed(self) -> set[str]:
        """Return the names of the tensors that were written, or bound to other memory (``p.data = ...``)."""
        bound = {name for name, tensor in self.named.items() if self._name_of.get(self._key(tensor)) != name}
        return self.written | bound

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        targets = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        ]
        if schema.name.startswith("aten::_foreach_"):
            self._each(list(given.values()), targets, result)
        else:
            self._pass_on(given.values(), targets, result)
        return result

    def _each(self, given: list[Any], targets: list[Any], result: Any) -> None:
        """Treat a call over lists as one call for each element."""
        count = max((len(value) for value in given if isinstance(value, (list, tuple))), default=0)

        def at(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, (list, tuple)) and len(value) == count else value

        for index in range(count):
            self._pass_on(
                [at(value, index) for value in given], [at(target, index) for target in targets], at(result, index)
            )

    def _pass_on(self, given: Iterable[Any], targets: Iterable[Any], result: Any) -> None:
        read = [self._key(tensor) for tensor in _tensors(list(given))]
        self.used = self.used or next((self._others[key] for key in read if key in self._others), "")
        names: _Names = frozenset().union(*(self._content.get(key, frozenset()) for key in read))
        for tensor in _tensors(list(targets)):
            key = self._key(tensor)
            if key not in self._content:
                self.foreign_shape = tuple(tensor.shape)
            self._content[key] = self._content.get(key, frozenset()) | names
            if key in self._name_of:
                self.written.add(self._name_of[key])
        for tensor in _tensors(result):
            self._content.setdefault(self._key(tensor), names)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return int(storage._cdata)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
