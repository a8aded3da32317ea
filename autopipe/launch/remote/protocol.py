"""The protocol between the process that watches a run and the processes that hold its ranks on other hosts.

Each of these is a peer, whether ssh or a cluster's launcher started it: it starts its ranks, reports what they do, and
ends when the watcher or the connection to it does::

    watcher -> peer                               peer -> watcher
      Start       specs of its ranks
      Stop        before which minibatch            Event      what a rank reported, or its exit
      WriteStacks                                   Stacks     unusual process states
      End                                           Ended
      Finish, Fail: leave, with this result         Beats      the heartbeats of ranks that moved, each second
                                                    Signaled   the host received a signal

    ssh only: the connection is stdin and stdout
      Ask         a question before the start       Answer, or Fail
      KeepAlive   each few seconds

    a cluster's launcher only: the connection is TCP
                                                    Hello      rank and host

A message is one line of JSON: its fields, and ``kind``, the name of its class.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopipe.errors import ArtifactError, AutopipeError, RunError
from autopipe.ir import artifact, decoding
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.request import WorkerSpec

BEAT_SECONDS = 0.25  # between two reports of heartbeats, while the ranks agree where to stop
MOVED_SECONDS = 1.0  # between two reports at other times
KEEP_ALIVE_SECONDS = 2.0  # between two messages over ssh, at most
LOST_SECONDS = 6.0  # without a message over ssh from ranks that have begun, their host is lost
SILENCE_SECONDS = 15.0  # without a message over ssh, a peer considers its host cut off and ends
ANSWER_SECONDS = 60.0  # for an answer to a question
STACKS_SECONDS = 2.0  # for the ranks to write their stacks
END_SECONDS = 8.0  # for the ranks to end
GATHER_SECONDS = 600.0  # for all processes of a cluster's launcher to connect: queues and pods start slowly
HELLO_SECONDS = 10.0  # for a process that has connected to introduce itself
INTERRUPTED = 130  # exit code after Ctrl-C


@dataclass(frozen=True, slots=True)
class Start:
    """Start ranks."""

    attempt: int  # of the run; later messages carry it, so that those of an earlier attempt are ignored
    specs: tuple[WorkerSpec, ...]
    job: str = ""  # a file of the run directory that must be visible first; "": checked already
    digest: str = ""  # the SHA-256 of that file


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop before a minibatch; see ``launch.rank.graceful_stop``."""

    before: int
    agreed: bool


@dataclass(frozen=True, slots=True)
class WriteStacks:
    """Make every rank write its stacks to its log."""


@dataclass(frozen=True, slots=True)
class End:
    """Kill the ranks."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a rank, or the end of its process."""

    attempt: int
    event: dict[str, Any]  # at least with the keys kind and rank


@dataclass(frozen=True, slots=True)
class RankBeat:
    """The last heartbeat of a rank, with its age in place of a time: clocks of two hosts have no relation."""

    rank: int
    age: float  # seconds
    count: int
    waiting: bool
    doing: str
    bound: int
    stop: int

    @staticmethod
    def of(rank: int, beat: Beat) -> RankBeat:
        """Return the message for a heartbeat of this host."""
        age = time.monotonic() - beat.seconds
        return RankBeat(rank, age, beat.count, beat.waiting, beat.doing, beat.bound, beat.stop)

    def here(self) -> Beat:
        """Return the heartbeat in this host's monotonic time."""
        return Beat(self.count, time.monotonic() - self.age, self.waiting, self.doing, self.bound, self.stop)


@dataclass(frozen=True, slots=True)
class Beats:
    """The last heartbeats of the ranks of the host that have moved since the last message."""

    attempt: int
    beats: tuple[RankBeat, ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks are written. ``unusual``: (rank, state) of processes such as those stopped by a signal."""

    attempt: int
    unusual: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """No rank of the host is left."""

    attempt: int


# -- ssh -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the host before ranks start there: a function of ``launch.remote.answers``."""

    question: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question. Without one, the host sends ``Fail``."""

    value: Any


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Show a host that the connection works."""


# -- a cluster's launcher --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a peer. ``rank`` and the three sizes: from the cluster's launcher."""

    version: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str


@dataclass(frozen=True, slots=True)
class Signaled:
    """A host received a signal that requests the end of the run."""

    attempt: int
    signal: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave: the run is done."""

    code: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Leave: the run failed. The fields are those of ``AutopipeError``."""

    what: str
    where: str
    remedy: str
    code: int

    @staticmethod
    def of(error: BaseException) -> Fail:
        """Return the message for an exception of rank 0's process."""
        if isinstance(error, AutopipeError):
            fields = _text(error.what), _text(error.where), _text(error.remedy)
            return Fail(*fields, error.exit_code)
        if isinstance(error, KeyboardInterrupt):
            return Fail("stopped by Ctrl-C", "", "", INTERRUPTED)
        return Fail(_text(f"rank 0: {type(error).__name__}: {error}"), "", "", 1)

    def error(self) -> BaseException:
        """Return the exception that another rank's process raises."""
        if self.code == INTERRUPTED:
            return KeyboardInterrupt()
        error = RunError(self.what, where=self.where, remedy=self.remedy)
        error.exit_code = self.code
        return error


Message = (
    Start | Stop | WriteStacks | End | Event | Beats | Stacks | Ended
    | Ask | Answer | KeepAlive | Hello | Signaled | Finish | Fail
)  # fmt: skip
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


def _text(text: str) -> str:
    """Return a text without characters that ``decode`` refuses."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    # an event may contain NaN, such as a loss
    return json.dumps({"kind": type(message).__name__, **fields}, default=artifact.encode).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read a line. Raises: ValueError if it is not a message, or a field has the wrong type."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("not a message") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or record["kind"] not in _KINDS:
        raise ValueError("not a message")
    if record["kind"] == "Beats":  # hundreds in a second
        return _beats(record)
    kind = _KINDS[record["kind"]]
    # another version may add fields: they are ignored, so that the version can be reported
    known = {field.name for field in dataclasses.fields(kind)}
    try:
        message: Message = decoding.decode(kind, {k: v for k, v in record.items() if k in known}, record["kind"])
    except ArtifactError as error:
        raise ValueError(str(error)) from None
    return message


def _beats(record: Mapping[str, Any]) -> Beats:
    attempt, beats = record.get("attempt"), record.get("beats")  # faster than artifact.decode
    if type(attempt) is not int or type(beats) is not list or any(type(beat) is not dict for beat in beats):
        raise ValueError("not a message")
    rows = [[beat.get(field) for field in _BEAT] for beat in beats]
    if not all(type(value) in types for row in rows for value, types in zip(row, _BEAT.values(), strict=True)):
        raise ValueError("not a heartbeat")
    return Beats(attempt, tuple(RankBeat(*row) for row in rows))


_INT = (int,)
_BEAT = {"rank": _INT, "age": (float, int), "count": _INT, "waiting": (bool,), "doing": (str,)}
_BEAT |= {"bound": _INT, "stop": _INT}


def in_wall_time(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event whose spans, if it has some, are in wall time. A rank reports them in monotonic time."""
    return _shifted(event, time.time() - time.monotonic()) if event["kind"] == "spans" else dict(event)


def corrected(event: Mapping[str, Any], offset_ns: int) -> dict[str, Any]:
    """Return an event with its times on this host's clock. ``offset_ns``: the other host's clock minus this one's."""
    result = _shifted(event, -offset_ns / 1e9) if offset_ns else dict(event)
    if "time_ns" in result:
        result["time_ns"] -= offset_ns
    if "time" in result:
        result["time"] -= offset_ns / 1e9
    return result


def _shifted(event: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    if "spans" not in event:
        return dict(event)
    return {**event, "spans": [(name, start + seconds, end + seconds) for name, start, end in event["spans"]]}
