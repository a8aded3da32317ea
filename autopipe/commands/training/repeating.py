"""Test whether the data repeats, that is, whether every process that reads it gets the same minibatches.

Two processes read the first minibatches, and their digests are compared. The processes have not imported the user's
code before, have different seeds for string hashes, and read in different seconds, as ranks may. The first is forked as
a rank is, if the fork server of the ranks runs. The other is always a new process, which starts early and imports while
the run is planned. If the digests differ, or one process cannot read, rank 0 reads for all ranks. Ranks also compare
digests at every step, which detects a source that differs only later.

If an earlier command tested the same data (``earlier``), two forked processes read while the run is prepared. If both
read what that command's processes read, the test is complete, without a new process and without waiting a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Self

from autopipe.commands.named import refuse_unnamed
from autopipe.commands.prepared import Prepared
from autopipe.commands.steps import batch_size_of
from autopipe.errors import AutopipeError
from autopipe.ir import artifact, decoding
from autopipe.ir.profile import WorkloadSpec
from autopipe.launch.rank.forked import END_SECONDS, fork_server_runs
from autopipe.launch.rank.reading import read_data
from autopipe.workload.batches.probe import READY, ProbeTask, Reading, SeenForm

# What an earlier command read of the data: its processes stand for the second process of a test.
#
# ``repeating`` tests whether two processes read the same minibatches, a second apart and with different seeds for
# string hashes. Processes of an earlier command, whose result was that they do, were both. So if two processes of this
# command read what those read, the test is complete. If they read anything else, the whole test is made.

FILE = "data-test.json"


@dataclass(frozen=True, slots=True)
class EarlierReading:
    """What the processes of a test read, all of them the same."""

    task: ProbeTask  # what they had to read
    digests: dict[str, tuple[str, ...]]  # by hook, of its first minibatches


def load_earlier(work_dir: Path) -> EarlierReading | None:
    """Return the last test of a work directory in which the data repeated, or None: without it, all is read again."""
    path = work_dir / FILE
    try:
        return artifact.load(EarlierReading, path, renew="") if path.is_file() else None
    except AutopipeError:
        return None


def save_earlier(work_dir: Path, reading: EarlierReading) -> None:
    """Keep a test for later commands, if the folder can be written."""
    with contextlib.suppress(AutopipeError):
        artifact.save(reading, work_dir / FILE)


def forget_earlier(work_dir: Path) -> None:
    """Delete the test of a work directory: the data did not repeat."""
    with contextlib.suppress(OSError):
        (work_dir / FILE).unlink(missing_ok=True)


def may_read(reading: EarlierReading, work_dir: Path) -> bool:
    """Return whether the user has named the code that the file names, with its present content."""
    try:
        refuse_unnamed(reading.task.spec, work_dir / FILE, "autopipe train")
    except AutopipeError:
        return False
    return True


MINIBATCHES = 3
# the timeout of both processes together; if it expires, every rank reads the data, and digests are compared
MOST_SECONDS = 120.0
# the delay between the two processes, so that a seed made from the time in seconds differs
_APART_SECONDS = 1.1
# of the second process, and of the first if it is new, too: arbitrary numbers, unlikely to be the hash seed of a rank
HASH_SEED, _OTHER_HASH_SEED = 3405691582, 1597463007
_Stream = IO[bytes] | Connection


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
    """One of the processes."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkServerProcess, task: _Stream, answer: _Stream) -> None:
        """Hold a process that has started, the pipe that it reads its task from, and that of its answer."""
        self.process = process
        self.begun = 0.0  # when it was certainly reading, or had read; 0: it has no task
        self._task, self._answer = task, answer
        self._text = b""
        self._is_ready = False

    @classmethod
    def new(cls, hash_seed: int) -> Self:
        """Start a new process. ``hash_seed``: its seed of Python's string hashes."""
        process = subprocess.Popen(
            probe_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    @classmethod
    def forked(cls) -> Self:
        """Fork a process from the server of the ranks. Raises: EOFError or OSError if the server has ended."""
        context = multiprocessing.get_context("forkserver")
        theirs, task = context.Pipe(duplex=False)
        answer, output = context.Pipe(duplex=False)
        process = context.Process(target=read_data, args=(theirs, output), name="probe", daemon=True)
        process.start()
        theirs.close()
        output.close()
        return cls(process, task, answer)

    def ask(self, task: ProbeTask, deadline: float) -> None:
        """Send the task once the process is ready."""
        self._is_ready = self._line(deadline) == READY
        if self._is_ready:
            self.send(task)
        self.begun = time.monotonic()

    def send(self, task: ProbeTask) -> None:
        """Send the task, which the process reads once it is ready."""
        with contextlib.suppress(OSError), open(self._task.fileno(), "w", encoding="utf-8", closefd=False) as file:
            file.write(json.dumps(artifact.encode(task)) + "\n")

    def answer(self, deadline: float) -> Reading | str | None:
        """Return the reading, or the reason of a failure; None after the deadline."""
        if not self.begun:  # it was sent its task before it was ready
            self._is_ready = self._line(deadline) == READY
        line = self._line(deadline)
        self.begun = self.begun or time.monotonic()
        if line is None:
            return None
        try:
            answer = json.loads(line)
            if isinstance(answer, dict) and "error" in answer:
                return str(answer["error"])
            return decoding.decode(Reading, answer, "reading")  # type: ignore[no-any-return]  # of the kind given
        except (ValueError, AutopipeError):
            return "the process that reads it ended early"

    def _line(self, deadline: float) -> str | None:
        """Return the next line, "" at the end, None after the deadline."""
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._answer], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            chunk = os.read(self._answer.fileno(), 1 << 16)
            if not chunk:
                return ""
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        assert self.process.pid is not None, "it has started"
        # the fork server has reaped a forked process that ended, and its number may be that of another process
        if isinstance(self.process, subprocess.Popen) or self.process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, 9)  # with the workers of a loader
            self.process.kill()  # a forked process may not have its own group yet
        if isinstance(self.process, subprocess.Popen):
            self.process.wait()
        else:
            self.process.join(END_SECONDS)
        for stream in (self._task, self._answer):
            with contextlib.suppress(OSError):
                stream.close()


def probe_command() -> list[str]:
    """Return the command of a new process."""
    return [sys.executable, "-P", "-m", "autopipe.workload.batches.probe"]


def _forked_or_new(hash_seed: int) -> _Probe:
    try:
        return _Probe.forked()
    except (EOFError, OSError):  # the fork server was killed meanwhile
        return _Probe.new(hash_seed)


class Repeating:
    """The two processes. Call ``start`` and ``begin`` early, and ``finish`` for the result. They end with the block."""

    def __init__(self, work_dir: Path | None = None) -> None:
        """``work_dir``: where the result of the last test is; None: this test neither uses one nor leaves one."""
        self._work_dir = work_dir
        self._earlier: EarlierReading | None = None  # what the processes read now is compared with it
        self._twin: _Probe | None = None  # the second process of such a test
        self._first: _Probe | None = None
        self._second: _Probe | None = None
        self._task: ProbeTask | None = None
        self._reading: Reading | str | None = None  # of the first process
        self._deadline = 0.0

    def __enter__(self) -> Repeating:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self._first, self._twin, self._second):
            if process is not None:
                process.end()

    @property
    def begun(self) -> bool:
        """Whether the test has begun."""
        return self._task is not None

    def start(self) -> None:
        """Start the processes, which import and then wait for their task. The fork server's is forked in ``begin``.

        If there is an earlier test, two forked processes begin to read what it read.
        """
        if self._earlier is None and self._second is None and self._work_dir is not None and fork_server_runs():
            self._earlier = load_earlier(self._work_dir)
            if self._earlier is not None and may_read(self._earlier, self._work_dir):
                self._read_as_earlier(self._earlier)
        if self._earlier is None:
            self._start_new()

    def _read_as_earlier(self, earlier: EarlierReading) -> None:
        try:
            self._first = _Probe.forked()
            self._first.send(earlier.task)
            self._twin = _Probe.forked()
            self._twin.send(dataclasses.replace(earlier.task, parts=0))
        except (EOFError, OSError):  # the fork server was killed meanwhile
            self._forget()

    def _forget(self) -> None:
        """End what reads as an earlier test did, and make the complete test."""
        self._earlier = None
        for process in (self._first, self._twin):
            if process is not None:
                process.end()
        self._first = self._twin = None

    def _start_new(self) -> None:
        if self._second is None:
            self._second = _Probe.new(HASH_SEED)
            if not fork_server_runs():
                self._first = _Probe.new(_OTHER_HASH_SEED)

    def begin(self, spec: WorkloadSpec, batch_size: int, *, evaluation: bool, parts: int = 0) -> None:
        """Start reading in the first process.

        ``batch_size``: 0 for the data's own. ``evaluation``: also read the evaluation data. ``parts``: microbatches per
        minibatch, for ``forms``.
        """
        self.start()
        self._deadline = time.monotonic() + MOST_SECONDS
        self._task = ProbeTask(spec, batch_size, MINIBATCHES, evaluation, parts)
        if self._earlier is not None:
            if self._earlier.task == self._task:
                if self._first is None:
                    self._read_as_earlier(self._earlier)
            else:
                self._forget()
        if self._earlier is None:
            self._start_new()
            if self._first is None:
                self._first = _forked_or_new(_OTHER_HASH_SEED)
            self._first.ask(self._task, self._deadline)

    def forms(self) -> tuple[SeenForm, ...]:
        """Return the forms of the microbatches that the first process read; () if it could not read."""
        reading = self._first_answer()
        return reading.forms if isinstance(reading, Reading) else ()

    def _first_answer(self) -> Reading | str | None:
        assert self._first is not None, "begin comes first"
        if self._reading is None:
            self._reading = self._first.answer(self._deadline)
        return self._reading

    def finish(self) -> Repeats:
        """Compare with the earlier test, or read in the second process and compare."""
        if self._as_earlier():
            return Repeats(True)
        self._start_new()
        first, second = self._first, self._second
        assert self._task is not None and first is not None and second is not None, "begin comes first"
        answers = [self._first_answer()]
        if answers[0] is not None:
            time.sleep(max(first.begun + _APART_SECONDS - time.monotonic(), 0))
            second.ask(dataclasses.replace(self._task, parts=0), self._deadline)
            answers.append(second.answer(self._deadline))
        repeats = _compared(answers)
        self._keep(repeats, answers[0])
        return repeats

    def _as_earlier(self) -> bool:
        """Return whether both forked processes read what those of an earlier test read."""
        if self._earlier is None or self._twin is None:
            return False
        answers = [self._first_answer(), self._twin.answer(self._deadline)]
        self._twin.end()
        return all(isinstance(answer, Reading) and answer.digests == self._earlier.digests for answer in answers)

    def _keep(self, repeats: Repeats, first: Reading | str | None) -> None:
        if self._work_dir is None:
            return
        if repeats.answer and self._task is not None and isinstance(first, Reading):
            save_earlier(self._work_dir, EarlierReading(self._task, first.digests))
        else:
            forget_earlier(self._work_dir)


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
