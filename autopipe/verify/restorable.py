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
import sys
import time
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.bits import same_bits
from autopipe.draws import exclusive, generators_outside_torch_restored, states_of_generators
from autopipe.errors import ModelFileError, RunError
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.nodes import UnstorableError
from autopipe.runtime.training_state.restore import MisfitError, restore
from autopipe.runtime.training_state.stage import Training, unstorable
from autopipe.users_code import is_own_module
from autopipe.verify.reached_state import Load, unlike
from autopipe.workload import Workload
from autopipe.workload.hooks.optimizers import is_of_torch

FIRST_STEPS, FURTHER_STEPS = 3, 4
# steps before the state is stored, if they take less time: an average or a restart of the user's own, or of a package,
# may first act after many steps
MOST_STEPS, MOST_SECONDS = 97, 0.5
_MOST_NUMBERS = 1 << 20
_LARGEST = 1 << 24
_OF_A_KIND = 12
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_KEEP = (
    "keep this state in optimizer.state or in param_groups, or return it from state_dict() and set it in "
    "load_state_dict() of the optimizer or scheduler"
)


class _UntriedError(Exception):
    """The sample cannot be stepped; the message says why. ``steps``: how many were taken."""

    def __init__(self, why: str, steps: int = 0) -> None:
        super().__init__(why)
        self.steps = steps


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
            first = _load(workload, sample)
            if first is None or len(_stepped(first)) < len(sample):  # the hook selects parameters
                shapes = _shapes(workload)
                sample = _sample(shapes)
                first = _load(workload, sample)
            second = _load(workload, sample)
            if first is None or second is None:
                return ""
            try:
                _compare(first, second, FIRST_STEPS if _is_of_torch(first.training) else MOST_STEPS)
            except _UntriedError as error:  # such as a schedule that ends
                possible = error.steps - FURTHER_STEPS
                if possible < FIRST_STEPS:
                    raise
                first, second = _load(workload, sample), _load(workload, sample)
                if first is not None and second is not None:
                    _compare(first, second, possible)
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


def _is_of_torch(training: Training) -> bool:
    """Return whether no code but torch's steps the parameters and the learning rate."""
    return is_of_torch(training.optimizer, training.scheduler) and not _modules(training, ())


def _stepped(load: Load) -> set[int]:
    return {id(parameter) for group in load.training.optimizer.param_groups for parameter in group["params"]}


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


def _load(workload: Workload, sample: Mapping[str, torch.Tensor]) -> Load | None:
    owned = {name: nn.Parameter(value.clone()) for name, value in sample.items()}
    try:
        again = Workload.from_spec(workload.spec)
        optimizer = again.optimizer(list(owned.items())) if owned else None
    except ModelFileError as error:  # it may need all parameters, which a plan of one stage gives it
        raise _UntriedError(error.what) from error
    if optimizer is None:
        return None
    training = Training(owned, optimizer, again.scheduler(optimizer))
    return Load(training, _modules(training, [hook.function for hook in again.hooks.values()]))


def _compare(first: Load, second: Load, most: int) -> None:
    draws = torch.Generator().manual_seed(1)
    varying = unlike(first, second)
    taken = 0
    deadline = time.monotonic() + MOST_SECONDS
    while taken < most and (taken < FIRST_STEPS or time.monotonic() < deadline):
        _step(first, draws, taken)
        taken += 1
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
    outside = unlike(first, second) - varying
    state = draws.get_state()
    for load in (first, second):
        draws.set_state(state)
        for number in range(FURTHER_STEPS):
            _step(load, draws, taken + number)
    _refuse_outside(outside & unlike(first, second), first.training)
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


def _step(load: Load, draws: torch.Generator, number: int) -> None:
    """Take a step. ``number``: of those before it. Raises: RunError if it draws from a global generator."""
    training = load.training
    for parameter in training.owned.values():
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
    before = states_of_generators()
    try:
        training.optimizer.step()
        if training.scheduler is not None:
            training.scheduler.step()
    except Exception as error:
        raise _UntriedError(f"a step on random gradients fails: {type(error).__name__}: {error}", number) from error
    for parameter in training.owned.values():
        parameter.grad = None
    drawn = [name for name, state in states_of_generators().items() if state != before[name]]
    if drawn:
        raise RunError(
            f"a step of {_class(training.optimizer)} draws from {drawn[0]}, whose state is not in a checkpoint",
            where=_class(training.optimizer),
            remedy="draw from a generator that state_dict() stores, such as self.generator = "
            "torch.Generator().manual_seed(0)",
        )


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


def _modules(training: Training, hooks: Sequence[object]) -> Sequence[types.ModuleType]:
    """Return the modules of the user's own files that optimizer, scheduler and hooks are from."""
    objects = [*hooks, training.optimizer, training.scheduler, *vars(training.optimizer).values()]
    if training.scheduler is not None:
        objects += vars(training.scheduler).values()
    names = [getattr(thing if callable(thing) else type(thing), "__module__", "") for thing in objects]
    names += [base.__module__ for thing in objects for base in type(thing).__mro__]
    for thing in objects:
        if isinstance(thing, (list, tuple)):
            names += [getattr(item, "__module__", "") for item in thing]
    modules = [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]
    return [module for module in modules if is_own_module(module)]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the output and warnings of the file: the ranks will print them."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _same_modules() -> Iterator[None]:
    """Restore the modules that loading the file again replaces, and the global generators of Python and numpy."""
    before = dict(sys.modules)
    try:
        with generators_outside_torch_restored():
            yield
    finally:
        for name, module in before.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
