"""Test whether the data repeats, that is, whether every process that reads it gets the same minibatches.

Two fresh processes read the first minibatches, and their digests are compared. The processes have not imported the
user's code before, have different seeds for string hashes, and read in different seconds, as ranks may. They start
early and import while the run is planned. If the digests differ, or one process cannot read, rank 0 reads for all
ranks. Ranks also compare digests at every step, which detects a source that differs only later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.commands.steps import Prepared, batch_size_of
from autopipe.errors import AutopipeError
from autopipe.ir import artifact
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.batches.probe import READY, ProbeTask, Reading, SeenForm

MINIBATCHES = 3
# the timeout of both processes together; if it expires, every rank reads the data, and digests are compared
MOST_SECONDS = 120.0
# the delay between the two processes, so that a seed made from the time in seconds differs
_APART_SECONDS = 1.1


@dataclass(frozen=True, slots=True)
class Repeats:
    """The result of the test."""

    answer: bool | None  # whether the data repeats; None if unknown
    why: str = ""  # the reason, for a message
    alone: bool = False  # a further process could not read the data

    @property
    def reader(self) -> str:
        """The reader of the data, one of ``runtime.job.DATA_READERS``."""
        return "one" if self.alone or self.answer is False else "each"


class _Probe:
    """One of the processes. ``hash_seed``: its seed of Python's string hashes."""

    def __init__(self, hash_seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autopipe.workload.batches.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )
        self.begun = 0.0
        self._text = b""

    def ask(self, task: ProbeTask, deadline: float) -> None:
        """Send the task once the process is ready."""
        if self._line(deadline) == READY:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.write(json.dumps(artifact.encode(task)).encode() + b"\n")
                self.process.stdin.flush()
        self.begun = time.monotonic()

    def answer(self, deadline: float) -> Reading | str | None:
        """Return the reading, or the reason of a failure; None after the deadline."""
        line = self._line(deadline)
        if line is None:
            return None
        try:
            answer = json.loads(line)
            if isinstance(answer, dict) and "error" in answer:
                return str(answer["error"])
            return artifact.decode(Reading, answer, "reading")  # type: ignore[no-any-return]  # of the kind given
        except (ValueError, AutopipeError):
            return "the process that reads it ended early"

    def _line(self, deadline: float) -> str | None:
        """Return the next line, "" at the end, None after the deadline."""
        assert self.process.stdout is not None
        while b"\n" not in self._text:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                return ""
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, 9)  # with the workers of a loader
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


class Repeating:
    """The two processes. Call ``start`` and ``begin`` early, and ``finish`` for the result. They end with the block."""

    def __init__(self) -> None:
        self._probes: list[_Probe] = []
        self._task: ProbeTask | None = None
        self._first: Reading | str | None = None
        self._deadline = 0.0

    def __enter__(self) -> Repeating:
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._probes:
            probe.end()

    @property
    def begun(self) -> bool:
        """Whether the test has begun."""
        return self._task is not None

    def start(self) -> None:
        """Start the processes, which import and then wait for their task."""
        if not self._probes:
            # arbitrary numbers, unlikely to be the hash seed of a rank
            self._probes = [_Probe(seed) for seed in (1597463007, 3405691582)]

    def begin(self, spec: WorkloadSpec, batch_size: int, *, evaluation: bool, parts: int = 0) -> None:
        """Start reading in the first process.

        ``batch_size``: 0 for the data's own. ``evaluation``: also read the evaluation data. ``parts``: microbatches per
        minibatch, for ``forms``.
        """
        self.start()
        self._deadline = time.monotonic() + MOST_SECONDS
        self._task = ProbeTask(spec, batch_size, MINIBATCHES, evaluation, parts)
        self._probes[0].ask(self._task, self._deadline)

    def forms(self) -> tuple[SeenForm, ...]:
        """Return the forms of the microbatches that the first process read; () if it could not read."""
        reading = self._first_answer()
        return reading.forms if isinstance(reading, Reading) else ()

    def _first_answer(self) -> Reading | str | None:
        if self._first is None:
            self._first = self._probes[0].answer(self._deadline)
        return self._first

    def finish(self) -> Repeats:
        """Read in the second process, and compare."""
        assert self._task is not None, "begin comes first"
        first, second = self._probes
        answers = [self._first_answer()]
        if answers[0] is not None:
            time.sleep(max(first.begun + _APART_SECONDS - time.monotonic(), 0))
            second.ask(dataclasses.replace(self._task, parts=0), self._deadline)
            answers.append(second.answer(self._deadline))
        return _compared(answers)


def begin(repeating: Repeating, prepared: Prepared, *, evaluation: bool) -> None:
    """Begin the test of a prepared run's data. Synthetic data (``--input``) always repeats and is not tested."""
    if not prepared.workload.spec.inputs:
        size = batch_size_of(prepared.workload, prepared.plan) or 0
        repeating.begin(prepared.workload.spec, size, evaluation=evaluation, parts=prepared.plan.num_microbatches)


def repeats_now(prepared: Prepared) -> Repeats:
    """Return whether the data of a prepared run repeats."""
    with Repeating() as repeating:
        begin(repeating, prepared, evaluation=False)
        return repeating.finish() if repeating.begun else Repeats(True)


def _compared(answers: Sequence[Reading | str | None]) -> Repeats:
    readings = [answer for answer in answers if isinstance(answer, Reading)]
    for answer in answers:
        if answer is None:
            return Repeats(None, f"reading {MINIBATCHES} minibatches twice takes more than {MOST_SECONDS:.0f} s")
        if isinstance(answer, str):
            return Repeats(None, answer, alone=True)
    first, second = (reading.digests for reading in readings)
    differing = [name for name, digests in first.items() if second.get(name) != digests]
    if not differing:
        return Repeats(True)
    return Repeats(False, f"{' and '.join(differing)} yielded different minibatches in two processes")


def explain(repeats: Repeats) -> str:
    """Return the warning about data that does not repeat, or may not; "" if it repeats."""
    if repeats.answer:
        return ""
    if repeats.alone:
        return f"a further process could not read the data ({repeats.why}): rank 0 reads for all ranks"
    if repeats.answer is None:
        return f"it is unknown whether the data repeats ({repeats.why}): ranks compare digests at every step"
    return (
        f"the data does not repeat ({repeats.why}): rank 0 reads for all ranks, and a resumed run continues with other "
        "minibatches; seed the data to avoid both"
    )
