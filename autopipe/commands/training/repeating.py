"""Does the data repeat? Two fresh processes read the first minibatches, and their digests are compared.

Every rank that reads for itself is a process of its own, so that is what is tried: processes of their own, that have
imported nothing of the user's before, with another seed for the hashes of strings each, in another second. They are
started early and import while the run is planned. Where the two differ, or one cannot read, rank 0 reads for all ranks.
A source that differs later only is found by the digests that ranks compare at every step.
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
# how long the two together may read: data that takes longer to open is read by every rank, and compared at each step
MOST_SECONDS = 120.0
# a seed taken from the time in whole seconds must not be the same twice
_APART_SECONDS = 1.1


@dataclass(frozen=True, slots=True)
class Repeats:
    """Whether a source repeats, None where that is not known. ``why``: what was seen, for a message.

    ``alone``: a second process could not read it.
    """

    answer: bool | None
    why: str = ""
    alone: bool = False

    @property
    def reader(self) -> str:
        """Who is to read it: of ``runtime.job.DATA_READERS``."""
        return "one" if self.alone or self.answer is False else "each"


class _Probe:
    """One process. ``hash_seed``: what Python seeds the hashes of strings with in it."""

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
        """Give it its task, once it can take one."""
        if self._line(deadline) == READY:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.write(json.dumps(artifact.encode(task)).encode() + b"\n")
                self.process.stdin.flush()
        self.begun = time.monotonic()

    def answer(self, deadline: float) -> Reading | str | None:
        """Return what it has read, or why it could not; None where the time is over."""
        line = self._line(deadline)
        if line is None:
            return None
        try:
            answer = json.loads(line)
            if isinstance(answer, dict) and "error" in answer:
                return str(answer["error"])
            return artifact.decode(Reading, answer, "reading")  # type: ignore[no-any-return]  # of the kind given
        except (ValueError, AutopipeError):
            return "the process that read it ended before it had"

    def _line(self, deadline: float) -> str | None:
        """Return its next line, "" at its end, None where the time is over."""
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
    """The two processes: ``start`` them, ``begin``, do something else, then ``finish``. They end with the block."""

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
        """Whether there is something to finish."""
        return self._task is not None

    def start(self) -> None:
        """Start the processes; they import, and wait."""
        if not self._probes:
            # other numbers than people choose, so that the two differ from what the ranks have, too
            self._probes = [_Probe(seed) for seed in (1597463007, 3405691582)]

    def begin(self, spec: WorkloadSpec, batch_size: int, *, evaluation: bool, parts: int = 0) -> None:
        """Let the first process read. ``batch_size`` 0: the data's own. ``evaluation``: the evaluation data, too.

        ``parts``: microbatches of a minibatch, for ``forms``.
        """
        self.start()
        self._deadline = time.monotonic() + MOST_SECONDS
        self._task = ProbeTask(spec, batch_size, MINIBATCHES, evaluation, parts)
        self._probes[0].ask(self._task, self._deadline)

    def forms(self) -> tuple[SeenForm, ...]:
        """Return the forms of the microbatches that the first process has read; none where it could not read."""
        reading = self._first_answer()
        return reading.forms if isinstance(reading, Reading) else ()

    def _first_answer(self) -> Reading | str | None:
        if self._first is None:
            self._first = self._probes[0].answer(self._deadline)
        return self._first

    def finish(self) -> Repeats:
        """Let the second process read, and compare."""
        assert self._task is not None, "begin comes first"
        first, second = self._probes
        answers = [self._first_answer()]
        if answers[0] is not None:
            time.sleep(max(first.begun + _APART_SECONDS - time.monotonic(), 0))
            second.ask(dataclasses.replace(self._task, parts=0), self._deadline)
            answers.append(second.answer(self._deadline))
        return _compared(answers)


def begin(repeating: Repeating, prepared: Prepared, *, evaluation: bool) -> None:
    """Begin to try the data of what was prepared, unless it cannot differ: ``--input`` draws with the run's seed."""
    if not prepared.workload.spec.inputs:
        size = batch_size_of(prepared.workload, prepared.plan) or 0
        repeating.begin(prepared.workload.spec, size, evaluation=evaluation, parts=prepared.plan.num_microbatches)


def repeats_now(prepared: Prepared) -> Repeats:
    """Return whether the data of what was prepared repeats."""
    with Repeating() as repeating:
        begin(repeating, prepared, evaluation=False)
        return repeating.finish() if repeating.begun else Repeats(True)


def _compared(answers: Sequence[Reading | str | None]) -> Repeats:
    readings = [answer for answer in answers if isinstance(answer, Reading)]
    for answer in answers:
        if answer is None:
            return Repeats(None, f"{MINIBATCHES} minibatches were not read twice within {MOST_SECONDS:.0f} s")
        if isinstance(answer, str):
            return Repeats(None, answer, alone=True)
    first, second = (reading.digests for reading in readings)
    differing = [name for name, digests in first.items() if second.get(name) != digests]
    if not differing:
        return Repeats(True)
    return Repeats(False, f"{' and '.join(differing)} gave two processes other minibatches")


def explain(repeats: Repeats) -> str:
    """Return the warning about a source of which it is not known that it repeats, "" where it does."""
    if repeats.answer:
        return ""
    if repeats.alone:
        return f"a further process could not read the data ({repeats.why}): rank 0 reads for all ranks"
    if repeats.answer is None:
        return f"it was not found out whether the data repeats ({repeats.why}): digests are compared at every step"
    return (
        f"the data does not repeat ({repeats.why}): rank 0 reads for all ranks, and a run that is resumed "
        "goes on with other minibatches; seed the data to change both"
    )
