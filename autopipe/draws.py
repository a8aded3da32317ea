"""Random numbers that do not depend on how the model is partitioned.

Every random operation uses a seed derived from (run seed, minibatch, microbatch, position), where *position* is its
ordinal among the random ATen operations of one forward of the complete model. A dropout therefore has the same mask
with 1, 2 or 16 stages, under every schedule, with and without recomputation, and after a restart.

``Draws`` seeds a complete forward (the plain loop uses it around the unmodified model); ``at`` seeds one call of a
generated stage.

An opaque module (``trace.opaque``) may draw a different number of times in each call. Its call takes one position of
the complete model, and everything inside derives its seeds from that position: torch's operations by their ordinal
inside the module, Python's ``random`` and ``numpy.random`` from a seed that is set on entry. ``opaque_calls`` does this
in the plain loop, ``inside`` in a stage.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

# ranks may be threads of one process, which share the global generator: setting a seed and drawing must be atomic
_GENERATOR = threading.RLock()
_MASK = (1 << 64) - 1


def exclusive() -> contextlib.AbstractContextManager[bool]:
    """Return the lock of the global generator. Hold it around any other code that draws from it, such as a build."""
    return _GENERATOR


def states_of_generators() -> dict[str, Any]:
    """Return the states of the global generators by name, which change with every draw."""
    numpy = np.random.get_state(legacy=False)
    return {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's global generator": json.dumps(numpy, default=lambda array: array.tolist()),
        "Python's global generator (random)": random.getstate(),
    }


def random_states() -> tuple[torch.Tensor, Any, Any]:
    """Return the states of the global generators of torch's CPU, numpy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: tuple[torch.Tensor, Any, Any]) -> None:
    """Set these generators to states that ``random_states`` returned."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextlib.contextmanager
def generators_outside_torch_restored() -> Iterator[None]:
    """Restore the global generators of numpy and Python after the block. torch's own stays where the block left it."""
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def seed_of(seed: int, minibatch: int, microbatch: int, position: int) -> int:
    """Return the seed of one random operation, in 0 .. 2**63 - 1.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
    applied after each part is added, so that adjacent microbatches and positions have unrelated seeds.
    """
    state = 0
    for part in (seed, minibatch, microbatch, position):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def is_random(func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Return whether an ATen call draws random numbers. Fused attention has the tag even with a dropout rate of 0."""
    tagged, rates = _random_arguments(func)
    for index, name, default in rates:
        value = args[index] if index < len(args) else (kwargs or {}).get(name, default)
        return value is None or value > 0
    return tagged


@functools.cache
def _random_arguments(func: Any) -> tuple[bool, list[tuple[int, str, Any]]]:
    """Return whether an operator may draw, and its dropout rates: (index, name, default) of the arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False, []
    arguments = enumerate(func._schema.arguments)
    return True, [(i, a.name, a.default_value) for i, a in arguments if a.name in ("dropout_p", "dropout")]


def _reseed(value: int, generator: torch.Generator | None = None) -> None:
    if generator is not None:
        generator.manual_seed(value)
        return
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """A mode that the compiler does not trace. Another one of torch imports the compiler at its first operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
        plain: Any = cls.__torch_dispatch__
        disabled: Any = _disable_dynamo(plain)

        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (disabled if "torch._dynamo" in sys.modules else plain)(self, *args, **kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While active, the k-th random ATen operation draws from ``seed_of(seed, minibatch, microbatch, first + k)``."""

    def __init__(self, seed: int, minibatch: int, microbatch: int, first: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.where = seed, minibatch, microbatch
        self.position = first
        self.paused = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
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
    """Seed one call that draws ``count`` times, the first time at ``position``.

    ``where``: (run seed, minibatch, microbatch). A single draw costs one seeding and no dispatch mode.
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
    """Run functions under the user's ``torch.utils.checkpoint`` once and keep all values, as the captured graph does.

    A recomputation would draw other random numbers than the forward, because its draws have later positions.
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


# --- recurrent layers on CUDA -----------------------------------------------------------------------------------------


class _WithoutCudnn:
    """Disables cuDNN in this process while calls are open, which may be in several threads."""

    def __init__(self) -> None:
        self._lock, self._open, self._enabled = threading.Lock(), 0, True

    def __reduce__(self) -> str:
        """Return its name: copies of a module share the one of the process."""
        return "_WITHOUT_CUDNN"

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Open a call. A module that does not train draws nothing, and keeps cuDNN."""
        if not module.training:
            return
        module.__dict__["_autopipe_opened"] = True
        with self._lock:
            if not self._open:
                self._enabled = torch._C._get_cudnn_enabled()
                torch._C._set_cudnn_enabled(False)
            self._open += 1

    def leave(self, module: nn.Module, *_: Any) -> None:
        """End a call of a module. After the last one, cuDNN is as it was before the first."""
        if not module.__dict__.pop("_autopipe_opened", False):
            return
        with self._lock:
            self._open -= 1
            if not self._open:
                torch._C._set_cudnn_enabled(self._enabled)


_WITHOUT_CUDNN = _WithoutCudnn()


def seed_recurrent_layers(model: nn.Module, device: torch.device) -> int:
    """Let LSTM, GRU and RNN layers with dropout draw from the seeds on CUDA too, and return their number.

    cuDNN keeps the state of this dropout from the first call on, and ignores later seeds (pytorch issue 74177). So in
    training these layers run without cuDNN: as a product and a cell for each step, with one draw between two layers, as
    on the CPU. They are slower. Other layers, and other devices, do not change.
    """
    if device.type != "cuda":
        return 0
    count = 0
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            count += 1
            if not module.__dict__.get("_autopipe_seeded"):
                module.__dict__["_autopipe_seeded"] = True
                module.register_forward_pre_hook(_WITHOUT_CUDNN.enter, prepend=True)
                module.register_forward_hook(_WITHOUT_CUDNN.leave, always_call=True)
    return count


# --- opaque modules ---------------------------------------------------------------------------------------------------

_ACTIVE = threading.local()


def _active() -> tuple[Draws, ...]:
    """Return the active ``Draws`` of this thread, the innermost last."""
    draws: tuple[Draws, ...] = getattr(_ACTIVE, "draws", ())
    return draws


@contextlib.contextmanager
def inside(where: tuple[int, int, int], position: int) -> Iterator[None]:
    """Seed the generators of torch, Python and numpy for one call of an opaque module.

    ``where``: (run seed, minibatch, microbatch). Python's and numpy's generators are restored after the call, so that
    the shuffling of a data hook does not depend on the model.
    """
    seed = seed_of(*where, position)
    # Python's and numpy's generators belong to the whole process
    with _GENERATOR, generators_outside_torch_restored():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        with Draws(seed, 0, 0), flat_checkpoints():
            yield


class _Entered:
    """The hooks of a plain forward that run every outermost call of an opaque module ``inside``."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self._depth = 0
        self._stack = contextlib.ExitStack()

    def enter(self, *_: Any) -> None:
        """Take the next position for the module, unless another opaque module calls it."""
        self._depth += 1
        if self._depth > 1:
            return
        position, self.draws.position = self.draws.position, self.draws.position + 1
        self._stack.enter_context(_suspended(self.draws))
        self._stack.enter_context(inside(self.draws.where, position))

    def leave(self, *_: Any) -> None:
        """Return to the positions of the complete model."""
        self._depth -= 1
        if not self._depth:
            self._stack.close()


@contextlib.contextmanager
def _suspended(draws: Draws) -> Iterator[None]:
    """Disable a ``Draws`` within the block, where another one sets the seeds."""
    draws.paused = True
    try:
        yield
    finally:
        draws.paused = False


@contextlib.contextmanager
def opaque_calls(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Seed the opaque modules at ``paths`` by their positions, in a forward of the complete model.

    Does nothing outside of ``Draws``, because such random numbers are not compared with those of a stage.
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
