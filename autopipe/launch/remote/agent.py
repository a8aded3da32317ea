"""The agent: ``python -m autopipe.launch.remote.agent``, started on a host by ssh, runs the ranks that belong there.

It takes requests as JSON lines on stdin and answers on stdout; it listens on no port, so nobody else can ask it.
Whoever started it must be heard from: when stdin ends or stays silent, the agent ends its ranks and itself, so that a
host that was cut off does not compute on alone. Its ranks die with it, whatever it dies of.

::

    coordinator -> agent                         agent -> coordinator
      hello     host, cwd, environment             facts     versions, memory, addresses
      clock     id                                 clock     id, time_ns
      digests   paths                              digests   path -> SHA-256, "" where it cannot be read
      address   interface, towards                 address   address, interface
      probe     address                            probing   port: for others to try
      reach     targets, seconds                   reached   failures: (name, why)
      listen    address                            listening address, port: for rank 0
      start     specs                              started   then come the ranks' own events, and exit
      stop      before, agreed: see launch.rank.graceful_stop
      stacks                                       odd       rank -> what is odd about it
      end                                          ended
      beat                                         beats     the last note of each rank; every half second

What cannot be done is answered with ``refused``: message, where, remedy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from autopipe.errors import AutopipeError
from autopipe.ir import artifact
from autopipe.launch.rank.forked import ForkedRanks, preload
from autopipe.launch.remote import facts, network
from autopipe.launch.request import WorkerSpec

BEAT_SECONDS = 0.5
# without a word from the coordinator for so long, a host takes itself to be cut off
SILENCE_SECONDS = 15.0
# how long ranks may take to end before the agent leaves without them; they are killed by its end
LEAVE_SECONDS = 3.0
_CHUNK = 65536


class Agent:
    """One host's end. ``source``, ``sink``: file descriptors of the requests and the answers."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._requests: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="autopipe-agent-"))
        self._ranks: ForkedRanks | None = None
        self._mine: list[int] = []
        self._listener: socket.socket | None = None
        self._probes: list[socket.socket] = []
        self._handlers: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "hello": self._hello,
            "clock": lambda asked: {"kind": "clock", "id": asked["id"], "time_ns": time.time_ns()},
            "digests": self._digests,
            "address": self._address,
            "listen": self._listen,
            "probe": self._probe,
            "reach": self._reach,
            "start": self._start,
            "stacks": self._stacks,
        }

    def serve(self) -> None:
        """Answer until the end is asked for, or nobody is there to ask."""
        for task in (self._read, self._beat, self._fence):
            threading.Thread(target=task, daemon=True).start()
        try:
            while self._turn():
                pass
        finally:
            if self._ranks is not None:
                self._ranks.end()
            self._clear()

    def _turn(self) -> bool:
        ranks = self._ranks
        wait([self._woken, *(ranks.waitable() if ranks is not None else [])])
        for event in ranks.poll(0) if ranks is not None else ():
            if event["kind"] == "exit":  # what it did last goes ahead: the beat of every half second may not have told
                self._send_notes()
            self._send(in_wall_time(event))
        if wait([self._woken], 0):
            os.read(self._woken, _CHUNK)
        while not self._requests.empty():
            asked = self._requests.get()
            if asked["kind"] == "end":
                if self._ranks is not None:
                    self._ranks.end()
                    self._ranks = None
                self._send({"kind": "ended"})
                return False
            if asked["kind"] == "stop":
                if self._ranks is not None:
                    self._ranks.set_stop(asked["before"], asked["agreed"])
            else:
                self._answer(asked)
        return True

    def _answer(self, asked: Mapping[str, Any]) -> None:
        try:
            self._send(self._handlers[asked["kind"]](asked))
        except (AutopipeError, OSError) as error:
            told = {"message": str(error), "where": "", "remedy": ""}
            if isinstance(error, AutopipeError):
                told = {"message": error.what, "where": error.where, "remedy": error.remedy}
            self._send({"kind": "refused", "asked": asked["kind"], **told})

    # -- what runs beside: nothing that a rank's start waits for may keep these waiting -------------------------------

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._source, _CHUNK):
            self._heard = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                if asked["kind"] != "beat":
                    self._ask_myself(asked)
        self._leave()

    def _beat(self) -> None:
        while True:
            self._send_notes()
            time.sleep(BEAT_SECONDS)

    def _fence(self) -> None:
        """Leave where nothing is heard; apart from what sends, which waits for ever on a link that is cut."""
        while time.monotonic() - self._heard < SILENCE_SECONDS:
            time.sleep(BEAT_SECONDS)
        self._leave()

    def _notes(self) -> list[tuple[Any, ...]]:
        ranks, now = self._ranks, time.monotonic()
        if ranks is None:
            return []
        try:
            beats = ranks.beats()
        except ValueError:  # the run has just ended, and its heartbeats are closed
            return []
        mine = ((rank, beats[rank]) for rank in self._mine)
        return [(rank, b.count, now - b.seconds, b.waiting, b.doing, b.bound, b.stop) for rank, b in mine]

    def _leave(self) -> None:
        """Nobody is there any more: end the ranks, and leave even if that cannot be done in time."""
        self._ask_myself({"kind": "end"})
        time.sleep(LEAVE_SECONDS)
        self._clear()
        os._exit(1)

    def _clear(self) -> None:
        """Kill what is left: the fork server may be in the middle of its imports, and would look up only after them."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ask_myself(self, asked: Mapping[str, Any]) -> None:
        self._requests.put(asked)
        os.write(self._wake, b".")

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self._write(message)

    def _send_notes(self) -> None:
        with self._sending:  # taken and sent at once: older notes never come behind newer ones
            self._write({"kind": "beats", "beats": self._notes()})

    def _write(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._sink, line) :]
        except OSError:
            return  # nobody reads; the end of stdin says so too

    # -- requests ----------------------------------------------------------------------------------------------------

    def _hello(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        os.environ.update(asked["environment"])
        folder = Path(asked["cwd"])
        if folder.is_dir():
            os.chdir(folder)
        preload()  # torch is imported while the hosts are still being looked at
        return {"kind": "facts", **facts.collect(devices=asked["devices"]), "folder": folder.is_dir()}

    def _digests(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"kind": "digests", "digests": {path: file_digest(Path(path)) for path in asked["paths"]}}

    def _address(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if asked["interface"]:
            address = network.address_of(asked["interface"])
        else:
            address = network.own_address_towards(asked["towards"])
        return {"kind": "address", "address": address, "interface": network.interface_of(address)}

    def _listen(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self._listener = network.listen(asked["address"])
        return {"kind": "listening", "address": asked["address"], "port": self._listener.getsockname()[1]}

    def _probe(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self._probes.append(network.listen(asked["address"]))
        return {"kind": "probing", "port": self._probes[-1].getsockname()[1]}

    def _reach(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        tried = ((name, network.reach(address, port, asked["seconds"])) for name, address, port in asked["targets"])
        return {"kind": "reached", "failures": [(name, why) for name, why in tried if why]}

    def _start(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        specs: list[WorkerSpec] = [artifact.decode(WorkerSpec, spec, "rank") for spec in asked["specs"]]
        self._ranks = ranks = ForkedRanks(self._scratch, specs[0].world_size)
        self._mine = [spec.rank for spec in specs]
        for spec in specs:
            store = spec.store or f"file://{self._scratch / 'store'}"
            told = replace(spec, store=store, heartbeats=str(ranks.heartbeats))
            ranks.start(told, self._listener if spec.rank == 0 else None)
        for used in (*self._probes, *([self._listener] if self._listener is not None else [])):
            used.close()
        return {"kind": "started"}

    def _stacks(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"kind": "odd", "odd": self._ranks.write_stacks() if self._ranks is not None else {}}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def in_wall_time(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an event with its spans in this machine's wall time: monotonic clocks of two machines have no relation."""
    if event["kind"] != "spans":
        return event
    shift = time.time() - time.monotonic()
    return {**event, "spans": [(what, start + shift, end + shift) for what, start, end in event["spans"]]}


def main() -> None:
    """Serve on stdin and stdout. Whatever else prints here goes to stderr: stdout is for answers alone."""
    sink = os.dup(1)
    os.dup2(2, 1)
    Agent(0, sink).serve()


if __name__ == "__main__":
    main()
