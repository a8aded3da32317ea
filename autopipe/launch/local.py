"""The local launcher: ranks as processes on this machine, started by a fork server, watched by this process.

One failing rank ends the run: the others are killed within tenths of a second, and the rank that failed *first* is the
one that is reported, with its own message; that its neighbours then lost their connection is left out.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from autopipe.errors import WorkerError
from autopipe.ir import artifact
from autopipe.launch.heartbeat import Heartbeats
from autopipe.runtime.job import RunDirectory

TICK_SECONDS = 0.1
# how long the other ranks may still report after the first sign of a failure: the cause may be among them
GRACE_SECONDS = 0.5
_INSTRUCTION = re.compile(r"(\d+)(?:[FBIWRS]|SF|RF|SB|RB)")
_PRELOAD = ["autopipe.launch.worker"]

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Rank:
    rank: int
    process: ForkServerProcess
    connection: Connection
    done: bool = False
    ended: bool = False
    error: dict[str, Any] | None = None
    died_ns: int = 0


@dataclass(slots=True)
class LocalLauncher:
    """Runs the ranks of a run directory. ``watchdog_seconds``: without any progress for so long, a hang is declared."""

    run: RunDirectory
    world_size: int
    on_event: OnEvent
    watchdog_seconds: float = 300.0
    _ranks: list[_Rank] = field(default_factory=list)

    def launch(self, body: str = "train", *, batch_size: int = 0, evaluation_data: str = "") -> None:
        """Start the ranks and return when all are done.

        Raises: WorkerError for the first failure. Whatever way it ends, no rank is left.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        _start_fork_server()
        with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, _sigterm_as_interrupt():
            asked = {"body": body, "batch_size": batch_size, "evaluation_data": evaluation_data}
            beats = Heartbeats(Path(scratch) / "heartbeats", self.world_size, create=True)
            try:
                for rank in range(self.world_size):
                    self._ranks.append(self._start(context, rank, Path(scratch), asked))
                self._watch(beats)
            finally:
                self._kill()
                beats.close()

    def _start(self, context: Any, rank: int, scratch: Path, asked: dict[str, Any]) -> _Rank:
        from autopipe.launch.worker import WorkerSpec, rank_main

        receive, send = context.Pipe(duplex=False)
        spec = WorkerSpec(
            run=str(self.run.path.resolve()),
            rank=rank,
            world_size=self.world_size,
            store=str(scratch / "store"),
            heartbeats=str(scratch / "heartbeats"),
            timeout_seconds=max(self.watchdog_seconds * 2, 60.0),
            **asked,
        )
        process = context.Process(
            target=rank_main, args=(json.dumps(artifact.encode(spec)), send), name=f"rank {rank}", daemon=True
        )
        process.start()
        send.close()
        return _Rank(rank, process, receive)

    def _watch(self, beats: Heartbeats) -> None:
        progress = time.monotonic()
        seen = [-1] * self.world_size
        while not all(rank.done and rank.ended for rank in self._ranks):
            self._pump(TICK_SECONDS)
            failed = [rank for rank in self._ranks if rank.error or (rank.ended and not rank.done)]
            if failed:
                self._fail(beats)
            counts = [beats.read(rank).count for rank in range(self.world_size)]
            if counts != seen:
                seen, progress = counts, time.monotonic()
            elif time.monotonic() - progress > self.watchdog_seconds:
                self._hang(beats, time.monotonic() - progress)
            states = [beats.read(rank) for rank in range(self.world_size)]
            self.on_event({"kind": "tick", "ranks": [(state.doing, state.waiting) for state in states]})

    def _pump(self, timeout: float) -> None:
        """Take in what the ranks say, and who has ended, for at most ``timeout`` seconds."""
        waitable: list[Any] = []
        for rank in self._ranks:
            if not rank.connection.closed:
                waitable.append(rank.connection)
            if not rank.ended:
                waitable.append(rank.process.sentinel)
        ready = set(wait(waitable, timeout))
        for rank in self._ranks:
            if rank.connection in ready:
                self._read(rank)
        for rank in self._ranks:
            if not rank.ended and rank.process.sentinel in ready:
                rank.process.join()
                rank.ended, rank.died_ns = True, time.time_ns()

    def _read(self, rank: _Rank) -> None:
        try:
            while rank.connection.poll():
                event = json.loads(rank.connection.recv_bytes())
                if event["kind"] == "done":
                    rank.done = True
                elif event["kind"] == "error":
                    rank.error = event
                else:
                    self.on_event(event)
        except (EOFError, OSError):
            rank.connection.close()

    def _fail(self, beats: Heartbeats) -> None:
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and not all(rank.ended or rank.error for rank in self._ranks):
            self._pump(0.02)
        raise self._cause(beats)

    def _cause(self, beats: Heartbeats) -> WorkerError:
        """Name the rank that failed first: an error of its own, or a death; else the first that lost a connection."""
        own = [(r.error["time_ns"], r) for r in self._ranks if r.error and not r.error["secondary"]]
        died = [(r.died_ns, r) for r in self._ranks if r.ended and not r.done and r.error is None]
        lost = [(r.error["time_ns"], r) for r in self._ranks if r.error]
        _, rank = min(own + died or lost, key=lambda entry: (entry[0], entry[1].rank))
        log = self.run.log(rank.rank)
        if rank.error is not None:
            error = rank.error
            return WorkerError(
                error["message"],
                rank=rank.rank,
                stage=error["stage"],
                instruction=error["instruction"],
                remote_traceback=error["traceback"],
                where=error["where"],
                remedy=error["remedy"] or f"read what the rank printed: {log}",
            )
        beat = beats.read(rank.rank)
        plan = self.run.plan()
        stages = [stage.index for stage in plan.stages if rank.rank in stage.ranks]
        doing = _INSTRUCTION.match(beat.doing)
        stage = int(doing[1]) if doing else (stages[0] if len(stages) == 1 else None)
        return WorkerError(
            _death(rank.process.exitcode),
            rank=rank.rank,
            stage=stage,
            instruction=beat.doing,
            remedy=f"read what the rank printed: {log}",
        )

    def _hang(self, beats: Heartbeats, seconds: float) -> None:
        """No rank has moved: blame one that is not waiting for another; of several the one that moved longest ago."""
        for rank in self._ranks:
            if rank.process.pid is not None and not rank.ended:
                _signal(rank.process, signal.SIGUSR2)  # every thread's stack goes to the rank's log
        time.sleep(0.3)
        states = [(beats.read(rank.rank), rank.rank) for rank in self._ranks]
        state, rank_number = min(states, key=lambda entry: (entry[0].waiting, entry[0].seconds, entry[1]))
        doing = "; ".join(f"rank {r}: {s.doing}{' (waiting)' if s.waiting else ''}" for s, r in states)
        stages = [stage.index for stage in self.run.plan().stages if rank_number in stage.ranks]
        raise WorkerError(
            f"no rank has moved for {seconds:.0f} s; {doing}",
            rank=rank_number,
            stage=stages[0] if len(stages) == 1 else None,
            instruction=state.doing,
            remedy=f"the stack of every thread is in {self.run.log(rank_number)}; slow steps need a longer watchdog",
        )

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.ended:
                _signal(rank.process, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.join(5)
            if not rank.connection.closed:
                rank.connection.close()


def _start_fork_server() -> None:
    """Start it deaf to Ctrl-C, which is this process's to handle: else it prints a traceback while it imports torch."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (kill -9, or the kernel ran out of memory)" if name == "SIGKILL" else ""
        return f"the process was killed by {name}{hint}"
    return f"the process exited with code {code} before it was finished"


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run the way Ctrl-C does, ranks and all. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
