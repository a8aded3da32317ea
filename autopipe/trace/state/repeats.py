"""Run a model again from one state: ``restored`` puts its Python state back, ``refuse_other_calls`` compares its calls.

The comparison is for a model whose calls cannot be followed on fake tensors: with modules that run as they are, with
decisions by the numbers of the batch, or captured by ``torch.export``. The weights, the batch and the random numbers
are those of the first run, so only Python state that a run leaves behind can change a call.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe import draws
from autopipe.errors import AutopipeError, TraceError
from autopipe.trace.explain import failed_on_real_numbers, here
from autopipe.trace.record.model_snapshot import buffers_restored, left_as_it_was
from autopipe.trace.state.observing.reach import roots
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.trace.tape.backward import Inner
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item

_MOST_RUNS = 16
_Call = tuple[str, list[str], list[tuple[tuple[int, ...], torch.dtype]]]
"""Function, numbers and text, and the forms of tensors."""


def refuse_other_calls(workload: Workload, model: nn.Module, item: Item) -> None:
    """Run forward and loss as long as they change Python state, at most 16 times. Model and state are restored.

    Raises: TraceError with the first call that a later run makes otherwise, or with what a module that runs as it is
    changes in every run.
    """
    with restored(workload, model):
        before, calls = _state(workload, model), _calls_of(workload, model, item)
        for run in range(1, _MOST_RUNS):
            now = _state(workload, model)
            changed = now.changed_since(before)
            if not changed:
                return
            before, again = now, _calls_of(workload, model, item)
            if run > 1:  # the first run may fill a cache
                _refuse_difference(calls, again)
            calls = again
        for path in workload.spec.opaque_modules:
            for name in (now.names[place] for place in changed):
                if name.startswith(f"model.{path}."):
                    what = f"each forward pass changes {name}, and {path} runs as it is: replicas would not agree"
                    raise TraceError(what, where=workload.name, remedy=KEEP)


@contextlib.contextmanager
def restored(workload: Workload, model: nn.Module) -> Iterator[None]:
    """Restore a model and the Python state that it, the loss and the user's modules reach, after the block."""
    with left_as_it_was(model):
        start = Start(model, functions_of(workload))
        try:
            yield
        finally:
            start.restore()


def functions_of(workload: Workload) -> dict[str, Any]:
    """Return the user's functions by hook."""
    return workload.functions() if hasattr(workload, "functions") else {}


def run_once(workload: Workload, model: nn.Module, item: Item) -> Tensor:
    """Return the loss of a batch; the same random numbers are drawn in every run. Buffers are restored."""
    with buffers_restored(model), draws.flat_checkpoints(), draws.Draws(workload.spec.seed, 0, 0), torch.enable_grad():
        return workload.loss(model, copied_item(item))[0].detach()


def _state(workload: Workload, model: nn.Module) -> Snapshot:
    return Snapshot.of(roots(model, functions_of(workload)))


def _calls_of(workload: Workload, model: nn.Module, item: Item) -> list[tuple[_Call, str]]:
    try:
        with _Noting() as noting:
            run_once(workload, model, item)
    except AutopipeError:
        raise
    except Exception as error:
        raise failed_on_real_numbers("the model itself failed", error) from error
    return [*zip(noting.calls, noting.places, strict=True)]


def _refuse_difference(calls: list[tuple[_Call, str]], again: list[tuple[_Call, str]]) -> None:
    for index, (now, where) in enumerate(again):
        before = calls[index][0] if index < len(calls) else None
        if now != before:
            was = f"{_text(before)} is {_text(now)} then" if before else f"{_text(now)} is one more call"
            raise _other_calls(was, where)
    if len(calls) > len(again):
        missing, where = calls[len(again)]
        raise _other_calls(f"{_text(missing)} is not called then", where)


def _other_calls(what: str, where: str) -> TraceError:
    text = f"the forward or the loss makes other calls when it runs again on the same batch: {what}"
    return TraceError(text, where=where, remedy=KEEP)


def _text(call: _Call) -> str:
    name, numbers, forms = call
    tensors = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in forms]
    return f"{name}({', '.join([*tensors, *numbers])})"


class _Noting(Inner):
    """Notes the calls and their lines."""

    def __init__(self) -> None:
        super().__init__([])
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            self.places.append(here())
        return super().__torch_function__(func, types, args, kwargs)


class Start:
    """The state of model, loss and the user's modules, and of the random generators in it."""

    def __init__(self, model: nn.Module, functions: Mapping[str, Any]) -> None:
        """``functions``: the user's other functions, by name."""
        self._snapshot = Snapshot.of(roots(model, functions), compared=False)
        self._generators = [way for way in map(_way, self._snapshot.owners.values()) if way is not None]

    def restore(self) -> None:
        """Put everything back, but iterators and what libraries keep in C."""
        self._snapshot.restore()
        for put, state in self._generators:
            put(state)


def _way(owner: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return what sets the state of a generator, and its state; None for anything else."""
    if isinstance(owner, random.Random):
        return owner.setstate, owner.getstate()
    if isinstance(owner, np.random.Generator):
        return lambda state: setattr(owner.bit_generator, "state", state), owner.bit_generator.state
    if isinstance(owner, np.random.RandomState):
        return owner.set_state, owner.get_state()
    if isinstance(owner, torch.Generator):
        return owner.set_state, owner.get_state()
    return None


__all__ = ["Start", "functions_of", "refuse_other_calls", "restored", "run_once"]
