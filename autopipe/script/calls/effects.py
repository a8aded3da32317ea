"""What a forward does besides computing: it would happen while the call is recorded, and in no later call.

A forward may keep what it will not change again: a mask of the length of its input, or an option that it derives from
the first labels. It is run once for that, and recorded again. If it sets something again, keeps a result, writes a
line or opens a file, it is refused by name.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.script.calls.accesses import Accesses
from autopipe.script.calls.contents import PLAIN
from autopipe.script.calls.fingerprint import OF_A_MODULE, places, reached
from autopipe.script.calls.reached import UNSET, bind, value_in
from autopipe.script.devices import generators, set_generators
from autopipe.script.refusals import DoneError, EffectError
from autopipe.trace.record.containers import attributes, refill
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.tensor_nodes import TensorNodes
from autopipe.users_code import is_own_file

_FLAG = "requires_grad"
_ONCE = "which would happen only while the call is recorded"
_RETURN = "return it; or count in a buffer"


class Effects:
    """What a forward may set, before it runs. ``settled``: it has been run, and must set nothing.

    ``kept``: what the forward has set does not depend on the inputs, as far as one recording shows.
    """

    def __init__(self, model: nn.Module, *, settled: bool) -> None:
        self.model, self.settled = model, settled
        self.code = reached(model)
        self.kept = False
        self.sets: dict[tuple[int, str], Any] = {}  # (module, name) of what it sets to outputs and plain values
        self._contents: list[tuple[Any, Any]] = []
        self._bindings = self.code.bindings()
        self._before = self._now(self._contents)
        self._computed = {key: count for key, _, count in self.code.memoized()}

    def _now(self, contents: list[tuple[Any, Any]]) -> dict[Hashable, tuple[str, Hashable]]:
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # the comparison is not recorded
            state = {key: (name, value) for key, name, value in places(self.model, self.code, contents)}
            for name, parameter in self.model.named_parameters():
                state[_FLAG, name] = (f"requires_grad of {name}", parameter.requires_grad)
            return state

    def _changed(self) -> dict[Hashable, str]:
        now = self._now([])
        every = {**now, **self._before}
        absent = ("", UNSET)
        return {
            key: name for key, (name, _) in every.items() if self._before.get(key, absent)[1] != now.get(key, absent)[1]
        }

    def after(self, recorder: Recorder, accesses: Accesses) -> None:
        """Look at what the forward has set, and undo it, except for attributes of modules.

        ``sets`` has the attributes that it sets in every call to an output or a plain value, before it reads them.

        Raises: EffectError; DoneError for what cannot be undone.
        """
        dependent, known = _dependent(recorder), recorder.writer.known
        modules = list(self.model.modules())
        self.sets = {
            (number, name): value
            for number, module in enumerate(modules)
            for name, value in vars(module).items()
            if accesses.is_set_first(module, name) and _is_settable(value, dependent, known)
        }
        changed = self._changed()
        changed = {key: name for key, name in changed.items() if not self._is_set(key)}
        computed = {key: name for key, name, count in self.code.memoized() if self._computed.get(key, 0) != count}
        if not changed and not computed:
            return
        values: dict[Hashable, Any] = {}
        key: Any
        for key in changed:
            if key in self._bindings:
                values[key] = value_in(*self._bindings[key][:2])
            elif isinstance(key, tuple) and key[0] == OF_A_MODULE:
                _, number, name = key
                values[key] = vars(modules[number]).get(name)
        self._undo(changed)
        for function in self.code.functions_of(computed):
            function.cache_clear()  # the results are of the recording
        for key, name in changed.items():
            kept = _tensors_in(values.get(key))
            if self.settled or any(not known.has(tensor) or known.node(tensor) in dependent for tensor in kept):
                raise EffectError(f"the forward sets {name}, {_ONCE}", remedy=_RETURN)
        if computed and self.settled:
            raise EffectError(f"{next(iter(computed.values()))} computes a result in every call, and keeps it")
        self.kept = True

    def _is_set(self, key: Any) -> bool:
        return isinstance(key, tuple) and key[0] == OF_A_MODULE and key[1:] in self.sets

    def _undo(self, changed: dict[Hashable, str]) -> None:
        """Restore globals, attributes of classes and the content of objects. Modules are restored by the recorder."""
        for key in changed:
            if key in self._bindings:
                bind(*self._bindings[key])
        own = {id(vars(module)) for module in self.model.modules()}
        for container, content in self._contents:
            if id(container) not in own:
                with contextlib.suppress(AttributeError, TypeError):
                    refill(container, content)
        left = self._now([])
        for key, name in changed.items():
            if not _is_of_a_module(key) and left.get(key, ("", UNSET))[1] != self._before.get(key, ("", UNSET))[1]:
                raise DoneError(f"the forward changes {name}, {_ONCE}", remedy=_RETURN)


def _is_of_a_module(key: Any) -> bool:
    """Return whether a place is an attribute of a module, or of a parameter. The recorder restores those."""
    return isinstance(key, tuple) and key[0] in (OF_A_MODULE, _FLAG)


def _is_settable(value: Any, dependent: set[fx.Node], known: TensorNodes) -> bool:
    """Return whether a value consists of tensors that depend on the inputs, and of plain values."""
    return all(
        (isinstance(leaf, FakeTensor) and known.has(leaf) and known.node(leaf) in dependent) or isinstance(leaf, PLAIN)
        for leaf in pytree.tree_leaves(value)
    )


def _tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """Return the fake tensors in a value: those of the recording."""
    if isinstance(value, Tensor):
        return [value] if isinstance(value, FakeTensor) else []
    if depth == 0 or isinstance(value, (str, bytes)):
        return []
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        value = list((attributes(value) or {}).values())
    return [tensor for entry in value for tensor in _tensors_in(entry, depth - 1)]


def _dependent(recorder: Recorder) -> set[fx.Node]:
    """Return the calls that depend on the inputs, parameters, buffers or random numbers."""
    state = recorder.faked_model.names.values()
    names = set(state) | set(recorder.faked_model.aliases)
    dependent: set[fx.Node] = set()
    for node in recorder.graph.nodes:
        source = node.op in ("placeholder", "call_module") or (node.op == "get_attr" and node.target in names)
        if source or node.meta.get("random", (0, 0))[1] or any(entry in dependent for entry in node.all_input_nodes):
            dependent.add(node)
    return dependent


def computation(recorder: Recorder) -> list[str]:
    """Return the calls that depend on more than constants, in order: equal lists compute in the same way."""
    dependent = _dependent(recorder)
    return [str(node.target) for node in recorder.graph.nodes if node.op != "get_attr" and node in dependent]


class _Watch:
    """What the forward does outside of the process. The first is kept, because the forward may catch the error."""

    def __init__(self) -> None:
        self.error: EffectError | None = None
        self._thread = threading.get_ident()

    @property
    def is_here(self) -> bool:
        """Whether this thread runs the forward. Other threads of the script do what they like."""
        return threading.get_ident() == self._thread

    def refuse(self, what: str) -> None:
        """Refuse what the forward is about to do, so that it is not done."""
        self.error = self.error or EffectError(f"the forward {what}, {_ONCE}", where=_line())
        raise self.error


class _Stream(io.TextIOBase):
    """Standard output or error while a forward is recorded."""

    def __init__(self, watch: _Watch, stream: Any, name: str, *, libraries: bool) -> None:
        self._watch, self._stream, self._name, self._libraries = watch, stream, name, libraries

    def write(self, text: str) -> int:
        if not self._watch.is_here or (self._libraries and not _line()):
            return int(self._stream.write(text))
        self._watch.refuse(f"writes {text.strip()[:60]!r} to {self._name}")
        return 0


_watching: list[_Watch] = []
_hooked: list[None] = []
_EVENTS = ("open", "os.", "subprocess.", "socket.", "shutil.")
_ALLOWED = (
    "importlib",
    "linecache",
    "warnings",
    "tokenize",
    "inspect",
)  # modules of Python that open files on their own


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event.startswith(_EVENTS) and _watching[-1].is_here and _line():
        what = f"opens {args[0]!r}" if event == "open" else f"calls {event}"
        _watching[-1].refuse(what)


def _line() -> str:
    """Return ``file:line`` of the innermost call outside of torch, Python and installed packages; "" if it is ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_ALLOWED) or file.startswith("<frozen importlib"):
            return ""
        if is_own_file(file):
            return f"{file}:{frame.f_lineno}"
        if module.startswith("autopipe.") and module != __name__:
            return ""
        frame = frame.f_back
    return ""


# functions that a forward must not call: (module, name)
_OF_TORCH = [(place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
_OF_TORCH.extend(((torch.random, "fork_rng"), (torch, "save"), (torch, "load")))
_OF_PYTHON = [(os, name) for name in ("stat", "lstat", "access", "read", "write")]  # they raise no audit event
_CLOCKS = [
    (time, name)
    for clock in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for name in (clock, f"{clock}_ns")
]
_CLOCKS.extend((time, name) for name in ("localtime", "gmtime", "ctime", "strftime"))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Refuse a forward that writes to standard output, or itself to standard error or a log, or that opens files.

    Raises: EffectError at what it does, and again at the end if the forward has caught it.
    """
    if not _hooked:
        _hooked.append(None)
        sys.addaudithook(_audit)
    watch = _Watch()
    handle: Callable[..., Any] = logging.Logger.handle

    def refuse(logger: logging.Logger, record: logging.LogRecord) -> None:
        if watch.is_here and _line():
            watch.refuse(f"logs {record.getMessage()[:60]!r}")
        handle(logger, record)

    out, err = sys.stdout, sys.stderr
    sys.stdout = _Stream(watch, out, "standard output", libraries=False)
    sys.stderr = _Stream(watch, err, "standard error", libraries=True)
    logging.Logger.handle = refuse  # type: ignore[method-assign,assignment]
    originals = [(place, name, getattr(place, name)) for place, name in (*_OF_TORCH, *_OF_PYTHON, *_CLOCKS)]
    for place, name, original in originals:
        setattr(place, name, _refusing(watch, original, direct=place is not os))
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.pop()
        sys.stdout, sys.stderr = out, err
        logging.Logger.handle = handle  # type: ignore[method-assign]
        for place, name, original in originals:
            setattr(place, name, original)
    if watch.error is not None:
        raise watch.error


def _refusing(watch: _Watch, function: Callable[..., Any], *, direct: bool) -> Callable[..., Any]:
    """Return a function that the script must not call. ``direct``: torch may, such as for checkpoints."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if watch.is_here and (is_own_file(sys._getframe(1).f_code.co_filename) if direct else _line()):
            watch.refuse(f"calls {function.__module__}.{function.__name__}")
        return function(*args, **kwargs)

    return call


def settle(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> None:
    """Run the forward for the attributes that it sets; buffers and random numbers stay as they are.

    ``device``: of the model.
    """
    states = generators(device)
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    with torch.no_grad():
        try:
            model(*args, **kwargs)
        finally:
            for registered, own in buffers:
                registered.update(own)  # the forward may have bound other tensors
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            set_generators(states, device)
