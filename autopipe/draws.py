"""Randomness that does not depend on the layout.

Every random operation draws from a seed made of (run seed, minibatch, microbatch, position), where *position* is its
ordinal among the random ATen operations of one forward of the whole, unsplit model. So a dropout has the same mask at
1, 2 or 16 stages, under every schedule, with and without recompute, and after a restart.

``Draws`` gives a whole forward its seeds (the plain loop uses it around the unmodified model); ``at`` gives them to one
call of a generated stage.

A module that runs as it is (``trace.opaque``) may draw another number of times at each call. Its call takes one
position of the whole model, whatever it draws, and everything inside draws from seeds made of that position: torch's
operations by their ordinal inside the module, Python's ``random`` and ``numpy.random`` from a seed that is set when the
module is entered. ``opaque_calls`` does this in the plain loop, ``inside`` in a stage.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# ranks may be threads of one process, which share the global generator: a seed and its draw must stay together
_GENERATOR = threading.RLock()
_MASK = (1 << 64) - 1


def exclusive() -> contextlib.AbstractContextManager[bool]:
    """Return the lock of the global generator: hold it around anything else that draws from it, such as a build."""
    return _GENERATOR


def seed_of(seed: int, minibatch: int, microbatch: int, position: int) -> int:
    """Return the seed of one random operation, in 0 .. 2**63 - 1.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
    applied after each part is added, so that neighbouring microbatches and positions have unrelated seeds.
    """
    state = 0
    for part in (seed, minibatch, microbatch, position):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def is_random(func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Tell whether an ATen call draws random numbers. Fused attention carries the tag even where it drops nothing."""
    tagged, rates = _random_arguments(func)
    for index, name, default in rates:
        value = args[index] if index < len(args) else (kwargs or {}).get(name, default)
        return value is None or value > 0
    return tagged


@functools.cache
def _random_arguments(func: Any) -> tuple[bool, list[tuple[int, str, Any]]]:
    """Return whether an operator may draw, and its arguments that say how much it drops: (index, name, default)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False, []
    arguments = enumerate(func._schema.arguments)
    return True, [(i, a.name, a.default_value) for i, a in arguments if a.name in ("dropout_p", "dropout")]


def _reseed(value: int, generator: torch.Generator | None = None) -> None:
    if generator is not None:
        generator.manual_seed(value)
        return
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotation for it
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """While active, the k-th random ATen operation draws from ``seed_of(seed, minibatch, microbatch, first + k)``."""

    def __init__(self, seed: int, minibatch: int, microbatch: int, first: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its __init__
        self.where = seed, minibatch, microbatch
        self.position = first
        self.paused = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # nor have these two
        _ACTIVE.draws = (*_active(), self)
        return self

    def __exit__(self, *error: object) -> None:
        _ACTIVE.draws = _active()[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        with _GENERATOR:
            _reseed(seed_of(*self.where, self.position), kwargs.get("generator"))
            self.position += 1
            return func(*args, **kwargs)


@contextlib.contextmanager
def at(where: tuple[int, int, int], position: int, count: int = 1) -> Iterator[None]:
    """Give the seeds to one call that makes ``count`` draws, the first at ``position``.

    ``where``: (run seed, minibatch, microbatch). A single draw costs one reseeding and no dispatch mode.
    """
    if count != 1:
        with Draws(*where, first=position):
            yield
        return
    with _GENERATOR:
        _reseed(seed_of(*where, position))
        yield


@contextlib.contextmanager
def flat_checkpoints() -> Iterator[None]:
    """Run what user-level ``checkpoint()`` wraps once and keep everything, as the captured graph does.

    The recomputation would draw other random numbers than the forward, since each draw is seeded by its position.
    """
    module: Any = torch.utils.checkpoint
    function: Any = module.CheckpointFunction
    generator, apply = module._checkpoint_without_reentrant_generator, vars(function).get("apply")

    def once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    module._checkpoint_without_reentrant_generator = once
    function.apply = staticmethod(lambda run, preserve, *args: run(*args))
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        if apply is None:
            del function.apply
        else:
            function.apply = apply


# --- modules that run as they are -------------------------------------------------------------------------------------

_ACTIVE = threading.local()


def _active() -> tuple[Draws, ...]:
    """Return the ``Draws`` that this thread is in, the innermost last."""
    draws: tuple[Draws, ...] = getattr(_ACTIVE, "draws", ())
    return draws


@contextlib.contextmanager
def inside(where: tuple[int, int, int], position: int) -> Iterator[None]:
    """Give one call of a module that runs as it is its random numbers: torch's, Python's and numpy's.

    ``where``: (run seed, minibatch, microbatch). Python's and numpy's generators are put back behind the call, so that
    the order in which a data hook shuffles does not depend on the model.
    """
    seed = seed_of(*where, position)
    with _GENERATOR:  # Python's and numpy's generators belong to the whole process
        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            with Draws(seed, 0, 0), flat_checkpoints():
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class _Entered:
    """The hooks around one plain forward: every outermost call of a module that runs as it is happens ``inside``."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self._depth = 0
        self._stack = contextlib.ExitStack()

    def enter(self, *_: Any) -> None:
        """Take the next position for the module, unless it is called by another one that runs as it is."""
        self._depth += 1
        if self._depth > 1:
            return
        position, self.draws.position = self.draws.position, self.draws.position + 1
        self._stack.enter_context(_suspended(self.draws))
        self._stack.enter_context(inside(self.draws.where, position))

    def leave(self, *_: Any) -> None:
        """Go back to the positions of the whole model."""
        self._depth -= 1
        if not self._depth:
            self._stack.close()


@contextlib.contextmanager
def _suspended(draws: Draws) -> Iterator[None]:
    """Let a ``Draws`` pass everything on: another one, inside of it, gives the seeds."""
    draws.paused = True
    try:
        yield
    finally:
        draws.paused = False


@contextlib.contextmanager
def opaque_calls(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Give the modules at ``paths`` the random numbers of their places, in a forward of the whole model.

    Nothing is done where the model runs outside of ``Draws``: then its random numbers are not compared with a stage's.
    """
    active = _active()
    modules = [model.get_submodule(path) for path in paths] if active else []
    entered = _Entered(active[-1]) if active else None
    hooks = []
    for module in modules:
        assert entered is not None
        hooks.append(module.register_forward_pre_hook(entered.enter, prepend=True))
        hooks.append(module.register_forward_hook(entered.leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
