"""What a forward has around it while its Python runs on tensors without numbers."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.script.devices import CPU
from autopipe.script.refusals import EffectError
from autopipe.trace.state.repeats import Start
from autopipe.users_code import is_own_file


def entered(regions: Sequence[Any]) -> contextlib.ExitStack:
    """Return a context in which the autocast regions of the script hold again."""
    stack = contextlib.ExitStack()
    for device, dtype, cache in regions:
        stack.enter_context(torch.autocast(device, dtype, True, cache))
    return stack


@contextlib.contextmanager
def unrecognized(device: torch.device) -> Iterator[None]:
    """Hide from libraries that a call is recorded: Hugging Face's models choose attention with a mask then.

    Without one, a GPU uses another kernel, which rounds and draws in another way. On the CPU both give the same.
    """
    answers = {"is_compiling": lambda: False, "is_exporting": lambda: False}
    hidden: list[tuple[Any, dict[str, Any]]] = [
        (torch.compiler, answers),
        (torch._subclasses, {"FakeTensor": type("FakeTensor", (), {})}),
    ]
    with contextlib.ExitStack() as stack:
        for place, values in hidden if device != CPU else ():
            before = {name: getattr(place, name) for name in values}
            stack.callback(vars(place).update, before)
            vars(place).update(values)
        yield


# what a forward must not call: its tensors have no numbers, and stages draw in the order of the script's generator
_REFUSED = [(place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
_REFUSED.extend(((torch.random, "fork_rng"), (torch, "save"), (torch, "load")))


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Refuse a forward that seeds a generator of torch, or saves or loads tensors.

    Raises: EffectError at what it does, and again at the end if the forward has caught it.
    """
    errors: list[EffectError] = []
    thread = threading.get_ident()

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if threading.get_ident() == thread and is_own_file(caller.f_code.co_filename):
                where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
                what = f"the forward calls {function.__module__}.{function.__name__}, which stages do not"
                errors.append(EffectError(what, where=where, remedy="call it before or after the model"))
                raise errors[0]
            return function(*args, **kwargs)

        return call

    originals = [(place, name, getattr(place, name)) for place, name in _REFUSED]
    for place, name, original in originals:
        setattr(place, name, refusing(original))
    try:
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def buffers_in_place(model: nn.Module) -> Iterator[None]:
    """Copy what the model binds its buffers to inside into the tensors that were registered, which are kept."""
    registries = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    yield
    for registry, own in registries:
        for name, tensor in own.items():
            now = registry.get(name)
            if now is not None and tensor is not None and now is not tensor:
                registry[name] = tensor.copy_(now)


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[Any, str]]]:
    """Collect what is written to standard output and standard error, also by logging: the stream and the text."""
    out, err = sys.stdout, sys.stderr
    printed: list[tuple[Any, str]] = []
    streams = {id(stream): _Printed(stream, printed) for stream in (out, err)}
    sys.stdout, sys.stderr = streams[id(out)], streams[id(err)]
    handlers = [entry() for entry in logging._handlerList]  # type: ignore[attr-defined]  # it has no public name
    logs = [h for h in handlers if isinstance(h, logging.StreamHandler) and id(h.stream) in streams]
    for handler in logs:
        handler.stream = streams[id(handler.stream)]
    try:
        yield printed
    finally:
        sys.stdout, sys.stderr = out, err
        for handler in logs:
            if isinstance(handler.stream, _Printed):
                handler.stream = handler.stream.stream


class _Printed:
    """Collects what is written to a stream, in the order of all streams."""

    def __init__(self, stream: Any, printed: list[tuple[Any, str]]) -> None:
        self.stream, self._printed = stream, printed

    def write(self, text: str) -> int:
        self._printed.append((self.stream, text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def restore(start: Start, model: nn.Module) -> None:
    """Restore Python state, but not what the model's tensors have: their memory may have moved (``state.parked``)."""
    own = [(vars(tensor), dict(vars(tensor))) for tensor in (*model.parameters(), *model.buffers())]
    start.restore()
    for attributes, values in own:
        attributes.clear()
        attributes.update(values)
