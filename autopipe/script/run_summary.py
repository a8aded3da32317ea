"""``Notes``: what the command says on standard error: where overlap comes from, what forbids it, what runs here."""

from __future__ import annotations

import ast
import linecache
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopipe.cores import usable_cores
from autopipe.errors import counted
from autopipe.planning.clusters import HOST_BANDWIDTH
from autopipe.units import in_seconds

if TYPE_CHECKING:
    from autopipe.script.controller import Controller


_GAIN = 1.005  # what is shown as more than 1.00
WORTH = 1.1
"""Times faster, for another option to be named, or batches to be cut."""


class Notes:
    """Counts of one run, and the lines about them."""

    def __init__(self, *, quiet: bool = False, untimed: int = 1) -> None:
        """``quiet``: write nothing. ``untimed``: first steps, which do more than later ones."""
        self.quiet, self.untimed = quiet, untimed
        self._steps = 0
        self._computed: list[tuple[int, float]] = []  # a number of steps, and when the ranks had computed them
        self.reads: Counter[str] = Counter()  # file:line -> times that the script waited for a number there
        self.gathers: Counter[str] = Counter()  # file:line -> times that weights were brought here
        self._forwards = self._backwards = 0  # of this optimizer step
        self._between = 0  # reads before the last backward of this optimizer step
        self._recent: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        self._reported = False
        self._written: set[str] = set()  # lines, or what they are about
        self._is_whole = False  # --num-microbatches auto does not cut
        self._whole = 0  # optimizer steps of other models
        self._prediction: Prediction | None = None  # for these ranks and the script as it is

    def say(self, text: str) -> None:
        """Write one line."""
        if not self.quiet:
            sys.stderr.write(f"autopipe run: {text}\n")
            sys.stderr.flush()

    def read(self, where: str) -> None:
        """Count a wait for a number."""
        self.reads[where] += 1
        self._pending[where] += 1

    def gathered(self, where: str) -> None:
        """Count a read of weights."""
        self.gathers[where] += 1

    def here(self, where: str, why: str) -> None:
        """Say that a call runs in this process."""
        self.once(f"the call at {where} runs here, on gathered weights: {why}", about=why)

    def once(self, text: str, about: str = "") -> None:
        """Write one line, if none was written about the same (without ``about``: the same line)."""
        if (about or text) not in self._written:
            self._written.add(about or text)
            self.say(text)

    def stays_whole(self, reason: str) -> None:
        """Say once why ``--num-microbatches auto`` does not cut a batch."""
        self._is_whole = True
        self.once(f"batches stay whole: {reason}", about=reason)

    def whole(self, name: str) -> None:
        """Count a step of a model that runs in the script's process; name it once."""
        self._whole += 1
        what = name or "another model"
        self.once(f"{what} runs whole in this process: only the first model that a script trains runs in stages")

    def forward(self, *, grad: bool) -> None:
        """Count a call of the model."""
        if not grad:
            return
        if self._backwards:  # only what is read between two microbatches of one step forbids overlap
            self._recent.update(self._pending)
        self._pending.clear()
        self._forwards += 1

    def backward(self) -> None:
        """Count a backward."""
        self._backwards += 1

    @property
    def reads_between(self) -> bool:
        """Whether numbers were read between the backwards since the last step."""
        return bool(self._recent)

    def step(self, controller: Controller) -> None:
        """Count a step; report after the first one of several microbatches, or the first at all."""
        self._steps += 1
        count, reads = self._backwards, self._recent
        if not self._reported and count:
            self._reported = True
            if controller.parts is None:  # else the lines at the start have said it
                self._report(count, reads, controller)
        self._forwards = self._backwards = 0
        self._recent = Counter()
        self._pending.clear()

    def _report(self, count: int, reads: Counter[str], controller: Controller) -> None:
        if controller.count == 1:
            self.say("one stage: no overlap")
            return
        ranks = "replicas" if controller.order.last_replica else "stages"
        buffers = sorted(set().union(*(program.buffers_written for program in controller.programs)))
        if controller.order.last_replica and buffers:
            self.say(
                f"no overlap between replicas: the forward writes {buffers[0]}, which the next one reads, so the last "
                "replica computes all calls. Stages overlap: --replicas never"
            )
            return
        if count == 1:
            number = max(controller.count, 4) if self._is_whole else "auto"
            self.say(
                f"no overlap between {ranks}, and training is not faster: each optimizer step has one backward. "
                f"For overlap: accumulation in the script, or --num-microbatches {number}"
            )
            return
        if reads:
            places = ", ".join(_read_at(where, times) for where, times in reads.most_common(3))
            what = "forwards do not overlap" if controller.order.last_replica else "no overlap between stages"
            self.say(
                f"{what}: numbers are read between the {count} microbatches of a step at {places}. "
                f"Without that, {prediction(controller, count).text}"
            )
            return
        self.say(f"overlap from the script's accumulation of {count} microbatches: {self.predict(controller, count)}")

    def start(self, controller: Controller) -> None:
        """Name the stages."""
        stages = counted(len(controller.plan.stages), "stage")
        parts = " | ".join(stage.name for stage in controller.plan.stages)
        replicas = controller.order.num_replicas
        self.say(f"{f'{replicas} replicas of ' if replicas > 1 else ''}{stages}: {parts}")
        if controller.compiles:
            self.say("torch.compile: the code of each stage is compiled, on its rank")
        for line in controller.parts.lines() if controller.parts is not None else ():
            self.say(line)

    def untrained(self, script: Path, names: Mapping[str, Any], stages: int) -> None:
        """Say that no model ran in stages, and what runs a model file. ``names``: those that the script defines."""
        self.say("no model was trained: nothing ran in stages")
        hooks = [name for name in ("build_model", "data", "loss") if callable(names.get(name))]
        if "build_model" in hooks or len(hooks) == 2:
            command = f"autopipe train {shlex.quote(str(script))} --gpus {stages}"
            self.say(f"{script} defines {' and '.join(hooks)}, as a model file does; try: {command}")

    def synchronized(self) -> None:
        """Note the time at which the ranks have computed all steps so far."""
        if self._steps >= self.untimed and self._steps not in dict(self._computed):
            self._computed[1:] = [(self._steps, time.monotonic())]

    def predict(self, controller: Controller, count: int) -> str:
        """Return the predicted speed of steps of ``count`` microbatches; ``end`` compares the measured one with it."""
        self._prediction = prediction(controller, count)
        return self._prediction.text

    def end(self, one_process: float, one: str = "one process") -> None:
        """Say how long a step took, compared with the prediction, and where weights were read most.

        ``one_process``: seconds of a step of the script in a process of its own; 0 if they were not measured. ``one``:
        what that process is.
        """
        if len(self._computed) == 2:
            (first, begin), (last, end) = self._computed
            each = (end - begin) / (last - first)
            steps = f"{self._steps} optimizer steps; {in_seconds(each)} each after the first {first}"
            self.say(f"{steps}, with the script's own work{self._compared(each, one_process, one)}")
        if self._whole:
            self.say(f"{self._whole} more optimizer steps, of other models, ran in this process")
        many = [(where, times) for where, times in self.gathers.most_common(3) if times > 3]
        if many:
            places = ", ".join(f"{where} ({times} times)" for where, times in many)
            self.say(f"weights were brought from the ranks at {places}")

    def _compared(self, each: float, one_process: float, one: str) -> str:
        """Return how the seconds of a step compare with those of one process, and with the prediction."""
        expected = self._prediction
        if one_process:
            ratio = one_process / each
            speed = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"{1 / ratio:.2f} times slower than"
            predicted = "" if expected is None else f"; {expected.faster:.2f} times were predicted"
            return f": {speed} {one} (its second step took {in_seconds(one_process)}{predicted})"
        return "" if expected is None or not expected.seconds else f"; {in_seconds(expected.seconds)} predicted without"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The speed of a step that is predicted from the times of the model's operations, without the script's own work."""

    faster: float  # times the speed of one process
    seconds: float  # of a step; 0 if operations were counted and not timed
    text: str


def _read_at(where: str, times: int) -> str:
    option = _option_at(where)
    return f"{where} ({times} times a step{f'; only if {option} is true' if option else ''})"


def _option_at(where: str) -> str:
    """Return the option that ``if`` asks before ``file:line`` runs, such as ``args.log_loss``; "" without one.

    That is an attribute that is the condition, or the first part of one with ``and``. Where it is false, the line, in
    the condition behind it or in the body, does not run.
    """
    file, _, number = where.rpartition(":")
    if not number.isdecimal():
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ""
    line, option = int(number), ""
    for node in ast.walk(tree):  # outer ones first
        if not isinstance(node, ast.If):
            continue
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        first = node.test.values[0] if is_and and isinstance(node.test, ast.BoolOp) else node.test
        begin = node.lineno if is_and else node.body[0].lineno
        if isinstance(first, ast.Attribute) and begin <= line <= (node.body[-1].end_lineno or 0):
            option = ast.unparse(first)
    return option


def prediction(controller: Controller, count: int) -> Prediction:
    """Return the speed of ``count`` microbatches on the ranks, compared with one process.

    The slowest forward and the slowest backward set the pace. On this host, the ranks share its cores. Each has the
    threads of the script, which uses as many cores by itself.
    """
    stages, replicas = controller.plan.stages, controller.order.num_replicas
    one = sum(stage.seconds for stage in stages)
    slowest = max(stage.forward_seconds for stage in stages) + max(stage.backward_seconds for stage in stages)
    seconds = _seconds(one, slowest, count, replicas, controller.shipping.bytes_of_stage)
    cores, threads = usable_cores(), torch.get_num_threads()
    at_a_time = max(cores / threads, 1.0)
    shared = not controller.places.are_remote and count * one / at_a_time > seconds
    faster = at_a_time if shared else count * one / seconds
    step = count * one / faster if controller.is_timed else 0.0
    if not shared:
        more = _more_replicas(controller, count, faster)
        return Prediction(faster, step, f"{faster:.2f} times the speed of one process is predicted{more}")
    ranks = counted(len(stages), "stage") if replicas == 1 else counted(controller.count, "rank")
    why = f"{ranks} with {counted(threads, 'thread')} each share {counted(cores, 'core')}"
    times = "" if faster < _GAIN else f"{faster:.2f} times "
    return Prediction(faster, step, f"{times}the speed of one process at most is predicted, because {why}")


def _seconds(one: float, slowest: float, count: int, replicas: int, num_bytes: int) -> float:
    """Return the seconds of microbatches, and of the exchange of gradients and weights by replicas.

    ``one``: of a microbatch in all stages; ``slowest``: in the slowest. ``num_bytes``: of the weights of a rank.
    """
    exchanged = 2 * num_bytes * (replicas - 1) / replicas
    return one + (-(-count // replicas) - 1) * slowest + exchanged / HOST_BANDWIDTH


def _more_replicas(controller: Controller, count: int, faster: float) -> str:
    """Return what replicas of the whole model in place of stages would give, for a script that accumulates."""
    stages, ranks = controller.plan.stages, controller.count
    if controller.parts is not None or len(stages) == 1 or any(p.buffers_written for p in controller.programs):
        return ""
    one = sum(stage.seconds for stage in stages)
    replicated = count * one / _seconds(one, one, count, ranks, controller.shipping.bytes_of_stage * len(stages))
    if replicated < WORTH * faster:
        return ""
    return f"; {replicated:.2f} times with --replicas {ranks}, if each rank has memory for the model"
