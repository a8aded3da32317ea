"""The supervisor with simulated ranks: which rank is blamed, and the message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autopipe.errors import WorkerError
from autopipe.launch import supervisor
from autopipe.launch.rank import stacks
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.request import LaunchRequest, LaunchSettings, watchdog_of
from autopipe.launch.supervisor import Supervisor
from autopipe.runtime.job import RunDirectory
from autopipe.workers.fork_server import death


@dataclass
class Played:
    """Ranks with scripted events: one list per poll."""

    script: list[list[dict[str, Any]]]
    hosts: Sequence[str] = ("", "")
    notes: Sequence[Beat] = ()
    patience_seconds: float = 0.0
    odd: Mapping[int, str] = field(default_factory=dict)
    on_stacks: Any = None

    def poll(self, timeout: float) -> Iterable[Mapping[str, Any]]:
        return self.script.pop(0) if self.script else []

    def beats(self) -> Sequence[Beat]:
        return self.notes or [Beat(1, time.monotonic(), False, f"{rank}F0@0") for rank in range(len(self.hosts))]

    def set_stop(self, before: int, agreed: bool) -> None:
        pass

    def write_stacks(self) -> Mapping[int, str]:
        if self.on_stacks is not None:
            self.on_stacks()
        return self.odd

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class NoPlan(RunDirectory):
    """A run directory that has only logs."""

    def plan(self) -> Any:
        class Empty:
            stages = ()

        return Empty()


def request(path: Path, ranks: int = 2, *, watchdog: float = 60.0, on_event: Any = lambda event: None) -> LaunchRequest:
    settings = LaunchSettings(watchdog_seconds=watchdog)
    return LaunchRequest(
        run=NoPlan(path), world_size=ranks, on_event=on_event, settings=settings, watchdog_seconds=watchdog
    )


def error(rank: int, at: int, message: str = "boom", *, secondary: bool = False) -> dict[str, Any]:
    texts = {"message": message, "where": "model.py:3", "remedy": "", "instruction": f"{rank}F1@0", "traceback": "..."}
    return {"kind": "error", "rank": rank, "time_ns": at, "secondary": secondary, "stage": rank, **texts}


def exited(rank: int, at: int, code: int) -> dict[str, Any]:
    return {"kind": "exit", "rank": rank, "time_ns": at, "code": code}


def lost(host: str, ranks: Sequence[int], at: int) -> dict[str, Any]:
    fields = {"message": f"host {host} does not answer", "remedy": "check it"}
    return {"kind": "lost", "host": host, "ranks": ranks, "time_ns": at, **fields}


def failure(ranks: Played, path: Path, watchdog: float = 60.0) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        Supervisor(request(path, len(ranks.hosts), watchdog=watchdog), ranks).watch()
    return caught.value


def test_a_run_is_complete_once_all_ranks_have_finished_and_ended(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    script = [
        [{"kind": "step", "rank": 0}, {"kind": "done", "rank": 0}, exited(0, 1, 0)],
        [{"kind": "done", "rank": 1}],
        [exited(1, 2, 0)],
    ]
    Supervisor(request(tmp_path, on_event=seen.append), Played(script)).watch()
    assert [event["kind"] for event in seen if event["kind"] != "tick"] == ["step"]


def test_the_earliest_failure_is_the_cause_even_if_another_arrives_first(tmp_path: Path) -> None:
    cause = failure(Played([[error(1, 20, "late")], [error(0, 10, "early")]]), tmp_path)
    assert cause.what == "early" and cause.rank == 0


def test_a_lost_connection_is_the_cause_only_without_another_failure(tmp_path: Path) -> None:
    cause = failure(Played([[error(0, 10, "connection closed", secondary=True), exited(1, 20, -9)]]), tmp_path)
    assert cause.rank == 1 and "SIGKILL" in cause.what


def test_after_a_lost_connection_the_supervisor_waits_for_the_cause(tmp_path: Path) -> None:
    script = [[error(0, 10, "closed", secondary=True)], *[[]] * 50, [lost("h1", [1], 99)]]
    cause = failure(Played(script, ("h0", "h1"), patience_seconds=30.0), tmp_path)
    assert (cause.what, cause.rank, cause.host) == ("host h1 does not answer", 1, "h1")
    assert "rank 1 on h1" in cause.where and cause.remedy == "check it"


def test_a_killed_process_on_a_gpu_may_end_late(tmp_path: Path) -> None:
    """The driver releases the memory of the GPU first."""
    device = {"kind": "device", "rank": 0, "index": 0, "others": 0}
    script = [[device], [error(0, 10, "closed", secondary=True)], *[[]] * 50, [exited(1, 20, -9)]]
    cause = failure(Played(script), tmp_path)
    assert cause.rank == 1 and "SIGKILL" in cause.what


def test_lost_connections_alone_are_reported_as_such(tmp_path: Path) -> None:
    script = [[error(0, 10, "closed", secondary=True), error(1, 9, "reset", secondary=True)]]
    assert failure(Played(script), tmp_path).what == "reset"


def test_a_host_lost_after_its_ranks_have_finished_is_not_a_failure(tmp_path: Path) -> None:
    script = [
        [{"kind": "done", "rank": 1}, {"kind": "done", "rank": 0}, exited(0, 1, 0)],
        [lost("h1", [1], 5)],
    ]
    Supervisor(request(tmp_path), Played(script, ("h0", "h1"))).watch()


@pytest.mark.parametrize(
    ("notes", "odd", "blamed"),
    [
        ([Beat(3, 5.0, True, "0RB1<1"), Beat(3, 9.0, False, "1F1@0")], {}, 1),
        ([Beat(3, 5.0, False, "0F1@0"), Beat(3, 9.0, False, "1F1@0")], {}, 0),
        ([Beat(3, 5.0, False, "0F1@0"), Beat(3, 9.0, True, "1RF1<0")], {1: "stopped by a signal"}, 1),
    ],
    ids=["not the one that waits", "the one that moved longest ago", "the one that was stopped"],
)
def test_a_hang_is_blamed_on_one_rank(
    notes: list[Beat], odd: dict[int, str], blamed: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)
    cause = failure(Played([], notes=notes, odd=odd), tmp_path, watchdog=0.0)
    assert cause.rank == blamed
    assert "no rank has moved" in cause.what and "--watchdog" in cause.remedy


def test_a_host_that_is_lost_while_stacks_are_written_is_the_cause_of_a_hang(tmp_path: Path) -> None:
    ranks = Played([], hosts=("", "there"), notes=[Beat(1, 0.0, True, "0RB0@0"), Beat(1, 0.0, False, "1F0@0")])
    ranks.on_stacks = lambda: ranks.script.append([lost("there", [1], 5)])
    caught = failure(ranks, tmp_path, watchdog=0.0)
    assert (caught.rank, caught.host) == (1, "there")
    assert "host there does not answer" in caught.what


def test_a_hang_shows_the_stack_of_each_rank(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)
    run = NoPlan(tmp_path)
    run.log(0).parent.mkdir()
    run.log(0).write_text("an old line\n")

    def write() -> None:
        with run.log(0).open("a") as log:
            log.write('Thread 0x00007f1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n')
            log.write(
                'Current thread 0x00007f2 (most recent call first):\n  File "/home/me/model.py", line 12 in forward\n'
            )

    cause = failure(Played([], on_stacks=write), tmp_path, watchdog=0.0)
    assert "rank 0:\n    /home/me/model.py:12 in forward" in cause.what
    assert "old line" not in cause.what
    assert "/home/me/model.py:12 in forward" in cause.where


def test_the_stack_of_the_main_thread_names_the_users_line() -> None:
    text = (
        "Thread 0x00007f1 (most recent call first):\n"
        '  File "/x/other.py", line 1 in wait\n'
        "\n"
        "Thread 0x00007f2 (most recent call first):\n"
        f'  File "{torch_file()}", line 9 in linear\n'
        '  File "/home/me/model.py", line 12 in forward\n'
    )
    assert stacks.main_thread(text)[1] == ("/home/me/model.py", 12, "forward")
    assert stacks.innermost(text) == "/home/me/model.py:12 in forward"
    assert stacks.innermost("nothing of the kind") == ""


def torch_file() -> str:
    import torch

    return str(Path(torch.__file__).parent / "nn" / "functional.py")


def test_the_end_of_a_process_is_described() -> None:
    assert "SIGSEGV" in death(-11)
    assert "signal 40" in death(-40)  # a real-time signal has no name
    assert "kernel ran out of memory" in death(-9)
    assert "code 4" in death(4)


def test_the_watchdog_timeout_follows_the_plan() -> None:
    assert watchdog_of(0.01, None) == 60.0
    assert watchdog_of(10.0, None) == 200.0
    assert watchdog_of(10.0, 5.0) == 5.0


def test_steps_without_a_prediction_may_take_longer(tmp_path: Path) -> None:
    default = LaunchRequest(run=NoPlan(tmp_path), world_size=2, on_event=lambda event: None, watchdog_seconds=60.0)
    assert default.slow_seconds == 300.0 and request(tmp_path, watchdog=5.0).slow_seconds == 5.0
    assert default.timeout_seconds > default.slow_seconds
    building = [Beat(3, 5.0, True, "0RF1<0"), Beat(3, 9.0, False, "building stage 1")]
    computing = [Beat(3, 5.0, True, "0RF1<0"), Beat(3, 9.0, False, "1F2@7")]
    observer = Supervisor(default, Played([]))
    assert observer._limit(building) == 300.0
    assert observer._limit(computing) == 60.0


@pytest.mark.parametrize(("log", "blamed"), [("[rank1]: ProcessGroupNCCL's watchdog got stuck", 0), ("abort()", 1)])
def test_a_rank_that_nccl_aborted_only_lost_its_connection(log: str, blamed: int, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text(log)
    ranks = Played([[exited(1, 1, -6)], [error(0, 2)]], patience_seconds=0.2)
    with pytest.raises(WorkerError) as failed:
        Supervisor(request(tmp_path), ranks).watch()
    assert failed.value.rank == blamed


@pytest.mark.parametrize(("pause", "hangs"), [(300.0, False), (4.0, True)])
def test_the_time_in_which_the_run_was_suspended_is_no_hang(
    pause: float, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Suspended(Played):
        """The first wait lasts as long as the process was suspended, and ranks end at the hundredth."""

        polls = 0

        def poll(self, timeout: float) -> Iterable[Mapping[str, Any]]:
            self.polls += 1
            clock[0] += pause if self.polls in (2, 3) else timeout
            if self.polls < 50:
                return []
            return [{"kind": "done", "rank": 0}, {"kind": "done", "rank": 1}, exited(0, 1, 0), exited(1, 1, 0)]

    clock = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    ranks = Suspended([], notes=[Beat(1, 1000.0, False, f"{rank}F0@0") for rank in range(2)])
    watched = Supervisor(request(tmp_path, watchdog=6.0), ranks)
    if hangs:
        with pytest.raises(WorkerError, match="no rank has moved for"):
            watched.watch()
    else:
        watched.watch()
