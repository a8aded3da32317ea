"""Trainings that are in progress at the same time and take turns on the machine, a few seconds each.

The speed of a virtual machine changes from minute to minute, more than the systems differ. Trainings that run one after
the other meet different machines. These run one at a time, too, but each is suspended after some seconds and continues
after the turns of the others, so that all meet the same machine.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.speed.running import LIMIT_SECONDS, kill, started, steps_of

WARM_UP_STEPS = 3
LEAST_STEPS = 4  # of a turn, which lasts longer if it has fewer


@dataclass
class Training:
    """A training that takes turns: a command without an end, which is killed after its last turn.

    ``metrics``: the file in which it writes ``seconds`` and ``loss`` of each step, a line of JSON.
    """

    name: str
    command: Sequence[str]
    folder: Path
    metrics: Path
    turns: list[float] = field(default_factory=list)  # seconds of a step, a mean for each turn
    losses: list[float] = field(default_factory=list)
    _process: subprocess.Popen[Any] | None = None
    _family: list[psutil.Process] = field(default_factory=list)

    def start(self) -> None:
        """Run the first steps, and suspend it.

        Raises: SystemExit if it ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "stderr").open("wb") as errors:
            self._process = started(self.command, self.folder, errors)
        begin = time.perf_counter()
        while len(steps_of(self.metrics)) < WARM_UP_STEPS:
            self._check(time.perf_counter() - begin)
            time.sleep(0.02)
        root = psutil.Process(self._process.pid)
        self._family = [root, *root.children(recursive=True)]
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> None:
        """Let it run for some seconds, and note the mean of the steps that it began and ended in them.

        The first of these steps is left out: its memory is not in the caches yet. Raises: SystemExit if it ends.
        """
        before, begin = len(steps_of(self.metrics)), time.perf_counter()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        while len(steps_of(self.metrics)) < before + LEAST_STEPS:
            self._check(time.perf_counter() - begin)
            time.sleep(0.02)
        self._signal(signal.SIGSTOP)
        steps = steps_of(self.metrics)
        ends = [step["seconds"] for step in steps[before:]]  # the first one began in an earlier turn
        self.turns.append((ends[-1] - ends[1]) / (len(ends) - 2))
        self.losses = [step["loss"] for step in steps]

    def end(self) -> None:
        """Kill its processes."""
        if self._process is not None:
            kill(self._process)
        self._signal(signal.SIGKILL)  # ranks have sessions of their own

    def _check(self, waited: float) -> None:
        assert self._process is not None
        if self._process.poll() is not None or waited > LIMIT_SECONDS:
            errors = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{self.name} ended, or makes no steps: {' '.join(self.command)}\n{errors[-3000:]}")

    def _signal(self, number: signal.Signals) -> None:
        for process in self._family:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def take_turns(trainings: Sequence[Training], count: int, seconds: float) -> None:
    """Start all trainings, one after the other, and give each ``count`` turns. The order is reversed every time.

    ``seconds``: of a turn. Raises: SystemExit if one of them ends.
    """
    try:
        for training in trainings:
            training.start()
        for number in range(count):
            for training in trainings if number % 2 == 0 else reversed(trainings):
                training.turn(seconds)
    finally:
        for training in trainings:
            training.end()
