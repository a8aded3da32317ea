"""Teams over NCCL: exchanges, messages and sums over replicas end on the model of ``test_nccl_model``."""

from __future__ import annotations

import types
from collections.abc import Hashable

import pytest
import torch
from support.nccl.machine import COLLECTIVES, Deadlock, OrderMismatch, execute
from support.nccl.recorder import CUDA, Recorder, Run, Work, in_place, recorded
from support.nccl.team_stage import MemberRunner

from autopipe.errors import RunError
from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.runtime.transport.communicators import MOST_GROUPS, STREAMS
from autopipe.runtime.transport.nccl import NcclTransfers
from autopipe.runtime.transport.teams import TeamTransport
from autopipe.schedules import REGISTRY
from autopipe.sequence import _Gathered, _Scattered
from autopipe.team import _Entered, _Summed, add_together

# ``spilled`` has one rank, and ``custom`` the rows of another schedule
SCHEDULES = sorted(name for name, kind in REGISTRY.items() if not kind.spills and name != "custom")


def team_run(schedule: str, ranks: int, team: int, replicas: int = 1) -> Run:
    v = 2 if schedule == "interleaved" else 1
    layout = tuple(tuple(range(s % ranks * replicas, (s % ranks + 1) * replicas)) for s in range(ranks * v))
    m = {"pipedream": 1, "interleaved": ranks * replicas}.get(schedule, (ranks + 1) * replicas)
    minibatches = {"pipedream": 2 * ranks, "2bw": 2}.get(schedule, 1)
    spec = ScheduleSpec(layout, m, minibatches, options={"stages_per_rank": v} if v > 1 else {})
    return Run(schedule, spec, StageEdges.chain(ranks * v), team=team)


def execute_all(recorders: list[Recorder]) -> None:
    for queues, depth in ((8, 1024), (32, 1024), (32, 16)):
        execute([recorder.program for recorder in recorders], queues=queues, streams=STREAMS, depth=depth)


LAYOUTS = [  # members, ranks, replicas
    *((2, ranks, replicas) for ranks in (2, 3, 4) for replicas in (1, 2)),
    *((4, 2, 2), (4, 3, 1), (4, 4, 1)),
]
CASES = [
    (schedule, *layout)
    for schedule in SCHEDULES
    for layout in LAYOUTS
    if layout[2] == 1 or REGISTRY[schedule].replicas or REGISTRY[schedule].equal_replicas
]


@pytest.mark.parametrize(("schedule", "team", "ranks", "replicas"), CASES)
def test_training_in_teams_ends(schedule: str, team: int, ranks: int, replicas: int) -> None:
    run = team_run(schedule, ranks, team, replicas)
    recorders = recorded(run)
    execute_all(recorders)
    for first in range(0, run.num_processes, team):
        members = recorders[first : first + team]
        asked = [[(o.kind, o.tensor, o.label) for o in run.collectives_of(member)] for member in members]
        assert all(each == asked[0] for each in asked)
        assert {kind for kind, _, _ in asked[0]} == set(COLLECTIVES)
    for recorder in recorders:
        used = {o.stream for o in recorder.program.operations if o.kind not in ("kernel", "synchronize")} - {None}
        assert used == set(recorder.program.communicators)  # each takes memory, connections and a stream
        neighbours = min(ranks - 1, 2)
        assert len(used) <= 2 * neighbours + 1 + (replicas > 1) <= MOST_GROUPS - 2


def test_a_process_among_512_is_in_six_communicators() -> None:
    run = team_run("1f1b", 8, team=8, replicas=8)
    assert run.num_processes == 512
    assert len(run.record(200).program.communicators) == 6  # two neighbours, two directions; replicas; team


def test_every_group_is_used_in_every_way_before_training() -> None:
    """The first use connects the members."""
    run, recorder = team_run("1f1b", 2, team=2, replicas=2), Recorder(1, 8)
    with in_place(recorder):
        run.transport()
    kinds: dict[Hashable, set[str]] = {}
    for operation in recorder.program.operations:
        kinds.setdefault(operation.stream, set()).add(operation.kind)
    assert [kinds[each] for each in recorder.program.communicators[:2]] == [set(COLLECTIVES)] * 2
    assert set(recorder.program.communicators) <= kinds.keys()


def test_members_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "is_completed", lambda self: self.operation.kind not in COLLECTIVES)
    run, recorder = team_run("1f1b", 2, team=2), Recorder(3, 4)
    with in_place(recorder), pytest.raises(RunError, match=r"ranks \[2, 3\] cannot compute a sum over NCCL"):
        NcclTransfers(run.communicators, 3, CUDA, timeout_seconds=0.01)


def in_another_order(monkeypatch: pytest.MonkeyPatch, members: set[int], one: str, other: str) -> None:
    """Let each stage make two independent exchanges first, in the other order in some processes."""
    exchange = MemberRunner.exchange

    def added(self: MemberRunner, value: torch.Tensor) -> torch.Tensor:
        calls = [(one, torch.zeros(self.run.team, 5)), (other, torch.zeros(self.run.team, 7))]
        for name, tensor in reversed(calls) if self.recorder.rank in members else calls:
            getattr(self._autopipe_team, name)(tensor)
        return exchange(self, value)

    monkeypatch.setattr(MemberRunner, "exchange", added)


@pytest.mark.parametrize(
    ("one", "other"), [("add", "add"), ("add", "gather"), ("gather", "add_parts"), ("add_parts", "add_parts")]
)
@pytest.mark.parametrize("wrong", [set(), {3}])
def test_another_order_in_one_member_is_found(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, wrong: set[int]
) -> None:
    in_another_order(monkeypatch, wrong, one, other)
    recorders = recorded(team_run("1f1b", 2, team=2))
    if not wrong:
        execute_all(recorders)
        return
    with pytest.raises(
        OrderMismatch, match=r"(sum|reduce-scatter|all-gather) of .*, (sum|reduce-scatter|all-gather) of"
    ):
        execute_all(recorders)


def test_a_missing_exchange_of_one_member_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = TeamTransport.gather

    def absent(self: TeamTransport, part: torch.Tensor) -> torch.Tensor:
        is_last = self.processes.rank == 3
        return part.new_empty((self.size, *part.shape)) if is_last else gather(self, part)

    monkeypatch.setattr(TeamTransport, "gather", absent)
    with pytest.raises((Deadlock, OrderMismatch)):
        execute_all(recorded(team_run("1f1b", 2, team=2)))


@pytest.mark.parametrize("wrong", [set(), {1}, {1, 2}])
def test_sums_of_teams_and_replicas_in_opposite_orders_are_found(
    monkeypatch: pytest.MonkeyPatch, wrong: set[int]
) -> None:
    """Processes 0 and 1 are one team, 0 and 2 replicas. A cycle needs two processes with another order."""
    exchange = MemberRunner.exchange

    def added(self: MemberRunner, value: torch.Tensor) -> torch.Tensor:
        team, group = self._autopipe_team, self.run.spec.stage_ranks[self.index]
        calls = [lambda: team.add(torch.zeros(5)), lambda: team.start_all_reduce(group, torch.zeros(7)).wait()]
        for call in reversed(calls) if self.recorder.rank in wrong else calls:
            call()
        return exchange(self, value)

    monkeypatch.setattr(MemberRunner, "exchange", added)
    recorders = recorded(team_run("1f1b", 2, team=2, replicas=2))
    if len(wrong) < 2:
        execute_all(recorders)
        return
    with pytest.raises(Deadlock, match=r"rank 0: .*; rank 1: .*; rank 2: .*; rank 3: "):
        execute_all(recorders)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("function", [_Entered, _Summed, _Gathered, _Scattered])
def test_exchanges_of_tensors_on_a_gpu_are_contiguous_and_stay_there(function, transposed: bool) -> None:
    """Forward and backward, called as autograd does; ``Recorder`` checks what NCCL gets."""
    run, recorder = team_run("1f1b", 2, team=2), Recorder(1, 4)
    with in_place(recorder):
        team = run.transport()
        recorder.begin()

        def tensor() -> torch.Tensor:
            return torch.empty((6, 4), device=CUDA).t() if transposed else torch.empty((4, 6), device=CUDA)

        arguments = () if function in (_Entered, _Summed) else (0, True)
        context = types.SimpleNamespace()
        forward = function.forward(context, tensor(), team, *arguments)
        backward = function.backward(context, tensor())[0]
        add_together(team, [tensor(), tensor()])
    assert forward.is_cuda and backward.is_cuda
    expected = {_Entered: ["sum"], _Summed: ["sum"], _Gathered: ["all-gather", "reduce-scatter"]}
    expected[_Scattered] = expected[_Gathered][::-1]
    assert [operation.kind for operation in run.collectives_of(recorder)] == [*expected[function], "sum"]


def test_a_tensor_that_is_not_contiguous_is_found() -> None:
    run, recorder = team_run("1f1b", 2, team=2), Recorder(1, 4)
    with in_place(recorder):
        team = run.transport()
        for exchange in (team.add_parts, team.gather):
            with pytest.raises(AssertionError):
                exchange(torch.empty((4, 6, 2), device=CUDA).permute(2, 0, 1))
