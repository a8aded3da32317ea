"""The process of a rank, from start to end.

The fork server imports this module once, with torch, so that a rank starts in a few hundredths of a second. The rank
itself imports the user's model file, so that an edit always takes effect.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import AutopipeError
from autopipe.ir import decoding
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction
from autopipe.launch.rank.cpu_tuning import keep_freed_memory, use_batch_scheduler
from autopipe.launch.rank.devices import apply_settings, choose_gpu
from autopipe.launch.rank.graceful_stop import may_begin
from autopipe.launch.rank.heartbeat import Heartbeats
from autopipe.launch.rank.out_of_memory import describe_oom, resident_bytes
from autopipe.launch.rank.store import choose_interface, open_store
from autopipe.launch.request import WorkerSpec
from autopipe.runtime.batches.beside import DOING, INSTEAD
from autopipe.runtime.batches.reading_process import read_beside
from autopipe.runtime.context import RunContext
from autopipe.runtime.error_location import error_location
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.transport.base import Transport, TransportClosed, translate, with_index
from autopipe.runtime.transport.communicators import Communicators
from autopipe.runtime.transport.distributed import ProcessTransport, start_process_group
from autopipe.runtime.transport.teams import TeamTransport, agreeing_groups, channels_of, groups_of
from autopipe.workers.parent_death import allow_children, die_with_parent
from autopipe.workers.signals import leave_signals_to_supervisor
from autopipe.workers.worker import Worker

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(slots=True)
class Spent:
    """Seconds of a rank while it trains. The first five add up to the whole."""

    computing: float = 0.0
    waiting: float = 0.0  # for other ranks and their messages
    data: float = 0.0  # reading it
    saving: float = 0.0  # checkpoints and audits
    recording: float = 0.0  # batches of other shapes
    ready: float = 0.0  # of these, ready to run and without a core
    cpu: float = 0.0  # processor time of all threads
    _kind: str = ""
    _since: float = 0.0

    def begin(self) -> None:
        """Begin to count."""
        self.ready, self.cpu = -_without_core(), -time.process_time()
        self._since, self._kind = time.perf_counter(), "data"

    def at(self, activity: str, waiting: bool) -> None:
        """Note that an activity begins. Cheap: called for every instruction."""
        if self._kind:
            now = time.perf_counter()
            setattr(self, self._kind, getattr(self, self._kind) + now - self._since)
            self._since = now
            kind = "recording" if activity.startswith("capturing ") else _KINDS.get(activity, "computing")
            self._kind = "waiting" if waiting else kind

    def end(self) -> dict[str, float]:
        """Stop to count, and return the seconds by name."""
        self.at("", waiting=False)
        self._kind = ""
        self.ready, self.cpu = self.ready + _without_core(), self.cpu + time.process_time()
        return {name: seconds for name, seconds in asdict(self).items() if not name.startswith("_")}


_KINDS = {"reading data": "data", "saving": "saving", "waiting for an audit": "saving"}


def _without_core() -> float:
    """Return for how many seconds this thread was ready to run and had no core; 0.0 if the kernel does not say."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


FAILED = 3
_STOP_SECONDS = 1.0


class _Pipe:
    """The reporter of a rank's process: sends events to the supervisor and records instructions in the heartbeats."""

    def __init__(self, connection: Connection, heartbeats: Heartbeats, rank: int) -> None:
        self._connection, self._heartbeats, self._rank = connection, heartbeats, rank
        self._spent = Spent()

    def at(self, instruction: str, *, waiting: bool) -> None:
        self._heartbeats.note(self._rank, instruction, waiting)
        self._spent.at(instruction, waiting)

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "ready":
            self._spent.begin()
        elif kind == "done":
            self.event("spent", seconds=self._spent.end())
        self._connection.send_bytes(json.dumps({"kind": kind, "rank": self._rank, **fields}).encode())

    def may_begin(self, step: int, end: int) -> bool:
        return may_begin(self._heartbeats, self._rank, step, end)


def rank_main(text: str, connection: Connection, listener: socket.socket | None = None) -> None:
    """Run one rank in this process. ``text``: a ``WorkerSpec`` as JSON; ``listener``: as in ``rank_body``."""
    die_with_parent()
    allow_children()
    leave_signals_to_supervisor()
    spec: WorkerSpec = decoding.decode(WorkerSpec, json.loads(text), "worker")
    redirect_output(RunDirectory(Path(spec.run)).log(spec.rank))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    reporter = _Pipe(connection, Heartbeats(Path(spec.heartbeats), spec.world_size), spec.rank)
    if not rank_body(spec, reporter, listener):
        os._exit(FAILED)  # a destructor could wait for a peer that waits for this rank
    connection.close()


@dataclass(slots=True)
class _State:
    """The state of a rank, for its report of an error."""

    resident: int  # bytes of the process before training
    plan: Plan | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    session: RankSession | None = None

    def out_of_memory(self, error: BaseException, rank: int) -> dict[str, Any]:
        """Return the fields that an out-of-memory error adds to the report."""
        return {} if self.plan is None else describe_oom(error, self.plan, rank, self.device, self.resident)


def rank_body(spec: WorkerSpec, reporter: Reporter, listener: socket.socket | None = None) -> bool:
    """Run the rank to completion and report ``done``, or ``error`` with the fields of ``describe``.

    ``listener``: the listening socket of rank 0, if the store is reached over the network; None: rank 0 binds the
    address itself. Returns: whether the rank completed.
    """
    state = _State(resident_bytes())
    try:
        _run(spec, reporter, listener, state)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            traceback.print_exc()
            sys.stderr.flush()
        reporter.event("error", **(describe(error, state.session) | state.out_of_memory(error, spec.rank)))
        return False
    reporter.event("done")
    return True


def _run(spec: WorkerSpec, reporter: Reporter, listener: socket.socket | None, state: _State) -> None:
    reporter.at("starting", waiting=False)
    run = RunDirectory(Path(spec.run))
    job, plan, graph = run.job(), run.plan(), run.graph()
    torch.set_num_threads(job.threads)
    if job.device == "cpu":
        keep_freed_memory()
        if spec.local_world_size * job.threads > len(os.sched_getaffinity(0)):
            use_batch_scheduler()  # before the transport starts threads, which inherit it
    if spec.body == "evaluate":  # all weights come from the checkpoint
        job = replace(job, init_from="", trust=False, initial=replace(job.initial, built_on=""))
    if spec.evaluation_data:
        plan = replace(plan, workload=plan.workload.with_hook("evaluate_data", spec.evaluation_data))
    state.plan, state.device = plan, torch.device(job.device)
    context = RunContext.of(plan, graph)
    with _reading(spec, job, reporter) as reads:
        _train_or_evaluate(spec, job, run, context, reads, reporter, listener, state)


@contextlib.contextmanager
def _reading(spec: WorkerSpec, job: Job, reporter: Reporter) -> Iterator[Worker | None]:
    """Yield the process that reads the data for rank 0, if one does. It is forked before this one has a thread."""
    if spec.rank != 0 or spec.body == "evaluate" or job.data_reader != "beside" or job.loop:
        yield None
        return
    reader = Worker(read_beside, {"run": spec.run}, doing=DOING, threads=job.threads, instead=INSTEAD, here=True)

    def write_its_stacks(number: int, frame: object) -> None:
        if reader.awaited and not reader.ended:
            os.kill(reader.pid, signal.SIGUSR2)

    faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, write_its_stacks)
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)
    try:
        yield reader
    finally:
        if not reader.ended:
            reader.tell(do="stop")
            reader.process.join(_STOP_SECONDS)  # it writes what it has printed
            reader.end()


def _train_or_evaluate(
    spec: WorkerSpec,
    job: Job,
    run: RunDirectory,
    context: RunContext,
    reads: Worker | None,
    reporter: Reporter,
    listener: socket.socket | None,
    state: _State,
) -> None:
    reporter.at("connecting", waiting=True)
    transport = _connect(spec, context, state.device, job.excluded_devices, reporter, listener)
    state.device = with_index(state.device)
    job = replace(job, device=str(state.device))
    session = state.session = RankSession.start(run, job, context, transport, reporter, reads=reads)
    if spec.body == "evaluate":
        step = session.restore_latest(averaged=spec.averaged)
        session.evaluate(spec.batch_size or None, step, reader="one")  # no other process reads the data
    else:
        reporter.event("ready", pid=os.getpid())
        session.train()
        session.report_timeline()
    transport.close()


def _connect(
    spec: WorkerSpec,
    context: RunContext,
    device: torch.device,
    excluded_devices: Sequence[int],
    reporter: Reporter,
    listener: socket.socket | None,
) -> Transport:
    """Connect to the other ranks. Raises: TransportClosed if another rank has ended meanwhile."""
    rank, world_size, seconds = spec.rank, spec.world_size, spec.timeout_seconds
    use_nccl, size = False, context.plan.team
    channels, groups = context.channels, context.groups
    on_host = groups  # those that sum CPU tensors
    if size > 1:
        channels = tuple(channels_of(channels, context.plan.num_ranks, size))
        groups = tuple(groups_of(groups, context.plan.num_ranks, size))
        on_host = tuple({*groups, *agreeing_groups(context.plan.num_ranks, size)})
    choose_interface(spec.store, spec.interface)
    if device.type == "cuda":
        apply_settings(RunDirectory(Path(spec.run)).log(rank).parent)
    try:
        store = open_store(spec.store, rank, world_size, timeout_seconds=seconds, listener=listener)
        if device.type == "cuda":
            use_nccl = choose_gpu(spec, excluded_devices, store, reporter)
        start_process_group(store, rank, world_size, timeout_seconds=seconds)
        communicators = Communicators.of(channels, groups) if use_nccl else None
        if communicators is not None and communicators.on_host and rank == 0:
            reporter.event("note", text=communicators.note)
        processes = ProcessTransport(
            channels, on_host, device=device, communicators=communicators, timeout_seconds=seconds, store=store
        )
        return processes if size == 1 else TeamTransport(processes, size)
    except RuntimeError as error:
        raise translate(error) from error


def redirect_output(path: Path) -> None:
    """Redirect the output of this process to a log file, including that of native code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def describe(error: BaseException, session: RankSession | None) -> dict[str, Any]:
    """Return the fields of the event for an error. ``secondary``: it only shows that another rank is gone."""
    current: Instruction | None = session.executor.current if session is not None else None
    text = f"{type(error).__name__}: {error}"
    where = remedy = ""
    if isinstance(error, AutopipeError):
        text, where, remedy = error.what, error.where, error.remedy
    else:
        where = error_location(error, session.context.graph if session is not None else None)
    return {
        "message": text,
        "where": where,
        "remedy": remedy,
        "stage": current.stage if current is not None else None,
        "instruction": str(current) if current is not None else "",
        "microbatch": current.microbatch if current is not None else -1,
        "traceback": "".join(traceback.format_exception(error)),
        "secondary": isinstance(error, TransportClosed),
        "time_ns": time.time_ns(),
    }
