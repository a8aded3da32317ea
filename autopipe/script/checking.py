"""``--check``: the first steps of the script in a process of its own, compared with the same steps in stages.

The second process is forked before the script begins, so that both have the same hash seed and generators. It runs the
script with nothing replaced but the step of optimizers, which it counts, and ends after the last step to compare.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import RunError
from autopipe.script.batches.cutting import call_in_parts
from autopipe.script.choosing import Choice
from autopipe.script.codec import same_bytes
from autopipe.script.controller import Controller
from autopipe.script.execution import execute
from autopipe.script.patches import Patches
from autopipe.script.state.weights import named_tensors
from autopipe.script.wire import GoneError, Wire


class DiffersError(RunError):
    """The weights in stages differ from those of the script in a process of its own."""


class _Recorded(io.TextIOBase):
    """Standard output that also keeps what is written. ``hidden``: write nothing."""

    def __init__(self, stream: Any, *, hidden: bool) -> None:
        self._stream, self._hidden = stream, hidden
        self.kept: list[str] = []

    def write(self, text: str) -> int:
        self.kept.append(text)
        return len(text) if self._hidden else int(self._stream.write(text))

    def flush(self) -> None:
        if not self._hidden:
            self._stream.flush()

    def __getattribute__(self, name: str) -> Any:
        if name in ("write", "flush", "kept", "_stream", "_hidden", "__class__", "writelines", "__dict__"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("_stream"), name)


class Reference:
    """The second process. ``steps``: optimizer steps of the model to compare."""

    def __init__(self, process: int, wire: Wire, steps: int, patches: Patches) -> None:
        self.process, self.wire, self.steps, self.patches = process, wire, steps, patches
        self._output: _Recorded | None = None
        self._done = False

    @classmethod
    def started(cls, script: Path, words: list[str], text: bytes, steps: int, patches: Patches) -> Reference:
        """Fork the process, which runs the script up to ``steps`` optimizer steps and sends output and weights."""
        import random

        import numpy as np

        # both processes must draw the same, also where the script sets no seed
        random.seed(os.urandom(16))
        np.random.seed(int.from_bytes(os.urandom(4), "little"))
        torch.initial_seed()  # torch's generator exists before the fork
        state = random.getstate()
        sys.stdout.flush()
        sys.stderr.flush()
        here, there = socket.socketpair()
        process = os.fork()
        if process:
            there.close()
            return cls(process, Wire(here), steps, patches)
        here.close()
        random.setstate(state)  # python has given the child another seed
        os.setsid()
        code = 1
        try:
            _follow(os.getppid())
            code = _run(script, words, text, steps, there, patches.parts)
        finally:
            os._exit(code)

    def watch(self, patches: Patches) -> None:
        """Compare when the script has made its steps here."""
        self._output = _Recorded(sys.stdout, hidden=False)
        sys.stdout = self._output
        patches.on_step = lambda controller: self._stepped(controller, controller.steps)
        patches.on_call = self._stepped

    def _stepped(self, controller: Controller, steps: int) -> None:
        if self._done or steps < self.steps:
            return
        self._done = True
        assert self._output is not None
        text = "".join(self._output.kept)
        sys.stdout = self._output._stream
        controller.weights.touch(())
        try:
            answer = self.wire.receive()
        except GoneError:
            controller.notes.say(f"not checked: the script in a process of its own ended before {self.steps} steps")
            return
        self.compare(controller, text, answer["output"], answer["weights"])
        controller.notes.synchronized()

    def compare(self, controller: Controller, text: str, expected: str, weights: dict[str, Tensor]) -> None:
        """Compare output and weights.

        Raises: DiffersError if the weights differ.
        """
        own = controller.weights.tensors
        with torch._C.DisableTorchFunctionSubclass():
            different = [n for n, value in weights.items() if n not in own or not same_bytes(own[n].detach(), value)]
        if different or weights.keys() != own.keys():
            names = ", ".join(different[:3]) or "their names"
            raise DiffersError(
                f"after {self.steps} optimizer steps, {len(different)} of {len(weights)} tensors differ from "
                f"those of the script in a process of its own: {names}",
                remedy="report it as a bug of autopipe; --check 0 runs without the comparison",
            )
        lines = _differing(text, expected)
        if lines:
            controller.notes.say(
                f"the weights are equal after {self.steps} optimizer steps, and standard output differs: "
                f"{lines[0]!r} here, {lines[1]!r} in a process of its own"
            )
        else:
            other = "one process" if controller.parts is None else "one process that joins the same parts"
            controller.notes.say(
                f"checked: {len(weights)} tensors and standard output equal those of {other}, "
                f"after {self.steps} optimizer steps"
            )

    def end(self) -> None:
        """End the process, if it still runs."""
        if not self._done:
            self.patches.notes.say(f"not checked: the script ended before {self.steps} optimizer steps")
        if not self._done and self._output is not None and sys.stdout is self._output:
            sys.stdout = self._output._stream
        with contextlib.suppress(OSError):
            os.killpg(self.process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(self.process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, 0)
        self.wire.close(0.0)


_TIMES = re.compile(
    r"\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*(?:ms|us|s|sec|secs|seconds|min|it/s|s/it|h|samples/s|tokens/s)\b"
    r"|(?:time|elapsed|runtime|seconds|per_second|date|took|dt|mfu)[^\d\n]{0,12}-?\d[\d.,:e+-]*%?",
    re.IGNORECASE,
)


def _differing(text: str, expected: str) -> tuple[str, str] | None:
    """Return the first lines that differ, times left out; None if they are equal."""
    ours, theirs = text.splitlines(), expected.splitlines()
    for a, b in zip(ours, theirs, strict=False):
        if a != b and _TIMES.sub("", a) != _TIMES.sub("", b):
            return a, b
    if len(ours) != len(theirs):
        rest = (ours, theirs)[len(theirs) > len(ours)][min(len(ours), len(theirs))]
        return (rest, "") if len(ours) > len(theirs) else ("", rest)
    return None


def _run(script: Path, words: list[str], text: bytes, steps: int, end: socket.socket, parts: int) -> int:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    output = _Recorded(sys.stdout, hidden=True)
    sys.stdout = output
    wire = Wire(end)

    def enough(model: nn.Module) -> None:
        weights = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        wire.send({"output": "".join(output.kept), "weights": weights})
        wire.close(60.0)
        os._exit(0)

    _Counting(steps, enough, parts).install()
    execute(script, words, text)
    return 0


class _Counting:
    """Counts the steps of the optimizer of the model that stages would train. ``parts``: into which it cuts batches."""

    def __init__(self, steps: int, enough: Callable[[nn.Module], None], parts: int = 1) -> None:
        self.steps, self.enough, self.parts = steps, enough, parts
        self.model: nn.Module | None = None
        self.count = 0

    def install(self) -> None:
        """Replace the call of modules and the steps of optimizers."""
        call, initialize, backward = nn.Module.__call__, Optimizer.__init__, torch.autograd.backward
        choice = Choice()

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.model is None:
                if choice.takes(module):
                    self.model = module
            elif module is self.model and choice.by_hand(module) > self.steps:
                self.enough(module)
            if module is self.model and self.parts > 1 and torch.is_grad_enabled():
                return call_in_parts(functools.partial(call, module), args, kwargs, self.parts)
            return call(module, *args, **kwargs)

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            kind = type(optimizer)
            if not getattr(kind.step, "autopipe", False):
                kind.step = self._stepping(kind.step)  # type: ignore[method-assign]
            initialize(optimizer, *args, **kwargs)
            choice.optimizers.add(optimizer)

        def backward_of(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            if self.model is None:
                choice.seen_backward()
            return result

        nn.Module.__call__ = called  # type: ignore[method-assign]
        Optimizer.__init__ = init  # type: ignore[method-assign,assignment]
        torch.autograd.backward = backward_of

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = step(optimizer, *args, **kwargs)
            if self.model is not None:
                own = {id(parameter) for parameter in self.model.parameters()}
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                    self.count += 1
                    if self.count == self.steps:
                        self.enough(self.model)
            return result

        stepped.autopipe = True  # type: ignore[attr-defined]
        return stepped


def _follow(parent: int) -> None:
    """End this process when its parent has ended."""
    import threading
    import time

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(4)

    threading.Thread(target=watch, name="parent", daemon=True).start()
