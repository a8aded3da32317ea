"""A request to stop: all ranks stop before the same minibatch, at any time and at any speed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe.launch.rank.graceful_stop import Agreement, may_begin
from autopipe.launch.rank.heartbeat import Beat, Heartbeats
from autopipe.workers.signals import StopRequest


@pytest.fixture
def switching() -> Iterator[None]:
    """Switch threads after every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(12))
def test_every_rank_stops_before_the_same_minibatch(seed: int, tmp_path: Path, switching: None) -> None:
    chance = random.Random(seed)
    ranks, window, limit = chance.choice([1, 2, 5]), chance.choice([1, 1, 3]), 100_000
    path = tmp_path / "beats"
    supervisor = Heartbeats(path, ranks, create=True)
    ended: dict[int, int] = {}
    wake = threading.Event()

    def train(rank: int, idle: int) -> None:
        beats = Heartbeats(path, ranks)
        step = 0
        while step < limit and may_begin(beats, rank, step, step + window, pause=lambda seconds: wake.wait(1e-4)):
            for _ in range(idle):  # ranks of different speeds drift apart
                pass
            step += window
        ended[rank] = step

    threads = [threading.Thread(target=train, args=(rank, chance.choice([0, 10, 200]))) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    while min(supervisor.read(rank).bound for rank in range(ranks)) < chance.randrange(50):
        wake.wait(1e-4)
    agreement = Agreement(supervisor.set_stop)
    while not agreement.agreed:
        agreement.move([supervisor.read(rank) for rank in range(ranks)])
    for thread in threads:
        thread.join(30)
    assert set(ended) == set(range(ranks))
    assert len(set(ended.values())) == 1
    assert ended[0] < limit
    assert ended[0] == agreement.proposed


def test_a_run_that_has_not_started_stops_before_its_first_minibatch(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path / "beats", 2, create=True)
    agreement = Agreement(beats.set_stop)
    for _ in range(2):
        agreement.move([beats.read(rank) for rank in range(2)])
    assert agreement.agreed
    assert not may_begin(beats, 0, 7, 8)


def test_no_agreement_uses_positions_older_than_the_proposal() -> None:
    proposals = []
    agreement = Agreement(lambda before, agreed: proposals.append((before, agreed)))
    old = [Beat(1, 0.0, False, "", bound=5), Beat(1, 0.0, False, "", bound=4)]
    agreement.move(old)
    agreement.move(old)
    assert proposals == [(5, False)]
    agreement.move([Beat(1, 0.0, False, "", bound=5, stop=5), Beat(1, 0.0, False, "", bound=6, stop=-1)])
    assert proposals[1:] == [(6, False)]
    agreement.move([Beat(1, 0.0, False, "", bound=5, stop=6), Beat(1, 0.0, False, "", bound=6, stop=6)])
    assert proposals[2:] == [(6, True)]
    agreement.move(old)
    assert len(proposals) == 3


def test_without_a_request_no_rank_stops(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path / "beats", 1, create=True)
    assert all(may_begin(beats, 0, step, step + 1) for step in range(5))
    assert beats.read(0).bound == 5
    assert beats.stop() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_requests_a_stop_and_a_second_ctrl_c_ends_the_run(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stop.on_signals():
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler sends the signal more than once
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before


def test_signals_that_nohup_ignores_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal_name == ""
    finally:
        signal.signal(signal.SIGHUP, before)
