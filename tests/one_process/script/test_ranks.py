"""Which of several ranks that end has failed first, and what SIGTERM leaves."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe.errors import WorkerError
from autopipe.script import ranks as ranks_of_a_run
from autopipe.script.rank.serve import LOSES, at_sigterm
from autopipe.script.rank_locations import Connection
from autopipe.script.rank_order import RankOrder
from autopipe.script.ranks import Ranks
from autopipe.script.wire import Wire

COUNT = 4


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ranks, list[Wire]]]:
    """Return the ranks as the controller sees them, all in processes of a cluster, and their own ends."""
    monkeypatch.setattr(ranks_of_a_run, "_CAUSE_SECONDS", 0.3)
    sockets = [socket.socketpair() for _ in range(COUNT)]
    ranks = Ranks.__new__(Ranks)
    ranks.order = RankOrder(COUNT, COUNT)
    ranks.count, ranks.owner, ranks.timeout = COUNT, os.getpid(), 60.0
    ranks._waiting_since, ranks._waited, ranks._losing = 0.0, 0, {}
    ranks.connections = [Connection(here, None, f"host{rank}") for rank, (here, _) in enumerate(sockets)]
    ranks.wires = [Wire(here) for here, _ in sockets]
    ends = [Wire(there) for _, there in sockets]
    yield ranks, ends
    for wire in (*ranks.wires, *ends):
        wire.close(0.1)


def failed(ranks: Ranks, waiting_for: int) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        ranks.receive(waiting_for)
    return caught.value


@pytest.mark.parametrize("waiting_for", [0, 1, 2])
def test_a_rank_that_ends_because_of_another_one_is_not_named(
    pairs: tuple[Ranks, list[Wire]], waiting_for: int
) -> None:
    ranks, ends = pairs
    for rank in (0, 1):
        ends[rank].send([LOSES, rank == 1])
        ends[rank].close()
    ends[2].close()
    error = failed(ranks, waiting_for)
    assert error.rank == 2
    assert "host2" in str(error)


def test_a_rank_that_does_not_answer_is_named_if_all_others_end_because_of_it(
    pairs: tuple[Ranks, list[Wire]],
) -> None:
    ranks, ends = pairs
    for rank in (0, 1, 2):
        ends[rank].send([LOSES, False])
        ends[rank].close()
    assert failed(ranks, 0).rank == 3


def test_a_rank_that_was_terminated_is_named_if_no_other_failed_first(pairs: tuple[Ranks, list[Wire]]) -> None:
    ranks, ends = pairs
    for rank in range(COUNT):
        ends[rank].send([LOSES, rank == 1])
        ends[rank].close()
    assert failed(ranks, 3).rank == 1


def test_the_report_of_an_error_is_shown_before_any_other_end(pairs: tuple[Ranks, list[Wire]]) -> None:
    ranks, ends = pairs
    ends[3].send(["error", "ValueError: three", "Traceback"])
    for rank in (3, 0):
        ends[rank].close()
    error = failed(ranks, 0)
    assert error.rank == 3
    assert "ValueError: three" in str(error)


def test_sigterm_acts_before_it_ends_a_process_that_waits(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            at_sigterm((tmp_path / "acted").touch)
            os.write(writer, b"x")
            threading.Event().wait(60)
        finally:
            os._exit(1)
    assert os.read(reader, 1) == b"x"
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert (tmp_path / "acted").exists()
    os.close(reader)
    os.close(writer)
