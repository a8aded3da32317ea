"""The process of a rank other than 0, under a cluster's launcher: starts its rank when rank 0's process says so.

It prints nothing and decides nothing: what its rank says goes to rank 0, and what made the run fail comes from there,
so that every process ends with the same message. Where rank 0 itself is gone, that is the message.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopipe import __version__
from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.launch.rank.forked import ForkedRanks, preload
from autopipe.launch.rank.signals import ENDING, STOPPING, ignore_stop_signals
from autopipe.launch.remote.agent import file_digest, in_wall_time
from autopipe.launch.remote.identity import RankIdentity
from autopipe.launch.remote.json_socket import Wire, WireError, ready_of
from autopipe.launch.remote.rendezvous import GATHER_SECONDS, INTERRUPTED
from autopipe.launch.request import WorkerSpec

BEAT_SECONDS = 0.2
RETRY_SECONDS = 0.2
LEAVE_SECONDS = 5.0
# a network file system shows a new file to another host only after a while
VISIBLE_SECONDS = 30.0


def connect(host: str, port: int, seconds: float = GATHER_SECONDS) -> Wire:
    """Connect to rank 0's process, which may not be there yet.

    Raises: RunError where nobody has listened there for ``seconds``.
    """
    end = time.monotonic() + seconds
    why = "timed out"
    while time.monotonic() < end:
        try:
            return Wire(socket.create_connection((host, port), timeout=10.0))
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(RETRY_SECONDS)
    raise RunError(
        f"rank 0 does not answer at {host} port {port}: {why}",
        where=socket.gethostname(),
        remedy="check that rank 0 was started, that MASTER_ADDR is an address of its host that this host can reach, "
        "and that no firewall closes MASTER_PORT",
    )


def follow(here: RankIdentity, wire: Wire) -> int:
    """Do what rank 0's process says, to the end, and return the exit code.

    Raises: AutopipeError with the message of whatever failed first, on whichever rank; KeyboardInterrupt where rank 0
    was interrupted.
    """
    asked: list[str] = []
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, _signals_left_to_rank_0(asked):
        preload()  # torch is imported while rank 0 prepares
        follower = _Follower(here, wire, Path(scratch), asked)
        try:
            return follower.run()
        except WireError as error:
            raise RunError(
                f"the process of rank 0 is gone ({error}): it was killed, or its host does not answer",
                where=f"rank {here.rank} on {socket.gethostname()}",
                remedy="look at the launcher's output, and at what rank 0 printed",
            ) from None
        finally:
            follower.end()
            wire.close()


class _Follower:
    """One process's part: at most one rank at a time, restarted as often as rank 0 says."""

    def __init__(self, here: RankIdentity, wire: Wire, scratch: Path, asked: list[str]) -> None:
        self._here, self._wire, self._scratch, self._asked = here, wire, scratch, asked
        self._ranks: ForkedRanks | None = None
        self._attempt = self._rank = 0
        self._beaten = 0.0

    def run(self) -> int:
        here = self._here
        self._wire.send(
            {
                "kind": "hello",
                "version": __version__,
                "rank": here.rank,
                "world_size": here.world_size,
                "local_rank": here.local_rank,
                "local_world_size": here.local_world_size,
                "host": socket.gethostname(),
            }
        )
        while True:
            ready = ready_of([self._wire, *(self._ranks.waitable() if self._ranks else ())], BEAT_SECONDS)
            if self._ranks is not None:
                for event in self._ranks.poll(0):
                    if event["kind"] == "exit":  # what it did last goes ahead
                        self._beaten = 0.0
                        self._beat(self._ranks)
                    self._say("event", event=in_wall_time(event))
                self._beat(self._ranks)
            while self._asked:
                self._say("asked", signal=self._asked.pop(0))
            for message in self._wire.receive() if self._wire in ready else ():
                if message["kind"] == "finished":
                    return int(message["code"])
                self._do(message)

    def _do(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "launch":
            self._attempt = message["attempt"]
            self._launch(message)
        elif kind == "stacks" and self._ranks is not None:
            for what in self._ranks.write_stacks().values():
                self._say("odd", what=what)
        elif kind == "stop" and self._ranks is not None:
            self._ranks.set_stop(message["proposed"], message["agreed"])
        elif kind == "end":
            self.end()
            self._say("ended")
        elif kind == "failed":
            self.end()
            self._await_rank_0()
            if message["code"] == INTERRUPTED:
                raise KeyboardInterrupt
            error = RunError(message["what"], where=message["where"], remedy=message["remedy"])
            error.exit_code = message["code"]
            raise error

    def _await_rank_0(self) -> None:
        """Return when rank 0's process has ended, or after a moment."""
        end = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(WireError):
            while (left := end - time.monotonic()) > 0:
                if ready_of([self._wire], left):
                    self._wire.receive()

    def _launch(self, message: Mapping[str, Any]) -> None:
        """Start the rank, where the run directory is the one that rank 0 wrote."""
        spec: WorkerSpec = artifact.decode(WorkerSpec, message["spec"], "worker")
        self._rank = spec.rank
        job, host = Path(message["job"]), socket.gethostname()
        if not _is_visible(job, message["digest"]):
            self._refuse(
                f"the run directory is not the same on {host}: {job} is not what rank 0 wrote",
                "put --run-dir and --work-dir on a file system that every host shares",
            )
            return
        folder = self._scratch / str(self._attempt)
        folder.mkdir()
        self._ranks = ForkedRanks(folder, spec.world_size, [host] * spec.world_size)
        self._ranks.start(replace(spec, heartbeats=str(self._ranks.heartbeats)))

    def _refuse(self, what: str, remedy: str) -> None:
        """Report an error as if the rank had."""
        error = {"kind": "error", "rank": self._rank, "message": what, "where": "", "remedy": remedy}
        error |= {"stage": None, "instruction": "", "microbatch": -1, "traceback": "", "secondary": False}
        self._say("event", event=error | {"time_ns": time.time_ns()})

    def _beat(self, ranks: ForkedRanks) -> None:
        """Pass on what the rank noted last, a few times a second."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            beat = ranks.beats()[self._rank]
            self._say("beat", beat=artifact.encode(beat), age=now - beat.seconds)

    def _say(self, kind: str, **fields: Any) -> None:
        self._wire.send({"kind": kind, "attempt": self._attempt, **fields})

    def end(self) -> None:
        """Kill the rank, where there is one."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None


def _is_visible(path: Path, digest: str) -> bool:
    """Whether a file is here with the contents of that digest, now or soon."""
    end = time.monotonic() + VISIBLE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # a network file system looks anew
            if file_digest(path) == digest:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def _signals_left_to_rank_0(asked: list[str]) -> Iterator[None]:
    """Do not end by what asks the run to end: rank 0 answers for all.

    What may have been sent to this host alone is kept; Ctrl-C and USR1 go to every process, and rank 0 counts them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def keep(number: int, frame: Any) -> None:
        if number in ENDING:
            asked.append(signal.Signals(number).name)

    previous = {number: signal.signal(number, keep) for number in STOPPING}
    try:
        yield
    except BaseException:
        ignore_stop_signals()
        raise
    for number, handler in previous.items():
        signal.signal(number, handler)
