"""What an earlier command read of the data: its processes stand for the second process of a test.

``repeating`` tests whether two processes read the same minibatches, a second apart and with different seeds for string
hashes. Processes of an earlier command, whose result was that they do, were both. So if two processes of this command
read what those read, the test is complete. If they read anything else, the whole test is made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from autopipe.commands.named import refuse_unnamed
from autopipe.errors import AutopipeError
from autopipe.ir import artifact
from autopipe.workload.batches.probe import ProbeTask

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
