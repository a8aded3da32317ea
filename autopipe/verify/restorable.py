"""Prove on a sample that a checkpoint stores the complete state of an optimizer and its scheduler.

::

    file, loaded once    hooks -> steps -> description ----------> more steps --+
                                               |                                +-- equal, bit for bit?
    file, loaded again   hooks -------------> restored, described -> more steps --+

The two loads represent the interrupted process and the process that resumes: in the second, a global, an attribute of a
class or a counter elsewhere is as it was at the start. What differs between the two and is in no state_dict is refused
by name. The gradients are random, and the parameters are copies of a few of the model's, by shape.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.bits import same_bits
from autopipe.draws import exclusive
from autopipe.errors import ModelFileError, RunError
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.nodes import UnstorableError
from autopipe.runtime.training_state.restore import MisfitError, restore
from autopipe.runtime.training_state.stage import Training, unstorable
from autopipe.trace.state.snapshots.fingerprints import is_plain_key
from autopipe.trace.state.snapshots.settings import SETTINGS
from autopipe.trace.state.snapshots.snapshot import WHOLE, Snapshot
from autopipe.workload import Workload
from autopipe.workload.target.sources import is_installed

FIRST_STEPS, FURTHER_STEPS = 3, 4
_MOST_NUMBERS = 1 << 20
_LARGEST = 1 << 24
_OF_A_KIND = 12
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_KEEP = (
    "keep this state in optimizer.state or in param_groups, or return it from state_dict() and set it in "
    "load_state_dict() of the optimizer or scheduler"
)


@dataclass(frozen=True, slots=True)
class _Side:
    """One load of the file."""

    training: Training
    # of the user's code
    modules: Sequence[types.ModuleType]


class _UntriedError(Exception):
    """The sample cannot be stepped; the message says why."""


def prove_restorable(workload: Workload, shapes: Shapes | None = None) -> str:
    """Step the optimizer of the hooks on a sample, restore it into a new one, and compare both. Return a note, or "".

    ``shapes``: of the trained parameters, by name, if they are known. Optimizers and schedulers of torch are not tried.

    Raises: RunError naming what a checkpoint cannot hold or restore; ModelFileError for a hook that fails on the
    complete model, and for a scheduler that cannot be stepped without arguments.
    """
    if not workload.stepping.is_customized:
        return ""
    with exclusive(), torch.random.fork_rng(devices=()), _same_modules(), _quietly(), _one_thread():
        try:
            sample = _sample(shapes or _shapes(workload))
            first = _side(workload, sample)
            if first is None or len(_stepped(first)) < len(sample):  # the hook selects parameters
                shapes = _shapes(workload)
                sample = _sample(shapes)
                first = _side(workload, sample)
            second = _side(workload, sample)
            if first is None or second is None:
                return ""
            _compare(first, second)
        except _UntriedError as error:
            return f"warning: whether the optimizer's state can be restored was not tried: {error}"
    of = len(shapes or sample)
    if len(sample) < of:
        return f"the optimizer's state was stored and restored in a trial, with {len(sample)} of {of} parameters"
    return ""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: the sample is small, and several threads would wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shapes(workload: Workload) -> Shapes:
    return {name: (tuple(p.shape), p.dtype) for name, p in workload.stepping.stepped_parameters().items()}


def _stepped(side: _Side) -> set[int]:
    return {id(parameter) for group in side.training.optimizer.param_groups for parameter in group["params"]}


def _sample(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return values for a few parameters of each number of dimensions, the smallest first."""
    chosen: set[str] = set()
    numbers = 0
    for dims in sorted({len(shape) for shape, _ in shapes.values()}):
        alike = sorted((math.prod(shape), name) for name, (shape, _) in shapes.items() if len(shape) == dims)
        for index, (size, name) in enumerate(alike[:_OF_A_KIND]):
            if (index == 0 and size <= _LARGEST) or numbers + size <= _MOST_NUMBERS:
                chosen.add(name)
                numbers += size
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes.items()
        if name in chosen
    }


def _side(workload: Workload, sample: Mapping[str, torch.Tensor]) -> _Side | None:
    owned = {name: nn.Parameter(value.clone()) for name, value in sample.items()}
    try:
        again = Workload.from_spec(workload.spec)
        optimizer = again.optimizer(list(owned.items())) if owned else None
    except ModelFileError as error:  # it may need all parameters, which a plan of one stage gives it
        raise _UntriedError(error.what) from error
    if optimizer is None:
        return None
    training = Training(owned, optimizer, again.scheduler(optimizer))
    return _Side(training, _modules(training))


def _compare(first: _Side, second: _Side) -> None:
    draws = torch.Generator().manual_seed(1)
    varying = _unlike(first, second)
    _steps(first, FIRST_STEPS, draws)
    ours = _described(first.training)
    tree = json.loads(json.dumps(ours.tree))
    tensors = {name: tensor.clone() for name, tensor in ours.tensors.items()}
    with torch.no_grad():
        for name, parameter in second.training.owned.items():
            parameter.copy_(first.training.owned[name])
    try:
        restore(tree, second.training.roots, second.training.owned, tensors)
    except MisfitError as error:
        raise RunError(
            f"a run could not resume from its own checkpoint: {error.path} {error.why}",
            where=error.path,
            remedy="create it in the optimizer or scheduler hook, or use only numbers, tensors, lists and dicts",
        ) from None
    _refuse_unequal(ours, _described(second.training))
    outside = _unlike(first, second) - varying
    state = draws.get_state()
    _steps(first, FURTHER_STEPS, draws)
    draws.set_state(state)
    _steps(second, FURTHER_STEPS, draws)
    _refuse_outside(outside & _unlike(first, second), first.training)
    theirs = second.training.owned
    for name, parameter in first.training.owned.items():
        if not torch.equal(parameter, theirs[name]) and not (parameter.isnan().any() and theirs[name].isnan().any()):
            raise RunError(
                "a run could not resume from its own checkpoint: after its state was stored and restored, the "
                f"optimizer computes another value for {name}. It reads state that is in no state_dict",
                where=_class(first.training.optimizer),
                remedy=_KEEP,
            )


def _described(training: Training) -> Description:
    try:
        return describe(training.roots, training.owned)
    except UnstorableError as error:
        raise unstorable(error) from None


def _refuse_unequal(ours: Description, theirs: Description) -> None:
    """Refuse if a restored state has a different description. Raises: RunError."""
    path = _difference(ours.tree, theirs.tree, "")
    if not path:
        different = [n for n, t in ours.tensors.items() if not same_bits(t, theirs.tensors[n])]
        path = different[0] if different else ""
    if path:
        raise RunError(
            f"a run could not resume from its own checkpoint: {path} differs after it was stored and restored",
            where=path,
            remedy=_KEEP,
        )


def _difference(one: Any, other: Any, path: str) -> str:
    """Return the first path at which two descriptions differ, "" if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(f"{path}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other and type(one) is type(other) else (path.lstrip(".") or "the state")
    return next((where for place, a, b in pairs if (where := _difference(a, b, place))), "")


# -- steps -------------------------------------------------------------------------------------------------------------


def _steps(side: _Side, count: int, draws: torch.Generator) -> None:
    """Step a few times. Raises: RunError if a step draws from a global generator."""
    training = side.training
    for _ in range(count):
        for parameter in training.owned.values():
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
        before = _generators()
        try:
            training.optimizer.step()
            if training.scheduler is not None:
                training.scheduler.step()
        except Exception as error:
            raise _UntriedError(f"a step on random gradients fails: {type(error).__name__}: {error}") from error
        for parameter in training.owned.values():
            parameter.grad = None
        drawn = [name for name, state in _generators().items() if state != before[name]]
        if drawn:
            raise RunError(
                f"a step of {_class(training.optimizer)} draws from {drawn[0]}, whose state is not in a checkpoint",
                where=_class(training.optimizer),
                remedy="draw from a generator that is an attribute of the optimizer, such as self.generator = "
                "torch.Generator().manual_seed(0)",
            )


def _generators() -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)
    return {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's global generator": json.dumps(numpy, default=lambda array: array.tolist()),
        "Python's global generator (random)": random.getstate(),
    }


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


# -- state outside of the state dicts ----------------------------------------------------------------------------------


def _refuse_outside(names: Collection[str], training: Training) -> None:
    """Refuse what a restored optimizer or scheduler does not have. Raises: RunError naming the first place.

    A value that no code reads, such as a norm for the log, decides nothing.
    """
    for name in sorted(names):
        if not training.is_unread(name):
            raise RunError(
                f"a step of {_class(training.optimizer)} changes {name}, which is in no state_dict: checkpoints do not "
                "store it",
                where=name,
                remedy=_KEEP,
            )


def _unlike(first: _Side, second: _Side) -> set[str]:
    """Return the names of the places that two loads reach and whose values differ.

    A list in a global of the first that begins with the entries of the second has only grown: it counts as a log.
    """
    ours, theirs = _reached(first), _reached(second)
    unlike = {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)}
    lists = {name for name in unlike if name.isidentifier()}  # others are of the optimizer or a closure
    grown = {name for name in lists if _length(ours.get(name)) > _length(theirs.get(name)) >= 0}
    begun = {name for name in grown if not any(entry.startswith(f"{name}[") and entry in theirs for entry in unlike)}
    return {name for name in unlike if not any(name == log or name.startswith(f"{log}[") for log in begun)}


# of an optimizer's state_dict, and compared with it; the defaults, which torch reads for new groups only
_STORED = ("optimizer.state[", "optimizer.param_groups[", "optimizer.defaults")


def _reached(side: _Side) -> dict[str, list[Any]]:
    """Return the plain values, generators and small tensors that optimizer, scheduler and files reach, by name."""
    roots = [*side.training.roots.items(), *((module.__name__, module) for module in side.modules)]
    snapshot = Snapshot.of(roots)
    reached: dict[str, list[Any]] = {}
    for (owner, key), value in snapshot.values.items():
        name = snapshot.names[owner, key]
        if value and value[0] == "==" and owner != id(SETTINGS) and not name.startswith(_STORED):
            content = value[1]
            if key == WHOLE and isinstance(content, tuple):  # a length and keys, some of which may be parameters
                content = _Content(len=content[0], keys=[k if is_plain_key(k) else type(k) for k in content[1:]])
            reached.setdefault(name, []).append(content)
    return reached


class _Content(dict[str, Any]):
    """The length and the keys of a container."""


def _length(values: list[Any] | None) -> int:
    """Return the length of a list or a deque, -1 for all else."""
    whole = values[0] if values and len(values) == 1 else None
    return whole["len"] if isinstance(whole, _Content) and not whole["keys"] else -1


def _modules(training: Training) -> Sequence[types.ModuleType]:
    """Return the modules of the user's own files that optimizer and scheduler are from."""
    objects = [training.optimizer, training.scheduler, *vars(training.optimizer).values()]
    if training.scheduler is not None:
        objects += vars(training.scheduler).values()
    names = [getattr(thing if callable(thing) else type(thing), "__module__", "") for thing in objects]
    names += [base.__module__ for thing in objects for base in type(thing).__mro__]
    for thing in objects:
        if isinstance(thing, (list, tuple)):
            names += [getattr(item, "__module__", "") for item in thing]
    modules = [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]
    return [module for module in modules if not is_installed(getattr(module, "__file__", None) or "")]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the output and warnings of the file: the ranks will print them."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _same_modules() -> Iterator[None]:
    """Restore the modules that loading the file again replaces, and the global generators of Python and numpy."""
    before, state, numpy = dict(sys.modules), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy)
        for name, module in before.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
