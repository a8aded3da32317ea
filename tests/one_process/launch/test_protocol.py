"""The protocol to ranks on other hosts: messages survive the encoding, and a watcher believes only valid ones."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopipe
from autopipe.errors import WorkerError
from autopipe.ir import artifact
from autopipe.ir.schedule import Instruction, Op
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.rank.worker import describe
from autopipe.launch.remote import protocol
from autopipe.launch.remote.connections import Connections, Lost
from autopipe.launch.remote.remote_ranks import FIELDS, RemoteRanks, problem
from autopipe.launch.request import WorkerSpec
from autopipe.report.results import StagePeak
from autopipe.runtime.batches.source import OTHER_DATA
from autopipe.workers.signals import StopRequest

SPEC = WorkerSpec(
    run="/run", rank=1, world_size=2, store="", heartbeats="", body="train", timeout_seconds=60.0, host="h1"
)
BEAT = protocol.RankBeat(1, 0.5, 7, True, "1RF3<0", 4, -1)
ERROR = describe(ValueError("x"), None)
MESSAGES: tuple[protocol.Message, ...] = (
    protocol.Start(2, (SPEC,), "/run/job.json", "ab"),
    protocol.Stop(7, True),
    protocol.End(),
    protocol.Event(1, {"kind": "spans", "rank": 1, "spans": [["F", 1.0, 2.0]]}),
    protocol.Beats(1, (BEAT,)),
    protocol.Stacks(1, ((1, "stopped by a signal"),)),
    protocol.Ask("prepare", {"folder": "/home/me", "environment": {"OMP_NUM_THREADS": "1"}, "devices": False}),
    protocol.Answer({"/model.py": ""}),
    protocol.Answer(4000),
    protocol.Hello("0.1", 1, 2, 0, 1, "h1"),
    protocol.Fail("boom", "rank 1", "", 3),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_back_as_it_was_written(message: protocol.Message) -> None:
    line = protocol.encode(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert protocol.decode(line) == message


def test_an_event_may_hold_a_loss_that_is_not_finite() -> None:
    event = protocol.decode(protocol.encode(protocol.Event(1, {"kind": "step", "rank": 0, "loss": math.nan})))
    assert isinstance(event, protocol.Event) and math.isnan(event.event["loss"])


def test_fields_of_another_version_are_ignored_and_missing_ones_are_refused() -> None:
    record = json.loads(protocol.encode(protocol.Stop(7, True)))
    assert protocol.decode(json.dumps({**record, "later": 1}).encode()) == protocol.Stop(7, True)
    for broken in ({"kind": "Stop"}, {**record, "before": "7"}, {**record, "kind": "Go"}, {**record, "kind": 1}, []):
        with pytest.raises(ValueError):
            protocol.decode(json.dumps(broken).encode())


@given(st.text())
def test_any_text_of_an_error_reaches_the_other_ranks(text: str) -> None:
    sent = protocol.Fail.of(ValueError(text))
    assert protocol.decode(protocol.encode(sent)) == sent


def test_an_error_is_the_same_in_every_process() -> None:
    failure = WorkerError("ValueError: boom", rank=1, stage=2, instruction="2F3@0", where="model.py:7", remedy="mend")
    error = protocol.Fail.of(failure).error()
    assert str(error) == str(failure) and getattr(error, "exit_code", 0) == 3
    assert isinstance(protocol.Fail.of(KeyboardInterrupt()).error(), KeyboardInterrupt)


def test_times_of_another_host_are_corrected_by_its_clock() -> None:
    event = {"kind": "spans", "time_ns": 5_000_000_000, "time": 5.0, "spans": [("F", 4.0, 5.0)]}
    here = protocol.corrected(event, 2_000_000_000)
    assert (here["time_ns"], here["time"], here["spans"]) == (3_000_000_000, 3.0, [("F", 2.0, 3.0)])
    assert protocol.corrected(event, 0) == event


def test_a_heartbeat_keeps_its_age_on_another_host() -> None:
    beat = Beat(7, time.monotonic() - 2.0, False, "1F3@0", 4, 9)
    arrived = protocol.RankBeat.of(1, beat).here()
    assert abs(arrived.seconds - beat.seconds) < 0.5
    assert (arrived.count, arrived.doing, arrived.bound, arrived.stop) == (7, "1F3@0", 4, 9)


class Played:
    """A connection whose messages are written down: one list a poll."""

    def __init__(self, host: str, *script: list[protocol.Message], offset_ns: int = 0) -> None:
        self.host, self.offset_ns, self.script = host, offset_ns, list(script)
        self.sent: list[protocol.Message] = []
        self.reason = ""

    def readable(self) -> Sequence[Any]:
        return []

    def send(self, message: protocol.Message) -> None:
        self.sent.append(message)

    def receive(self) -> Sequence[protocol.Message]:
        return self.script.pop(0) if self.script else []

    def lost(self) -> Lost | None:
        return Lost(self.reason, "check it") if self.reason else None

    def drop(self, reason: str) -> None:
        self.reason = reason


def watched(*connections: Played, stop: StopRequest | None = None) -> RemoteRanks:
    """Ranks 0, 1, ... of attempt 2, one behind each connection."""
    hosts = [connection.host for connection in connections]
    ranks_of = [(rank,) for rank in range(len(hosts))]
    return RemoteRanks(Connections(connections), ranks_of, hosts, patience_seconds=1.0, attempt=2, stop=stop)


def event(rank: int, attempt: int = 2) -> protocol.Event:
    return protocol.Event(attempt, {"kind": "exit", "rank": rank, "code": 0, "time_ns": 50})


def test_messages_of_an_earlier_attempt_are_ignored() -> None:
    late = protocol.Beats(1, (protocol.RankBeat(0, 0.0, 99, False, "late", 0, -1),))
    ranks = watched(Played("h0", [event(0, attempt=1), late, event(0)]))
    assert [entry["rank"] for entry in ranks.poll(0)] == [0]
    assert ranks.beats()[0].doing == "starting"


def test_a_host_reports_its_own_ranks_only() -> None:
    foreign = protocol.Beats(2, (protocol.RankBeat(0, 0.0, 99, False, "foreign", 0, -1),))
    ranks = watched(Played("h0"), Played("h1", [foreign, event(0)], offset_ns=30))
    (lost,) = ranks.poll(0)
    assert (lost["kind"], lost["host"], lost["ranks"]) == ("lost", "h1", (1,))
    assert "an event of another rank" in lost["message"]
    assert ranks.beats()[0].doing == "starting"
    assert list(ranks.poll(0)) == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"kind": "step", "step": 1, "loss": 0.5, "time": 2.0}, "step lacks 'samples'"),
        ({"kind": "step", "step": "1", "loss": 0.5, "samples": 8, "time": 2.0}, "'step' of step is '1'"),
        ({"kind": "step", "step": True, "loss": 0.5, "samples": 8, "time": 2.0}, "'step' of step is 'True'"),
        ({"kind": "step", "step": 10**30, "loss": 0.5, "samples": 8, "time": 2.0}, "'step' of step is '1000"),
        ({"kind": "note", "text": "a", "time_ns": "now"}, "note has the unknown field 'time_ns'"),
        ({"kind": "exit", "code": 1.5, "time_ns": 3}, "'code' of exit is '1.5'"),
        ({"kind": "spans", "spans": [[{"op": "F"}, 0.0, 1.0]]}, "'spans' of spans is"),
        ({"kind": "spans", "spans": [[{"op": "F", "stage": 0, "minibatch": 0}, 0.0]]}, "'spans' of spans is"),
        ({"kind": "error", "message": "x"}, "error lacks 'where'"),
        ({"kind": "error", **ERROR, "out_of_memory": {"used": 3}}, "'out_of_memory' of error is"),
        ({"kind": "lost", "host": "h0", "ranks": [0], "time_ns": 1}, "'lost' is not the kind of an event of a rank"),
        ({"kind": ["step"]}, "is not the kind of an event of a rank"),
        ({}, "'None' is not the kind of an event of a rank"),
    ],
)
def test_a_malformed_event_is_an_error_of_its_host(fields: dict[str, Any], wrong: str) -> None:
    ranks = watched(Played("h0"), Played("h1", [protocol.Event(2, {"rank": 1, **fields})], offset_ns=30))
    (lost,) = ranks.poll(0)
    assert (lost["kind"], lost["host"], lost["ranks"]) == ("lost", "h1", (1,))
    assert "it sent a malformed event" in lost["message"] and wrong in lost["message"]


def test_every_event_of_a_rank_is_in_the_table_with_its_fields() -> None:
    events = {"exit": {"code", "time_ns"}}  # these are built elsewhere
    events |= {kind: set(FIELDS[kind]) for kind in ("error", "peak", "step")}
    for path in Path(autopipe.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "event":
                (kind,) = call.args
                if all(keyword.arg for keyword in call.keywords):
                    name = kind.value if isinstance(kind, ast.Constant) else OTHER_DATA
                    fields = {str(keyword.arg) for keyword in call.keywords}
                    assert events.setdefault(str(name), fields) == fields, path
    assert {kind: set(fields) for kind, fields in FIELDS.items()} == events
    assert ERROR.keys() == FIELDS["error"].keys()
    assert FIELDS["peak"].keys() == {field.name for field in dataclasses.fields(StagePeak)} - {"rank"}


def test_a_loss_that_is_not_finite_and_any_text_are_accepted() -> None:
    oom = dict.fromkeys(("predicted", "used", "requested", "available"), 3)
    bodies: list[dict[str, Any]] = [
        {"kind": "step", "step": 1, "loss": float("nan"), "samples": 8, "time": 2},
        {"kind": "note", "text": "\0 \ud800"},
        {"kind": "exit", "code": None, "time_ns": 3},
        {"kind": "spans", "spans": [[artifact.encode(Instruction(Op.STEP, 0, 1)), 0.0, 1.0]]},
        {"kind": "error", **ERROR, "out_of_memory": oom},
    ]
    assert [problem({"rank": 0, **body}) for body in bodies] == [""] * len(bodies)


def test_an_event_arrives_in_the_time_of_this_host() -> None:
    ranks = watched(Played("h0", [event(0)], offset_ns=30))
    assert [entry["time_ns"] for entry in ranks.poll(0)] == [20]


def test_a_signal_on_any_host_requests_the_stop_once() -> None:
    stop = StopRequest()
    ranks = watched(Played("h0", [protocol.Signaled(2, "SIGTERM"), protocol.Signaled(2, "SIGHUP")]), stop=stop)
    assert list(ranks.poll(0)) == [] and stop.signal_name == "SIGTERM"


def test_stacks_are_awaited_and_events_meanwhile_are_kept() -> None:
    first = Played("h0", [event(0)], [protocol.Stacks(2, ())])
    second = Played("h1", [protocol.Stacks(2, ((1, "stopped by a signal"),))])
    ranks = watched(first, second)
    start = time.monotonic()
    assert ranks.write_stacks() == {1: "stopped by a signal"}
    assert time.monotonic() - start < protocol.STACKS_SECONDS
    assert first.sent == [protocol.WriteStacks()]
    assert [entry["rank"] for entry in ranks.poll(0)] == [0]


def test_the_end_does_not_wait_for_a_lost_host() -> None:
    gone, ended = Played("h0"), Played("h1", [], [protocol.Ended(2)])
    gone.reason = "closed"
    ranks = watched(gone, ended)
    start = time.monotonic()
    ranks.end()
    assert time.monotonic() - start < protocol.END_SECONDS / 2
    assert ended.sent == [protocol.End()]
