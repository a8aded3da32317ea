"""``Reference``: the second process of ``--check``, from the side of the process whose model runs in stages.

It is forked at the first training call, so everything before it happens once; from there on both processes have the
same memory, generators and open files. What the second one changes outside of itself is kept from the system.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.errors import RunError, counted
from autopipe.script.calls.whole_batches import WholeBatches
from autopipe.script.check import kernel, loaders
from autopipe.script.check.isolation import CannotError
from autopipe.script.check.second import InputsAfterPoint, Output, Second, digests, fork
from autopipe.script.controller import Controller
from autopipe.script.model_detection import REMEDY, Choice
from autopipe.script.refusals import refused
from autopipe.script.run_summary import Notes
from autopipe.script.wire import GoneError
from autopipe.script.wrappers import is_compiled
from autopipe.users_code import is_own_file

_IDLE_SECONDS = 10.0  # without computing: it waits for what only the first process has
# the second process may take so many times as long as the first one, but so many seconds in any case
_SLOWER, _LEAST_SECONDS = 3.0, 30.0
_LEAST_WITHOUT_THREADS = 10.0  # of a script that has threads, which a forked process has not
_AHEAD = 2  # optimizer steps that the second process makes before the first one makes any


class DiffersError(RunError):
    """The weights in stages differ from those of the script in a process of its own."""


class Reference:
    """Compares after optimizer steps 1, 2, 4 and so on, and ``steps``."""

    def __init__(self, steps: int, notes: Notes, choice: Choice, parts: int, whole: WholeBatches | None) -> None:
        self.steps, self.notes, self.choice, self.parts, self.whole = steps, notes, choice, parts, whole
        self.points = {steps, *(1 << power for power in range(steps.bit_length()) if 1 << power < steps)}
        self.step_seconds = 0.0  # of the script in a process of its own, measured before the ranks step; 0: not known
        self.compared = 0  # the number of steps after which the last comparison was
        self._of_output = True  # whether that was equal, too
        self._begun = self._ended = self._ahead = False
        self._inputs = InputsAfterPoint()
        self._has_evaluated = False  # called the model without gradients: data may come from what it returned
        self._messages: list[dict[str, Any]] = []
        self._progress = (0, 0.0)  # the ticks that the second process has computed, and when that was seen
        self._start, self._deadline = 0.0, math.inf
        self._threads = 0  # of the script

    @property
    def name(self) -> str:
        """What the second process is, for the lines about it."""
        is_cut = self.parts > 1 and (self.whole is None or not self.whole.always)
        return "one process that joins the same parts" if is_cut else "one process"

    def begin(self, model: nn.Module) -> Second | None:
        """Fork the second process at the first training call of the model. Return its own side in it, else None."""
        if self._begun:
            return None
        self._begun = True
        self._start, self._threads = time.monotonic(), _threads_of_script()
        self._output = Output(sys.stdout)
        last = max(self.steps, _AHEAD)
        second = Second(model, self.choice, self._output, self.points, last, self.parts, self.whole)
        try:
            if not kernel.is_supported():
                raise CannotError("this system cannot keep a second process from writing (seccomp)")
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                raise CannotError("the script uses a GPU, which a forked process cannot")
            if is_compiled(model):
                raise CannotError("the script compiles the model, and a compiler rounds the whole model in another way")
            forked = fork(second, self._alive)
        except (CannotError, OSError) as error:
            self._end(str(error))
            return None
        if forked is None:
            return second
        self._wire, self._process, self._trace = forked
        self._progress = (0, time.monotonic() + _IDLE_SECONDS)
        loaders.pass_on(self._send)
        return None

    def _alive(self) -> None:
        """Raise GoneError if the second process has not computed for a while, or takes too long."""
        if time.monotonic() > self._deadline:
            waits = f"it may wait for {counted(self._threads, 'thread')} of the script, which a forked process has not"
            raise GoneError(waits if self._threads else "it takes much longer than this one")
        try:
            text = Path(f"/proc/{self._process}/stat").read_text()
        except OSError:
            return
        fields = text.rpartition(")")[2].split()
        ticks, now = int(fields[11]) + int(fields[12]), time.monotonic()
        if ticks != self._progress[0] or fields[0] == "D":
            self._progress = (ticks, now)
        elif now - self._progress[1] > _IDLE_SECONDS:
            raise GoneError("it waits for another process or thread")

    def _send(self, message: Any) -> None:
        try:
            self._wire.send(message)
        except GoneError:
            loaders.pass_no_more()

    def planned(self, replicas: int) -> None:
        """Tell the second process how many replicas of the model compute the parts of a batch."""
        if not self._ended:
            self._send({"replicas": replicas})

    def _next(self) -> dict[str, Any]:
        """Wait for the next message of the second process, and keep it."""
        now = time.monotonic()
        slower, least = (2.0, _LEAST_WITHOUT_THREADS) if self._threads else (_SLOWER, _LEAST_SECONDS)
        self._deadline = now + max(least, slower * (now - self._start))
        try:
            message: dict[str, Any] = self._wire.receive()
        except GoneError as error:
            message = {"stopped": self._cause() or f"the second process ended: {error}"}
        self._deadline = math.inf
        self.step_seconds = self.step_seconds or message.get("seconds", 0.0)
        self._messages.append(message)
        return message

    def _cause(self) -> str:
        """Return what the kernel has not allowed; "" if nothing."""
        places = re.findall(r'File "(.+)", line (\d+) in', os.pread(self._trace, 1 << 16, 0).decode(errors="replace"))
        own = [place for place in places if is_own_file(place[0])]
        return "the script writes, deletes or starts something at {}:{}".format(*(own or places)[0]) if places else ""

    def look_ahead(self) -> None:
        """Wait before the first step of any optimizer until the second process has made its first ones.

        Raises: RefusedError if the script trains the model together with another one.
        """
        if self._ahead or self._ended or not self._begun:
            return
        self._ahead = True
        while True:
            message = self._next()
            if "together" in message:
                self._refuse(message)
            if "stopped" in message or "waits" in message or message["steps"] >= min(self.steps, _AHEAD):
                return

    def _refuse(self, message: dict[str, Any]) -> None:
        self._stop()
        raise refused(message["together"], REMEDY, message["where"])

    def called(self, args: Any, kwargs: Any) -> None:
        """Note a call of the model."""
        self._has_evaluated = self._has_evaluated or not torch.is_grad_enabled()
        self._inputs.note(args, kwargs)

    def stepped(self, controller: Controller, steps: int) -> None:
        """Compare if it is time. Raises: DiffersError if the weights differ."""
        if self._ended or steps not in self.points:
            return
        controller.weights.touch(())
        text = self._output.text()
        while True:
            message = self._messages.pop(0) if self._messages else self._next()
            if "waits" in message or message.get("steps", steps) < steps:
                continue
            if "together" in message:  # later than in its first steps: the script itself will meet it
                message = {"stopped": "the script trains two models together at " + message["where"]}
            break
        if "stopped" in message:
            self._end(message["stopped"])
            return
        self.compare(controller, steps, text, message)
        if steps == self.steps and not self._ended:
            self._end()
        controller.notes.synchronized()

    def compare(self, controller: Controller, steps: int, text: str, expected: dict[str, Any]) -> None:
        """Compare output and weights. Raises: DiffersError if the weights differ."""
        own, others = digests(controller.model), expected["digests"]
        different = [name for name, digest in others.items() if own.get(name) != digest]
        after = counted(steps, "optimizer step")
        (inputs, drawn), (others_inputs, others_drawn) = self._inputs.taken(), expected["inputs"]
        is_known = "" not in (inputs, others_inputs) and drawn == others_drawn and not self._has_evaluated
        if different and is_known and inputs != others_inputs and not differing(text, expected["output"]):
            # weights, generators and output were equal before that call
            after = f"after {counted(self.compared, 'optimizer step')}"
            self._end(f"{after}, the model gets other inputs in a process of its own: the data differ from run to run")
            return
        if different or others.keys() != own.keys():
            names = ", ".join(different[:3]) or "their names"
            self._stop()
            raise DiffersError(
                f"after {after}, {len(different)} of {len(others)} tensors differ from "
                f"those of the script in a process of its own: {names}",
                remedy="if the script reads the time, its process, or the system's random numbers, no two runs are "
                "equal, and --check 0 runs it; otherwise report it as a bug of autopipe",
            )
        self.compared, self._count = steps, len(others)
        lines = differing(text, expected["output"])
        if lines and self._of_output:
            self._of_output = False
            self.notes.say(
                f"the weights are equal after {after}, and standard output differs: "
                f"{lines[0]!r} here, {lines[1]!r} in a process of its own"
            )

    def _stop(self) -> None:
        """End the second process."""
        self._ended = True
        self._output.end()
        loaders.pass_no_more()
        if hasattr(self, "_wire"):
            with contextlib.suppress(OSError):
                os.kill(self._process, signal.SIGKILL)
            self._wire.close(0.0)
            os.close(self._trace)

    def _end(self, reason: str = "") -> None:
        """End the comparison, and say what was compared."""
        self._stop()
        if self.compared and self._of_output:
            self.notes.say(
                f"checked: {self._count} tensors and standard output equal those of {self.name}, "
                f"after {counted(self.compared, 'optimizer step')}"
            )
        if reason:
            self.notes.say(f"not checked{' further' if self.compared else ''}: {reason}")

    def end(self) -> None:
        """End the second process, if it still runs."""
        if self._begun and not self._ended:
            self._end(f"the script ended before {counted(self.steps, 'optimizer step')}")

    def summary(self, steps: int) -> None:
        """Say what was compared. ``steps``: of the whole run; 0 if an optimizer did not make them."""
        self.end()
        if self.compared:
            what = "weights and output" if self._of_output else "weights, but not output, were equal: they were"
            of = f"{self.compared} of {steps}" if steps else str(self.compared)
            self.notes.say(f"{what} compared after {of} optimizer steps")


def _threads_of_script() -> int:
    """Return how many threads run that autopipe has not started."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    started = [getattr(getattr(t, "_target", None), "__module__", None) or type(t).__module__ for t in others]
    return sum(not module.startswith("autopipe.") for module in started)


_NUMBER = r"-?\d[\d.,:e+-]*%?"
_TIMES = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?|\d+:\d\d:\d\d(?:[.,]\d+)?"
    r"|\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*(?:[a-z]+/(?:s|sec|second)|s/[a-z]+|ms|us|s|secs?|seconds?|mins?|minutes?|hours?|h)\b"
    r"|(?<![a-z])(?:times?|elapsed|runtime|seconds|per_second|date|took|dt|mfu|eta|duration|latency|throughput|[a-z]+/s(?:ec(?:ond)?)?)(?![a-z])"
    rf"[^\d\n]{{0,12}}{_NUMBER}(?:\s*\(\s*{_NUMBER}\s*\))?"
    rf"|(?<![a-z])data\s+{_NUMBER}\s*\(\s*{_NUMBER}\s*\)",
    re.IGNORECASE,
)


def differing(text: str, expected: str) -> tuple[str, str] | None:
    """Return the first lines that differ, times left out; None if they are equal."""
    ours, theirs = text.splitlines(), expected.splitlines()
    for a, b in zip(ours, theirs, strict=False):
        if a != b and _TIMES.sub("", a).split() != _TIMES.sub("", b).split():
            return a, b
    if len(ours) != len(theirs):
        rest = (ours, theirs)[len(theirs) > len(ours)][min(len(ours), len(theirs))]
        return (rest, "") if len(ours) > len(theirs) else ("", rest)
    return None
