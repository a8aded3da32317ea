"""Runs ranks as threads of one process: the same sessions and instructions, without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopipe.errors import AutopipeError, WorkerError
from autopipe.runtime.batches.beside import Telling
from autopipe.runtime.context import RunContext
from autopipe.runtime.error_location import error_location
from autopipe.runtime.events import Reporter, Silent
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.step.gradients import GradientHook
from autopipe.runtime.transport.base import ThreadHub, Transport, TransportClosed
from autopipe.runtime.transport.teams import TeamTransport

ItemSource = Callable[[int], Iterator[Any]]


def run_in_threads(
    run: RunDirectory,
    job: Job,
    context: RunContext,
    body: Callable[[RankSession], None],
    *,
    items: ItemSource | None = None,
    on_gradients: Callable[[int], GradientHook] | None = None,
    reporters: Sequence[Reporter] = (),
    reads: Telling | None = None,
    timeout_seconds: float = 300.0,
) -> list[RankSession]:
    """Run ``body`` on every rank and return the sessions, by rank.

    ``items``: epoch -> minibatches, in place of the data of the workload. ``on_gradients``: process -> its hook.
    ``reads``: the process that reads the data for rank 0.

    Raises: WorkerError for the rank that failed first, its own error as the cause.
    """
    world = context.plan.num_processes
    hub = ThreadHub(world, timeout_seconds)
    sessions: list[RankSession | None] = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def run_rank(rank: int) -> None:
        torch.set_num_threads(job.threads)
        transport: Transport = hub.transport(rank)
        if context.plan.team > 1:
            transport = TeamTransport(transport, context.plan.team)
        try:
            reporter = reporters[rank] if reporters else Silent()
            hook = None if on_gradients is None else on_gradients(rank)
            process = None if rank else reads
            session = RankSession.start(run, job, context, transport, reporter, on_gradients=hook, reads=process)
            session.items = items
            sessions[rank] = session
            body(session)
        except BaseException as error:
            failures.append((rank, error))
            hub.abort()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise _first(failures, sessions)
    return [session for session in sessions if session is not None]


def _first(failures: list[tuple[int, BaseException]], sessions: Sequence[RankSession | None]) -> BaseException:
    own = [failure for failure in failures if not isinstance(failure[1], TransportClosed)]
    rank, error = (own or failures)[0]
    session = sessions[rank]
    current = session.executor.current if session is not None else None
    stage = session.context.plan.stages[current.stage] if session is not None and current is not None else None
    if isinstance(error, AutopipeError) and current is None:
        return error
    what = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
    failure = WorkerError(
        what,
        rank=rank,
        stage=None if stage is None else stage.index,
        modules="" if stage is None else stage.modules,
        instruction=str(current) if current is not None else "",
        where=error.where
        if isinstance(error, AutopipeError)
        else error_location(error, None if session is None else session.context.graph),
        remedy=error.remedy if isinstance(error, AutopipeError) else "",
    )
    failure.__cause__ = error
    return failure
