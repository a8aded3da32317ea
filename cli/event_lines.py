"""``train --events FILE|-``: every event of a run as a line of JSON, for other programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autopipe.errors import AutopipeError, RunError

from . import documents
from .terminal import SCHEMA_VERSION

if TYPE_CHECKING:
    from autopipe.commands.settings import Events

STANDARD_ERROR = Path("-")
# of the supervisor: ten a second
_LEFT_OUT = "ranks"


class EventLines:
    """Writes events, each with ``schema_version``, ``time`` in seconds since 1970, ``event``, and its own fields."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name = file, name

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write an event. Raises: RunError if it cannot be written."""
        if kind == _LEFT_OUT:
            return
        if kind == "plan":
            fields = documents.plan_fields(fields["plan"])
        line = {"schema_version": SCHEMA_VERSION, "time": time.time(), "event": kind, **fields}
        try:
            self._file.write(json.dumps(documents.plain(line)) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"the events cannot be written: {error.strerror}",
                where=self._name,
                remedy="free space on that disk, or choose another --events FILE",
            ) from None


@contextlib.contextmanager
def writing(path: Path | None, events: Events) -> Iterator[Events]:
    """Yield a function that passes events on and writes them to a file, to which they are added; None: only passes on.

    The last line is the event ``end``: ``error``, the message that ended the run, or "". A killed command has none.

    Raises: RunError if the file cannot be opened or written.
    """
    if path is None:
        yield events
        return
    with _opened(path) as file:
        lines = EventLines(file, str(path))

        def both(kind: str, fields: Mapping[str, Any]) -> None:
            events(kind, fields)
            lines(kind, fields)

        try:
            yield both
        except BaseException as error:
            what = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}".rstrip(": ")
            with contextlib.suppress(RunError):
                lines("end", {"error": what})
            raise
        lines("end", {"error": ""})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path == STANDARD_ERROR:
        yield sys.stderr
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the events cannot be written: {error.strerror}", where=str(path), remedy="choose another --events FILE"
        ) from None
    with file:
        yield file
