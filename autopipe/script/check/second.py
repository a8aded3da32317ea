"""The second process of ``--check``: it goes on with the script from the first training call, without stages.

It tells the first process its weights and output after some steps, and why it ends before the last one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import io
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autopipe.bits import bytes_of
from autopipe.script.calls.whole_batches import WholeBatches
from autopipe.script.check import isolation, kernel, loaders
from autopipe.script.check.files import PrivateFiles
from autopipe.script.devices import device_of
from autopipe.script.joined_parts import call_in_parts
from autopipe.script.lazy import contains_lazy
from autopipe.script.model_detection import Choice, leaves_of, names_of
from autopipe.script.refusals import script_place
from autopipe.script.state.remote import plain
from autopipe.script.state.weights import named_tensors
from autopipe.script.wire import GoneError, Wire, is_readable

_SECONDS = 60.0  # until the last message is read


class Output:
    """What is written to a stream from now on."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._parts = stream, list[str]()
        write = stream.write

        def recorded(text: str) -> Any:
            self._parts.append(text)
            return write(text)

        with contextlib.suppress(AttributeError):  # a stream of another kind: nothing is recorded
            stream.write = recorded

    def text(self) -> str:
        """Return it."""
        return "".join(self._parts)

    def end(self) -> None:
        """Record no more."""
        with contextlib.suppress(AttributeError):
            del self._stream.write


def digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of the bits of each parameter and buffer, by name."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name: _digest(tensor.detach()) for name, tensor in named_tensors(model).items()}


class InputsAfterPoint:
    """The inputs of the first training call after a comparison."""

    def __init__(self) -> None:
        self._digests, self._is_awaited = ("", ""), False

    def note(self, args: Any, kwargs: Any) -> None:
        """Note a call of the model."""
        if self._is_awaited and torch.is_grad_enabled():
            self._is_awaited = False
            self._digests = ("", "") if contains_lazy((args, kwargs)) else _inputs_of(args, kwargs)

    def taken(self) -> tuple[str, str]:
        """Return digests of the tensors and numbers of the call, and of what draws them, and wait for the next call.

        "": not known.
        """
        inputs, self._digests, self._is_awaited = self._digests, ("", ""), True
        return inputs


def _inputs_of(args: Any, kwargs: Any) -> tuple[str, str]:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return _digest_of_inputs(args, kwargs), _digest_of_generators()
        except (RuntimeError, TypeError):  # tensors without memory, such as nested ones
            return "", ""


def _digest_of_inputs(args: Any, kwargs: Any) -> str:
    parts = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor):
            parts.append(repr(leaf) if isinstance(leaf, bool | int | float | str) else "")
        elif type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return ""
        else:
            parts.append(_digest(leaf.detach()))
    return " ".join(parts)


def _digest_of_generators() -> str:
    """Return a digest of the state of the global generators of Python, torch and numpy."""
    states: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if "numpy" in sys.modules:
        leaves = pytree.tree_leaves(sys.modules["numpy"].random.get_state(legacy=False))
        states += [leaf.tobytes() if hasattr(leaf, "tobytes") else leaf for leaf in leaves]
    return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> str:
    form = f"{tuple(tensor.shape)} {tensor.dtype} "
    memory: Any = bytes_of(tensor).numpy()
    return form + hashlib.blake2b(memory, digest_size=16).hexdigest()


class Second:
    """The second process, from its own side.

    ``points``: the numbers of steps after which it tells its weights; it ends after ``last`` steps. ``parts``: into
    which a batch is cut. ``whole``: decides which batches are not.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: Choice,
        output: Output,
        points: Collection[int],
        last: int,
        parts: int,
        whole: WholeBatches | None,
    ) -> None:
        self.model, self.choice, self.output, self.points, self.last = model, choice, output, points, last
        self.parts, self.whole = parts, whole
        self._replicas = 0  # that compute the parts; 0: the first process has not told it yet
        self.steps = 0
        self._begin, self._step_seconds = 0.0, 0.0  # of the second step: the first one allocates
        self._inputs = InputsAfterPoint()
        self._thread = threading.get_ident()
        self._errors = io.StringIO()

    def begin(self, end: socket.socket, owner: int, trace: int) -> None:
        """Separate this process from the first one, whose process descriptor is ``owner``.

        ``end``: of the socket to the first process. ``trace``: a file for the stack at which the kernel ends this one.
        """
        self.wire = Wire(end)
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            opened = isolation.separate_descriptors({end.fileno(), owner, trace})
            isolation.separate_memory()
            threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()
            faulthandler.register(signal.SIGSYS, trace, all_threads=False, chain=True)
            sys.stderr = self._errors
            PrivateFiles(self.stop, opened).install()
            loaders.follow(self.wire, self.stop)
            kernel.forbid()
        except BaseException as error:  # nothing of the script may run here
            self._leave({"stopped": f"the second process cannot start: {error}"})

    def call(self, module: nn.Module, args: Any, kwargs: Any, call: Any) -> Any:
        """Call a module as the script does."""
        if module is self.model:
            number = self.choice.by_hand(module)
            if number:
                self._done(number - 1)
        return self.first_call(module, args, kwargs, call)

    def first_call(self, module: nn.Module, args: Any, kwargs: Any, call: Any) -> Any:
        """Call a module, with a batch that is cut if it is the model."""
        if module is self.model:
            self._inputs.note(args, kwargs)
        if module is self.model and torch.is_grad_enabled() and self._cuts(args, kwargs):
            return call_in_parts(module, functools.partial(call, module), args, kwargs, self.parts, self._replicas)
        return call(module, *args, **kwargs)

    def _stays_whole(self, args: Any, kwargs: Any) -> bool:
        if self.whole is None:
            return False
        trial = functools.partial(plain, named_tensors(self.model))
        return bool(self.whole.reason(self.model, args, kwargs, self.parts, device_of(self.model), trial))

    def _cuts(self, args: Any, kwargs: Any) -> bool:
        is_cut = self.parts > 1 and not self._stays_whole(args, kwargs)
        if is_cut and not self._replicas:
            self._replicas = self.wire.receive()["replicas"]
            if not self._replicas and self.whole is not None:
                self.whole.always = "parts are not worth it"
        return is_cut and self._replicas > 0

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer."""
        own = {id(parameter) for parameter in self.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self.steps += 1
            now = time.monotonic() - self.wire.waited_seconds
            if self.steps == 2:
                self._step_seconds = now - self._begin
            self._done(self.steps)
            self._begin = time.monotonic() - self.wire.waited_seconds

    def _done(self, steps: int) -> None:
        if steps in self.points:
            text, inputs = self.output.text(), self._inputs.taken()
            own = {"digests": digests(self.model), "inputs": inputs, "seconds": self._step_seconds}
            self._tell({"steps": steps, "output": text, **own})
        if steps >= self.last:
            self._leave({"stopped": ""})

    def backward(self, tensors: Any) -> None:
        """Look for other modules that a backward through the model reaches."""
        if torch._C._current_graph_task_id() != -1:  # inside of another backward, as that of a checkpoint is
            return
        own = {id(parameter) for parameter in self.model.parameters()}
        leaves = leaves_of([tensors] if isinstance(tensors, Tensor) else tensors)
        others = [leaf for leaf in leaves if id(leaf) not in own]
        if self.whole is not None and len(others) < len(leaves):
            self.whole.seen_backward()
        if others and len(others) < len(leaves):
            names = names_of(self.choice, self.model, others)
            names = names or f"{self.choice.names[self.model]} and other tensors are trained together"
            self._leave({"together": f"{names}, by one backward", "where": script_place()})

    def stop(self, reason: str) -> NoReturn:
        """End, and tell where."""
        where = script_place()
        self._leave({"stopped": f"the script {reason}" + (f" at {where}" if where else "")})

    def end(self, code: int) -> NoReturn:
        """End with the script."""
        lines = self._errors.getvalue().strip().splitlines()
        self._leave({"stopped": f"the script ended in the second process: {lines[-1]}" if code and lines else "ended"})

    def _tell(self, message: Any) -> None:
        try:
            self.wire.send(message)
        except GoneError:
            os._exit(0)
        self.wire.flush()  # the kernel may end this process at the next moment

    def _leave(self, message: Any) -> NoReturn:
        try:
            self._tell(message)
            self.wire.close(_SECONDS)
        finally:
            os._exit(0)


def _end_with(owner: int) -> None:
    """End this process when the first one has ended."""
    is_readable(owner, None)
    os._exit(4)


def fork(second: Second, alive: Callable[[], None]) -> tuple[Wire, int, int] | None:
    """Fork the second process; return the connection, its number, and the file for its stack. None in that process.

    ``alive``: called while the first process waits. The new one is not a child of it: a script may wait for all its
    children.

    Raises: CannotError, OSError.
    """
    isolation.pause_threads()
    state = random.getstate()
    trace = os.memfd_create("trace")
    here, there = socket.socketpair()
    number, writer = os.pipe()
    owner = os.pidfd_open(os.getpid())
    child = -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
            if child == 0:
                _fork_again(writer)
    finally:
        if child:
            there.close()
            os.close(owner)
            os.close(writer)
    if child == 0:
        random.setstate(state)  # python has given this process another seed
        here.close()
        second.begin(there, owner, trace)
        return None
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    text = os.read(number, 64)
    os.close(number)
    if not text:
        raise isolation.CannotError("too many processes, or too little memory, at the moment")
    return Wire(here, alive), int(text), trace


def _fork_again(writer: int) -> None:
    """Return in a process that is not a child of the script's, and end this one. ``writer``: for its number."""
    process = -1
    try:
        process = os.fork()
        if process:
            os.write(writer, str(process).encode())
    finally:
        if process:
            os._exit(0)
