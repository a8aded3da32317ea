"""Randomness that does not depend on the layout.

Every random operation draws from a seed made of (run seed, minibatch, microbatch, position), where *position* is its
ordinal among the random ATen operations of one forward of the whole, unsplit model. So a dropout has the same mask at
1, 2 or 16 stages, under every schedule, with and without recompute, and after a restart.

``Draws`` gives a whole forward its seeds (the plain loop uses it around the unmodified model); ``at`` gives them to one
call of a generated stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
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
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[index] if index < len(args) else (kwargs or {}).get(argument.name, argument.default_value)
            return value is None or value > 0
    return True


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
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
