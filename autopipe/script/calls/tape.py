"""``CallTape``: the script's model, run on fake tensors in each call, beside the calls that the stages can run.

The forward's Python runs in the script's process in every call, as in one process: what it prints, counts and reads is
right. Its tensors have no numbers; ``trace.tape`` finds the recording that does the same, or records another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopipe.ir.graph import Input
from autopipe.script.settings import autocast_now
from autopipe.trace.numbers import MOST_NUMBERS, Call, changed_numbers
from autopipe.trace.record.caches import MemoizedFakes
from autopipe.trace.tape.entries import Origins, Roots
from autopipe.trace.tape.keys import Contents
from autopipe.trace.tape.live import LiveModel

Modules = list[tuple[str, nn.Module]]
"""The modules of a model with their paths, as of ``modules_of``."""
_MOST_WATCHED = 64
"""How often the numbers of a call are compared with those of an earlier one."""


class CallTape:
    """The calls of one model that are known, by the form of their arguments."""

    def __init__(
        self, model: nn.Module, device: torch.device, is_kept: Callable[[Any], bool], gather: Callable[[], None]
    ) -> None:
        """``device``: of the model. ``is_kept``: whether what runs a call still exists. ``gather``: brings weights."""
        from autopipe.trace.record.shape_env import FollowingShapeEnv  # it imports sympy

        self.model, self.device, self.is_kept, self.gather = model, device, is_kept, gather
        self.shape_env = FollowingShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.live = _ScriptModel(model, self.mode, device)
        self.contents, self.origins = Contents(), Origins()
        self.memoized = MemoizedFakes(model)
        self.fakes: Any = None  # of the first recorder: its results outlive a run
        self.num_runs = 0
        self._tensors: list[int] = []  # the ids of parameters and buffers in the last call
        self.numbers: tuple[Input, ...] = ()  # of the forward, that change from call to call: inputs of the stages
        self.roots = Roots()
        self._seen: dict[Hashable, dict[Call, list[tuple[int, Any]]]] = {}  # form -> the numbers in one of its calls
        self._watched: set[Hashable] = set()  # forms whose calls may differ in numbers
        self._num_watched = 0

    def watch(self, form: Hashable) -> None:
        """Look for numbers that change in the next calls of a form: one has made other calls than those before it."""
        if self._num_watched < _MOST_WATCHED:
            self._watched.add(form)
            self._num_watched += 1

    def watches(self, form: Hashable) -> bool:
        """Return whether the numbers in the next call of a form are looked at."""
        return form in self._watched

    def look(self, form: Hashable, seen: dict[Call, list[tuple[int, Any]]]) -> None:
        """Compare the numbers in a call with those in an earlier one. Those that differ travel with the later calls."""
        before = self._seen.setdefault(form, seen)
        if before is seen:
            return
        self._watched.remove(form)
        new = changed_numbers(before, seen, self.numbers)
        if new and len(self.numbers) + len(new) <= MOST_NUMBERS:
            self.numbers += new
            self.roots.clear()

    def has_new_tensors(self, modules: Modules) -> bool:
        """Return whether the model has other parameters and buffers than in its last call, or elsewhere."""
        registries = (registry for _, module in modules for registry in (module._parameters, module._buffers))
        now = [id(tensor) for registry in registries for tensor in registry.values() if tensor is not None]
        before, self._tensors = self._tensors, now
        return self.num_runs > 0 and now != before


def form_of(modules: Modules, flat: list[Any], structure: pytree.TreeSpec) -> Hashable:
    """Return what two calls must have in common besides what the forward does. The arguments are flat, as of pytree."""
    training = tuple(module.training for _, module in modules)
    tensors = [value for value in flat if isinstance(value, Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        forms = tuple((t.dtype, tuple(t.shape), t.stride(), str(t.device), t.requires_grad) for t in tensors)
    same = tuple(next(i for i, other in enumerate(tensors) if other is value) for value in tensors)
    places = tuple(isinstance(value, Tensor) for value in flat)
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast_now())
    return str(structure), places, forms, same, modes, training


class _ScriptModel(LiveModel):
    """A model whose weights the script may write or replace between two calls."""

    def __enter__(self) -> LiveModel:
        with torch.inference_mode(False):  # the fakes of parameters outlive the call
            return super().__enter__()

    def constant_buffers(self) -> Mapping[str, Tensor]:
        """Return none: the script may write them."""
        return {}

    def _look_for_changes(self) -> None:
        if any(id(tensor) not in self.of_real for _, _, tensor in self._registered_now):
            self.names.clear()  # all are faked again

    @contextlib.contextmanager
    def unfaked(self) -> Iterator[None]:
        """Return a context in which the user's model has its own tensors."""
        fakes = [(registry, key, registry.get(key)) for registry, key, _ in self._registered_now]
        flat = [(attributes, attributes["_flat_weights"]) for attributes, _ in self._flat]
        self._put_real()
        try:
            yield
        finally:
            for registry, key, fake in fakes:
                registry[key] = fake
            for attributes, weights in flat:
                attributes["_flat_weights"] = weights
