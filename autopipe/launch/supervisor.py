"""The supervisor: watches ranks that a launcher started, and reports the first failure.

::

            events, ends, heartbeats
    Ranks -------------------------> Supervisor --> on_event, or one WorkerError
          <-------------------------
            write stacks, end

One failing rank ends the run: the others are ended within tenths of a second. The error reports the rank that failed
*first*, with its own message, and leaves out that its neighbours then lost their connections.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopipe.errors import AutopipeError, WorkerError
from autopipe.launch.rank import stacks
from autopipe.launch.rank.graceful_stop import Agreement
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.request import LaunchRequest
from autopipe.workers.fork_server import death
from autopipe.workers.unguarded import EXIT_CODE, REMEDY, WHAT

TICK_SECONDS = 0.1
# a longer wait than a tick: the run was suspended, as by Ctrl-Z, or with the machine
PAUSE_SECONDS = 5.0
# how long the other ranks may still report after the first failure: one of them may be the cause
GRACE_SECONDS = 0.5
# a killed process closes its connections, and ends when the driver of its GPU has released its memory
GPU_SECONDS = 10.0
# what NCCL's watchdog thread writes before it aborts the process, and how much of the log's end may contain it
_NCCL, _TAIL_BYTES = b"ProcessGroupNCCL", 1 << 16
STACKS_SECONDS = 1.0
_INSTRUCTION = re.compile(r"(\d+)(?:[FBIWRS]|SF|RF|SB|RB)")


class Ranks(Protocol):
    """Ranks that a launcher has started, on any host."""

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank, "" for this machine."""

    @property
    def patience_seconds(self) -> float:
        """How much later than a lost connection its cause may be detected."""

    def poll(self, timeout: float) -> Iterable[Mapping[str, Any]]:
        """Return the events of the ranks and of the launcher within ``timeout`` seconds.

        The launcher's are ``{"kind": "exit", "rank", "code", "time_ns"}`` for a process that has ended, with a negative
        code for a signal, and ``{"kind": "lost", "host", "ranks", "message", "remedy", "time_ns"}`` for a lost host.
        """

    def beats(self) -> Sequence[Beat]:
        """Return the last heartbeat of each rank, in this machine's monotonic time."""

    def set_stop(self, before: int, agreed: bool) -> None:
        """Send every rank the minibatch before which it stops, and whether all agree; see launch.rank.graceful_stop."""

    def write_stacks(self) -> Mapping[int, str]:
        """Make every living rank write its stacks to its log; return unusual process states, such as "stopped"."""

    def end(self) -> None:
        """End all ranks, and return when none is left on a host that can be reached."""


@dataclass(slots=True)
class _State:
    """The state of one rank."""

    rank: int
    done: bool = False  # it has reported the completion of its work
    ended: bool = False  # its process has ended, or its host is lost
    error: Mapping[str, Any] | None = None  # the event of its error
    ended_ns: int = 0  # when its process ended
    code: int | None = None  # the exit code of its process
    lost: Mapping[str, Any] | None = None  # the event of its lost host

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.ended and not self.done)


class Supervisor:
    """Watches the ranks of a request. No progress of any rank for ``watchdog_seconds`` is a hang."""

    def __init__(self, request: LaunchRequest, ranks: Ranks) -> None:
        self.run, self.on_event, self.ranks = request.run, request.on_event, ranks
        self.watchdog_seconds, self.slow_seconds = request.watchdog_seconds, request.slow_seconds
        self.stop, self._agreement = request.stop, Agreement(ranks.set_stop)
        self._states = [_State(rank) for rank in range(len(ranks.hosts))]
        self._on_gpu = False  # a rank has reported its GPU

    def watch(self) -> None:
        """Return when every rank is done and its process has ended.

        Raises: WorkerError for the first failure. The caller ends the remaining ranks.
        """
        progress = time.monotonic()
        looked = 0.0
        seen: list[int] = []
        while not all(state.done and state.ended for state in self._states):
            waiting = time.monotonic()
            self._take(TICK_SECONDS)
            if (paused := time.monotonic() - waiting - TICK_SECONDS) > PAUSE_SECONDS:
                progress += paused  # this process did not run, and probably no rank did
            if any(state.failed for state in self._states):
                self._await_others()
                raise self._cause()
            if time.monotonic() - looked < TICK_SECONDS:  # events arrive more often
                continue
            looked = time.monotonic()
            beats = self.ranks.beats()
            if self.stop is not None and self.stop.signal_name:
                if self._agreement.proposed < 0:
                    self.on_event({"kind": "stopping", "signal": self.stop.signal_name})
                self._agreement.move(beats)
            counts = [beat.count for beat in beats]
            if counts != seen:
                seen, progress = counts, time.monotonic()
            elif time.monotonic() - progress > self._limit(beats):
                hang = self._hang(time.monotonic() - progress)
                if any(state.failed and not self._is_secondary(state) for state in self._states):
                    raise self._cause()  # a lost host, for example, was detected while the stacks were written
                raise hang
            self.on_event({"kind": "tick", "ranks": [(beat.doing, beat.waiting) for beat in beats]})

    def _limit(self, beats: Sequence[Beat]) -> float:
        """Return the seconds without progress that count as a hang: a plan predicts instructions only."""
        busy = [beat for state, beat in zip(self._states, beats, strict=True) if not (state.done or beat.waiting)]
        planned = all(_INSTRUCTION.match(beat.doing) for beat in busy)
        return self.watchdog_seconds if planned else self.slow_seconds

    def _take(self, timeout: float) -> None:
        for event in self.ranks.poll(timeout):
            kind = event["kind"]
            if kind == "lost":
                for rank in event["ranks"]:
                    state = self._states[rank]
                    if not state.ended:
                        state.ended, state.ended_ns, state.lost = True, event["time_ns"], event
            elif kind == "done":
                self._states[event["rank"]].done = True
            elif kind == "error":
                self._states[event["rank"]].error = event
            elif kind == "exit":
                state = self._states[event["rank"]]
                state.ended, state.ended_ns, state.code = True, event["time_ns"], event["code"]
            else:
                self._on_gpu |= kind == "device"
                self.on_event(dict(event))

    def _await_others(self) -> None:
        """Let the other ranks report for a moment; longer if only lost connections have been reported."""
        begin = time.monotonic()
        patience = max(self.ranks.patience_seconds, GPU_SECONDS if self._on_gpu else 0.0)
        while not all(state.ended or state.error for state in self._states):
            only_lost = all(self._is_secondary(s) for s in self._states if s.failed)
            if time.monotonic() - begin > (patience if only_lost else GRACE_SECONDS):
                return
            self._take(0.02)

    def _is_secondary(self, state: _State) -> bool:
        """Return whether a failed rank only lost its connection to another.

        If a peer is gone or a timeout expires, the watchdog thread of NCCL aborts the process, with its reason in the
        log.
        """
        if state.error is not None:
            return bool(state.error["secondary"])
        if state.lost is not None or state.code != -signal.SIGABRT:
            return False
        log = self.run.log(state.rank)
        if not log.is_file():
            return False
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
            return _NCCL in file.read()

    def _cause(self) -> WorkerError:
        """Return the first failure: an error of a rank itself, or its death; else the first lost connection."""
        failed = [(s.error["time_ns"] if s.error else s.ended_ns, s) for s in self._states if s.failed]
        causes = [entry for entry in failed if not self._is_secondary(entry[1])]
        _, state = min(causes or failed, key=lambda entry: (entry[0], entry[1].rank))
        host = self.ranks.hosts[state.rank]
        log = self._log(state.rank)
        if state.error is not None:
            error = state.error
            return WorkerError(
                error["message"],
                rank=state.rank,
                host=host,
                stage=error["stage"],
                modules=self._modules(error["stage"]),
                instruction=error["instruction"],
                remote_traceback=error["traceback"],
                where=error["where"],
                remedy=error["remedy"] or f"read what the rank printed: {log}",
                out_of_memory=error.get("out_of_memory"),
            )
        if state.code == EXIT_CODE:
            return WorkerError(WHAT, rank=state.rank, host=host, remedy=REMEDY)
        doing = self.ranks.beats()[state.rank].doing
        return WorkerError(
            state.lost["message"] if state.lost is not None else death(state.code),
            rank=state.rank,
            host=host,
            stage=(stage := self._stage(state.rank, doing)),
            modules=self._modules(stage),
            instruction=doing,
            remedy=state.lost["remedy"] if state.lost is not None else f"read what the rank printed: {log}",
        )

    def _hang(self, seconds: float) -> WorkerError:
        """Return the error for a hang. It names a rank that waits for no other: the one stuck for longest."""
        logs = [self.run.log(rank) for rank in range(len(self._states))]
        mark = stacks.sizes(logs)
        unusual = self.ranks.write_stacks()
        end = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < end:
            self._take(TICK_SECONDS)
        beats = self.ranks.beats()
        living = [state.rank for state in self._states if not state.ended]
        rank = min(living, key=lambda r: (r not in unusual, beats[r].waiting, beats[r].seconds, r))
        doing = "; ".join(
            f"rank {r}: {b.doing}{' (waiting)' if b.waiting else ''}{f' ({unusual[r]})' if r in unusual else ''}"
            for r, b in enumerate(beats)
        )
        written = stacks.since(logs, mark)
        return WorkerError(
            f"no rank has moved for {seconds:.0f} s; {doing}{stacks.format_stacks(written)}",
            rank=rank,
            host=self.ranks.hosts[rank],
            stage=(stage := self._stage(rank, beats[rank].doing)),
            modules=self._modules(stage),
            instruction=beats[rank].doing,
            where=stacks.innermost(written.get(rank, "")),
            remedy=f"the stack of every thread is in {self._log(rank)}; slow steps need a longer --watchdog",
        )

    def _stage(self, rank: int, doing: str) -> int | None:
        match = _INSTRUCTION.match(doing)
        if match:
            return int(match[1])
        plan = self.run.plan()
        stages = [stage.index for stage in plan.stages if plan.rank_of(rank) in stage.ranks]
        return stages[0] if len(stages) == 1 else None

    def _modules(self, stage: int | None) -> str:
        """Return the names of the modules of a stage, "" if the plan does not have them."""
        if stage is None:
            return ""
        try:
            return self.run.plan().stages[stage].modules
        except (AutopipeError, IndexError):  # the failure itself must be reported
            return ""

    def _log(self, rank: int) -> str:
        host = self.ranks.hosts[rank]
        return f"{self.run.log(rank)}{f' on {host}' if host else ''}"
