"""The supervisor of a sweep: prepares structures, and runs jobs on devices in leases, longest remaining time first.

::

    structure --prepare_jobs--> profile, plan, stage files --> its jobs wait
    waiting --train_lease--> running --stop (another job is behind by more than a lease)--> waiting, with a checkpoint
                                     --done--> done; or paused at a step of [stop] until all jobs are there
                                     --error--> failed: a row with its error; the other jobs go on
                                     --killed--> waiting, up to three times without progress

All is in this process: jobs are in processes of their own, which end with it. Each is an ordinary ``train``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopipe.commands.settings import Events
from autopipe.errors import AutopipeError, InternalError, WorkerError
from autopipe.ir import artifact
from autopipe.report.results import SweepEvent
from autopipe.sweep import state
from autopipe.sweep.devices import Devices
from autopipe.sweep.file import SweepFile
from autopipe.sweep.halving import best
from autopipe.sweep.job_process import LeaseTask, PrepareTask, prepare_jobs, train_lease
from autopipe.sweep.job_table import Board, Entry
from autopipe.sweep.leases import assign
from autopipe.sweep.sharing import Sharing
from autopipe.sweep.structures import Structure, as_text
from autopipe.workers.errors import restored
from autopipe.workers.task import Function
from autopipe.workers.worker import Worker, wait_for

POLL_SECONDS = 0.2
# between two writings of the table while only steps pass
SAVE_SECONDS = 2.0
SHOW_SECONDS = 0.5
# how often a job is started again after its process was killed before it made progress
MOST_DEATHS = 3
MOST_STEPS = 2**31 - 1
_WARNING = "warning: "


@dataclass(slots=True)
class _Preparation:
    """A structure that is being prepared."""

    structure: Structure
    process: Worker
    device: int


class Supervisor:
    """Runs the jobs of a board to their end, or until a stop is requested."""

    def __init__(
        self, sweep: SweepFile, board: Board, devices: Devices, places: int, events: Events, stop: Callable[[], str]
    ) -> None:
        """``places``: jobs that may share a device, or ``AUTO``; ``stop``: returns the source of a request to stop."""
        self.sweep, self.board, self.devices, self.events, self._stop = sweep, board, devices, events, stop
        self.sharing = Sharing(board, devices.indices, sweep.lease_seconds, places)
        self.folder = board.folder
        self.began = time.monotonic()
        self.happened: list[SweepEvent] = []
        self.notes: list[str] = []
        self.only_prepare = False
        self._warnings: set[str] = set()
        self._preparations: list[_Preparation] = []
        self._saved = self._shown = 0.0
        self._changed = True

    def run(self) -> bool:
        """Run until all jobs have ended, or have stopped. No process is left, however this returns.

        Returns: whether it was not stopped.
        """
        try:
            while True:
                stopping = bool(self._stop())
                if stopping:
                    self._stop_all()
                else:
                    if note := self.sharing.decide():
                        self._note(note)
                    self._prepare()
                    if not self.only_prepare:
                        self._compare()
                        self._assign()
                self._publish()
                if not self._processes():
                    if stopping or self._is_complete():
                        return not stopping
                    raise InternalError("no job of the sweep can run, and not all have ended")
                wait_for(self._processes(), POLL_SECONDS)
                self._take()
        finally:
            for process in self._processes():
                process.end()
            self.sharing.close()
            self._publish(now=True)

    @property
    def seconds(self) -> float:
        """The seconds since the sweep began."""
        return time.monotonic() - self.began

    def _is_complete(self) -> bool:
        if self.only_prepare:
            return True
        return all(entry.record.status in state.ENDED for entry in self.board.entries)

    def _processes(self) -> list[Worker]:
        jobs = [entry.process for entry in self.board.entries if entry.process is not None]
        return jobs + [preparation.process for preparation in self._preparations]

    # -- preparation -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare structures on free devices, before jobs take these."""
        busy = {preparation.structure.digest for preparation in self._preparations}
        for structure in self.board.structures:
            entries = self.board.entries_of(structure)
            unfinished = any(entry.record.status not in state.ENDED for entry in entries)
            if structure.prepared or structure.digest in busy or not unfinished:
                continue
            free = self._free()
            if not free:
                return
            shared = self.folder.shared(structure.digest)
            comparisons = structure.comparisons()
            task = PrepareTask(
                structure.first.target,
                as_text(structure.first),
                str(shared),
                self.devices.visible(free[:1]),
                str(shared / "output.log"),
                structure.parts,
                tuple(as_text(jobs[0]) for jobs in comparisons.values()),
            )
            process = _worker(prepare_jobs, task, f"preparing {structure.first.name}")
            self._preparations.append(_Preparation(structure, process, free[0]))
            self.events("preparing", {"job": structure.first.name, "jobs": len(structure.jobs), "device": free[0]})

    def _take_preparation(self, preparation: _Preparation) -> None:
        structure, process = preparation.structure, preparation.process
        for kind, fields in process.receive():
            if kind == "progress":
                self.events("progress", {**fields, "job": structure.first.name})
        if not process.ended:
            return
        self._preparations.remove(preparation)
        self._changed = True
        entries = self.board.entries_of(structure)
        if process.value is None:
            if process.died and structure.deaths < MOST_DEATHS:
                structure.deaths += 1
                return
            structure.prepared = True
            for entry in entries:
                self._fail(entry, process.error)
            return
        structure.learn(process.value)
        notes = [note for note in process.value["notes"] if structure.spilled or note.startswith(_WARNING)]
        for note in (*notes, *process.value["compared"]):
            if f"{structure.first.name}: {note}" not in self.notes:  # it may be prepared again, with a part
                self._note(note, structure.first.name)
        for jobs, error in zip(structure.comparisons().values(), process.value["errors"], strict=True):
            for job in jobs if error is not None else ():
                self._fail(self.board.entry(job), restored(error))

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _free(self) -> list[int]:
        """Return the devices with nothing on them."""
        taken = {*self.sharing.taken(), *(preparation.device for preparation in self._preparations)}
        return [device for device in self.devices.indices if device not in taken]

    def _assign(self) -> None:
        """Start and stop jobs as the scheduler says."""
        now = time.monotonic()
        prepared = {preparation.device for preparation in self._preparations}
        devices = [device for device in self.devices.indices if device not in prepared]
        # a job that stops leaves its places: they need no second job to stop
        ready = [entry for entry in self.board.ready() if self.sharing.may_begin(entry) and not entry.stopping]
        waiting = [entry.waiting(now) for entry in ready if entry.job.devices <= len(devices)]
        chosen = assign(waiting, devices, lease=self.sweep.lease_seconds, places=self.sharing.places)
        for entry in self.board.running():
            if entry.job.number not in chosen and not entry.stopping:
                entry.stop()
        for number, on in sorted(chosen.items()):
            entry, taken = self.board.entries[number - 1], self.sharing.taken()
            most = self.sharing.places - self.sharing.each(entry)
            if entry.process is None and all(taken[device] <= most for device in on):
                self._start(entry, on)

    def _start(self, entry: Entry, on: tuple[int, ...]) -> None:
        job, structure = entry.job, entry.structure
        seconds = entry.step_seconds
        every = min(max(1, round(self.sweep.lease_seconds / seconds)), MOST_STEPS) if seconds else 1
        task = LeaseTask(
            target=job.target,
            options=as_text(job),
            work_dir=str(self.folder.job(job)),
            run_dir=str(self.folder.run(job).path),
            shared=str(self.folder.shared(structure.digest)),
            devices=self.devices.visible(on),
            log=str(self.folder.log(job)),
            steps=entry.target or 0,
            checkpoint_every=every,
            evaluate_at_end=self.sweep.metric == "evaluation",
            spilled=structure.spilled,
            part_bytes=structure.part_bytes or 0,
            token=self.sharing.address(entry, on),
        )
        entry.begin(_worker(train_lease, task, f"training {job.name}"), on)
        self._happen(entry, "started")

    def _take(self) -> None:
        for preparation in list(self._preparations):
            self._take_preparation(preparation)
        for entry in self.board.running():
            assert entry.process is not None, "it runs"
            for kind, fields in entry.process.receive():
                if kind == "event":
                    entry.learn(fields["event"], fields["fields"])
                    self._tell(entry, fields["event"], fields["fields"])
            if entry.process.ended:
                self._ended(entry, entry.process)

    def _tell(self, entry: Entry, kind: str, fields: Mapping[str, Any]) -> None:
        """Show what a person should know of a run; warnings that several jobs have, once."""
        if kind in ("restart", "nonfinite"):
            self.events(kind, {**fields, "job": entry.job.name})
        elif kind == "note" and fields["text"].startswith(_WARNING) and fields["text"] not in self._warnings:
            self._note(fields["text"], entry.job.name)

    def _ended(self, entry: Entry, process: Worker) -> None:
        """Take the end of a lease."""
        stopping = entry.stopping
        entry.end(self.sweep.metric)
        if process.value is not None:
            record = entry.record
            record.step = process.value["step"]
            target = entry.target
            if process.value["stopped"] and (target is None or record.step < target):
                record.status = state.WAITING
                self._happen(entry, "stopped")
            elif target is not None and target < record.steps:
                record.status = state.PAUSED
                self._happen(entry, "paused")
            else:
                record.status = state.DONE
                record.steps = record.step
                self._happen(entry, "done")
        elif process.died or (stopping and isinstance(process.error, WorkerError)):
            self._retry(entry, process.error)
        else:
            self._fail(entry, process.error)

    def _retry(self, entry: Entry, error: Exception | None) -> None:
        """Let a job wait for its next lease after its process was killed, from its last checkpoint."""
        saved = entry.saved_step()
        entry.deaths = 1 if saved > entry.saved else entry.deaths + 1
        entry.saved = saved
        if entry.deaths > MOST_DEATHS:
            self._fail(entry, error)
            return
        entry.record.status, entry.record.step = state.WAITING, saved
        self._note(f"{_what(error)}; it continues from step {saved}", entry.job.name)
        self._happen(entry, "retried")

    def _fail(self, entry: Entry, error: Exception | None) -> None:
        if entry.record.status not in state.ENDED:
            entry.record.status, entry.record.error = state.FAILED, str(error)
            self._note(f"failed: {_what(error)}", entry.job.name)
            self._happen(entry, "failed")

    def _compare(self) -> None:
        """Where all jobs have reached a step of ``[stop]``, let the best go on."""
        halving = self.sweep.halving
        going = [entry for entry in self.board.entries if entry.record.status not in state.ENDED]
        if halving is None or not going or any(entry.record.status != state.PAUSED for entry in going):
            return
        rung = min(entry.record.rung for entry in going)
        there = [entry for entry in going if entry.record.rung == rung]
        kept = best({entry.job.number: entry.record.metric for entry in there}, halving.keep)
        for entry in there:
            if entry.job.number in kept:
                entry.record.status, entry.record.rung = state.WAITING, rung + 1
            else:
                entry.record.status = state.DROPPED
                self._happen(entry, "dropped")
        self._changed = True

    # -- stop, and what is shown -----------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Request every job to stop, and end what does not train yet: it has nothing to lose."""
        for preparation in self._preparations:
            preparation.process.end()
        self._preparations.clear()
        for entry in self.board.running():
            if not entry.stopping:
                self.events("stopping", {"job": entry.job.name})
                if entry.trains:
                    entry.stop()
                else:
                    assert entry.process is not None, "it runs"
                    entry.process.end()
                    entry.end(self.sweep.metric)
                    entry.record.status, entry.record.step = state.WAITING, entry.saved_step()
                    self._happen(entry, "stopped")

    def _happen(self, entry: Entry, what: str) -> None:
        event = SweepEvent(self.seconds, entry.job.name, what, entry.record.devices, entry.record.step)
        self.happened.append(event)
        fields = {name: getattr(event, name) for name in event.__slots__}
        self.events("job", {**fields, "error": entry.record.error, "metric": entry.record.metric})
        self._changed = True

    def _note(self, text: str, job: str = "") -> None:
        self.notes.append(f"{job}: {text}" if job else text)
        self.events("note", {"text": self.notes[-1]})
        if text.startswith(_WARNING):
            self._warnings.add(text)

    def _publish(self, *, now: bool = False) -> None:
        """Write the table, and show it."""
        clock = time.monotonic()
        if now or clock - self._shown > SHOW_SECONDS:
            self._shown = clock
            seconds, places = clock - self.began, self.sharing.places
            fields = {"rows": self.board.rows(), "seconds": seconds, "seconds_left": self.seconds_left()}
            self.events("table", {**fields, "jobs_per_device": places})
        if now or self._changed or clock - self._saved > SAVE_SECONDS:
            self._saved, self._changed = clock, False
            records = [entry.record for entry in self.board.entries]
            current = state.SweepState.of(self.sweep, records, self.sharing.chosen)
            state.save(self.folder, current, self.board.rows())

    def seconds_left(self) -> float | None:
        """Return the predicted seconds until all jobs are done; None if the length of one is not known."""
        lengths = [(entry.seconds_to_end(), entry) for entry in self.board.unfinished()]
        known = [(seconds, entry) for seconds, entry in lengths if seconds is not None]
        if len(known) < len(lengths):
            return None
        places = sum(seconds * entry.job.devices * self.sharing.each(entry) for seconds, entry in known)
        shared = places / (len(self.devices.indices) * self.sharing.places)
        return max([shared, *(seconds for seconds, _ in known)])


def _what(error: Exception | None) -> str:
    return error.what if isinstance(error, AutopipeError) else str(error)


def _worker(function: Function, task: Any, doing: str) -> Worker:
    """Start a process for a task, a dataclass. A sweep file names models by files and modules: no script is needed."""
    return Worker(function, artifact.encode(task), doing=doing)
