"""``history.jsonl``: when each command that trained a run began, what failed, and how it ended.

One JSON line for each: ``begun``, ``restarted`` (a rank failed, and training resumed) and ``ended``. A killed command
writes no end. A line that cannot be written, as on a full disk, is left out: training does not depend on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autopipe.errors import AutopipeError
from autopipe.ir.decoding import decode
from autopipe.report.results import Restart
from autopipe.runtime.job import RunDirectory, read_rows

FINISHED, STOPPED, FAILED, INTERRUPTED = "finished", "stopped", "failed", "interrupted"


@dataclass(frozen=True, slots=True)
class Begun:
    """A command began to train."""

    steps: int  # wanted; 0: as many as the data has
    start_step: int  # steps done before
    ranks: int
    schedule: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)  # seconds since 1970, as in the other lines


@dataclass(frozen=True, slots=True)
class Restarted:
    """A rank failed, and training resumed."""

    restart: Restart
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Ended:
    """A command ended."""

    state: str  # FINISHED, STOPPED (with a checkpoint, as requested), FAILED, INTERRUPTED
    step: int  # steps done
    what: str = ""  # of the error that ended it
    where: str = ""
    remedy: str = ""
    time: float = field(default_factory=time.time)


Entry = Begun | Restarted | Ended
_KINDS: dict[str, type[Any]] = {"begun": Begun, "restarted": Restarted, "ended": Ended}


def append(run: RunDirectory, entry: Entry) -> None:
    """Add a line to the history of a run."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(entry, kind))
    with contextlib.suppress(OSError), run.history.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": kind, **dataclasses.asdict(entry)}) + "\n")


def read(run: RunDirectory) -> tuple[Entry, ...]:
    """Return the history of a run, without lines that are damaged."""
    entries = []
    for row in read_rows(run.history):
        kind = _KINDS.get(str(row.pop("event", "")))
        if kind is not None:
            with contextlib.suppress(AutopipeError):
                entries.append(decode(kind, row, ""))
    return tuple(entries)


@contextlib.contextmanager
def recorded(run: RunDirectory, begun: Begun, progress: Callable[[], tuple[int, bool]]) -> Iterator[None]:
    """Record the begin and the end of training. ``progress`` returns the steps done, and whether a stop was requested.

    Every exception passes.
    """
    append(run, begun)
    try:
        yield
    except KeyboardInterrupt:
        append(run, Ended(INTERRUPTED, progress()[0], "Ctrl-C"))
        raise
    except AutopipeError as error:
        append(run, Ended(FAILED, progress()[0], error.what, error.where, error.remedy))
        raise
    except BaseException as error:
        append(run, Ended(FAILED, progress()[0], f"{type(error).__name__}: {error}"))
        raise
    step, stopped = progress()
    append(run, Ended(STOPPED if stopped else FINISHED, step))
