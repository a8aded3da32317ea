"""Training over NCCL, executed on a model of its streams, queues and communicators, ends without a deadlock."""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from support.layouts import cases
from support.nccl.machine import Deadlock, OrderMismatch, execute
from support.nccl.recorder import CUDA, Recorder, Run, in_place, recorded

from autopipe.ir import messages
from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.runtime.first_kernels import FirstKernels
from autopipe.runtime.transport import communicators
from autopipe.runtime.transport.communicators import MOST_GROUPS, STREAMS, Pair
from autopipe.runtime.transport.distributed import ProcessTransport
from autopipe.strides import Layout, memory_order


def layout(ranks: int, stages_per_rank: int = 1, replicas: int = 1) -> tuple[tuple[int, ...], ...]:
    stages = ranks * stages_per_rank
    return tuple(tuple(range(s % ranks * replicas, (s % ranks + 1) * replicas)) for s in range(stages))


def edges(stages: int, skips: str = "") -> StageEdges:
    forward = {(s, s + 1) for s in range(stages - 1)}
    if skips == "unet":
        forward |= {(s, stages - 1 - s) for s in range(stages // 2 - 1)}
    if skips == "fan-out":
        forward |= {(0, s) for s in range(2, stages)}
    return StageEdges(tuple(sorted(forward)), tuple(sorted((b, a) for a, b in forward)))


def case(
    schedule: str, ranks: int, m: int, *, v: int = 1, replicas: int = 1, skips: str = "", minibatches: int = 1
) -> Run:
    options = {"stages_per_rank": v} if v > 1 else {}
    spec = ScheduleSpec(layout(ranks, v, replicas), m, minibatches, options=options)
    return Run(schedule, spec, edges(ranks * v, skips))


CASES = {
    "1f1b": ("1f1b", 8, 16, {}),
    "gpipe": ("gpipe", 8, 16, {}),
    "eager-1f1b": ("eager-1f1b", 8, 16, {}),
    "zero-bubble": ("zero-bubble", 8, 16, {}),
    "2bw": ("2bw", 4, 8, {"minibatches": 4}),
    "pipedream": ("pipedream", 8, 1, {"minibatches": 16}),
    "interleaved, 2 stages a rank": ("interleaved", 4, 8, {"v": 2}),
    "interleaved, 2 ranks": ("interleaved", 2, 8, {"v": 4}),
    "interleaved, 16 stages a rank": ("interleaved", 8, 16, {"v": 16}),
    "1f1b, skips": ("1f1b", 8, 16, {"skips": "unet"}),
    "gpipe, skips": ("gpipe", 8, 16, {"skips": "unet"}),
    "gpipe, fan-out": ("gpipe", 8, 16, {"skips": "fan-out"}),
    "1f1b, fan-out": ("1f1b", 16, 32, {"skips": "fan-out"}),
    "interleaved, skips": ("interleaved", 4, 8, {"v": 2, "skips": "unet"}),
    "2bw, skips": ("2bw", 4, 8, {"minibatches": 4, "skips": "unet"}),
    "interleaved, 2 replicas": ("interleaved", 4, 16, {"v": 2, "replicas": 2}),
    "interleaved, 16 replicas": ("interleaved", 4, 64, {"v": 2, "replicas": 16}),
    "2 replicas": ("1f1b", 4, 16, {"replicas": 2}),
    "16 replicas": ("1f1b", 4, 64, {"replicas": 16}),
    "8 stages of 64 replicas": ("1f1b", 8, 128, {"replicas": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_over_nccl_ends(name):
    schedule, ranks, m, more = CASES[name]
    recorders = recorded(case(schedule, ranks, m, **more))
    assert max(len(recorder.program.communicators) for recorder in recorders) <= MOST_GROUPS
    for queues, depth in ((8, 1024), (32, 1024), (32, 16)):
        execute([r.program for r in recorders], queues=queues, streams=STREAMS, depth=depth)


def loading(
    schedule: str, replicas: int, m: int, size: Callable[[int, int], int], *, ranks: int = 2, minibatches: int = 1
) -> Run:
    """Return a run whose replicas take turns."""
    spec = ScheduleSpec(layout(ranks, 1, replicas), m, minibatches)
    return Run(schedule, spec, edges(ranks), size=size)


def one_size(t: int, j: int) -> int:
    return 1


LOADING = {  # runs, each with a number of windows after which all kernels are loaded
    **{
        name: (Run(k, r.spec, r.edges, size=one_size), 3)
        for name, (k, ranks, m, more) in CASES.items()
        if ranks * m <= 128 and more.get("v", 1) <= 4
        for r in [case(k, ranks, m, **more)]
    },
    "one shape, 8 replicas for 2 microbatches": (loading("1f1b", 8, 2, one_size), 9),
    "9 samples in 4 microbatches, 3 replicas": (loading("1f1b", 3, 4, lambda t, j: 3 if j == 0 else 2), 7),
    "lengths that change places": (loading("1f1b", 2, 4, lambda t, j: 1 + (t * t + j) % 4), 6),
    "windows of one minibatch": (loading("pipedream", 3, 1, one_size), 7),
    "every fourth batch is short": (loading("pipedream", 3, 1, lambda t, j: 2 if t % 4 else 1), 26),
    "windows of two minibatches": (loading("2bw", 3, 4, one_size, minibatches=2), 4),
}


@pytest.mark.parametrize("name", LOADING)
def test_training_ends_although_kernels_are_loaded_at_their_first_launch(name):
    run, windows = LOADING[name]
    recorders = recorded(run, windows=windows)
    execute([recorder.program for recorder in recorders], queues=32, streams=STREAMS)
    kinds = []
    for recorder in recorders:
        last = recorder.program.operations[recorder.last :]
        assert not any(operation.loads for operation in last)
        kinds += [operation.kind for operation in last]
    without = [o.kind for recorder in recorded(run) for o in recorder.program.operations]
    for kind in ("send", "gloo-send"):  # the last window goes over NCCL as if all kernels had been loaded before
        assert kinds.count(kind) == without.count(kind)


def windows_without_the_host(monkeypatch: pytest.MonkeyPatch, run: Run, windows: int) -> None:
    monkeypatch.setattr(FirstKernels, "may_load", lambda self, minibatches, training: False)
    execute([r.program for r in recorded(run, windows=windows)], queues=32, streams=STREAMS)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "2bw", "pipedream", "1f1b, skips", "2 replicas"])
def test_the_model_finds_the_deadlock_of_kernels_that_are_loaded_beside_receives(monkeypatch, name):
    with pytest.raises(Deadlock):
        windows_without_the_host(monkeypatch, *LOADING[name])


def test_the_model_agrees_with_a_gpu(monkeypatch):
    """Four ranks with eight microbatches over NCCL on an H200: 1f1b deadlocked, gpipe and interleaved did not."""
    for schedule, v in (("gpipe", 1), ("interleaved", 2)):
        run = case(schedule, 4, 8, v=v)
        windows_without_the_host(monkeypatch, Run(schedule, run.spec, run.edges, size=one_size), 3)
    run = case("1f1b", 4, 8)
    with pytest.raises(Deadlock):
        windows_without_the_host(monkeypatch, Run("1f1b", run.spec, run.edges, size=one_size), 1)


def test_the_model_finds_the_deadlock_of_replicas_that_load_kernels_later_than_others(monkeypatch):
    """If all replicas counted together, the last ones would load a kernel while others use NCCL."""
    monkeypatch.setattr(math, "lcm", lambda *numbers: 1)
    run, windows = LOADING["9 samples in 4 microbatches, 3 replicas"]
    with pytest.raises(Deadlock):
        execute([r.program for r in recorded(run, windows=windows)], queues=32, streams=STREAMS)


@given(cases())
@settings(max_examples=25, deadline=None)
def test_every_schedule_and_layout_ends(drawn):
    kind, request, edges_of_stages = drawn
    assume(not kind.spills)  # one rank sends nothing
    loaded = recorded(Run(kind.name, request, edges_of_stages))
    recorders = recorded(Run(kind.name, request, edges_of_stages, size=one_size), windows=3)
    for each in (loaded, recorders):
        execute([recorder.program for recorder in each], queues=32, streams=STREAMS)
    for recorder in recorders:
        assert len(recorder.program.communicators) + 2 <= STREAMS


@pytest.mark.parametrize("replicas", [16])
def test_the_model_finds_the_deadlock_of_one_communicator_for_each_channel(monkeypatch, replicas):
    """Torch hands out 32 streams in turn, and a rank would use every 16th of its communicators."""
    monkeypatch.setattr(messages, "_partners", lambda one, other: set(itertools.product(one, other)))
    monkeypatch.setattr(communicators, "_LIMIT", 1 << 30)
    monkeypatch.setattr(communicators, "MOST_GROUPS", 1 << 30)
    each = staticmethod(lambda c: Pair(f"{c.kind} {c.from_stage} {c.to_stage}", c.from_rank, c.to_rank))
    monkeypatch.setattr(Pair, "of", each)
    programs = [recorder.program for recorder in recorded(case("1f1b", 4, 2 * replicas, replicas=replicas))]
    with pytest.raises(Deadlock, match="rank 0"):
        execute(programs, queues=32, streams=STREAMS)
    execute(programs, queues=1 << 20, streams=1 << 20)  # the order itself is right


def test_the_model_finds_receives_that_are_not_in_the_order_of_the_sends(monkeypatch):
    monkeypatch.setattr(importlib.import_module("autopipe.schedules.lower"), "_is_mixed", lambda schedule, rank: False)
    with pytest.raises((Deadlock, OrderMismatch)):
        programs = [recorder.program for recorder in recorded(case("interleaved", 4, 8, v=2, skips="unet"))]
        execute(programs, queues=32, streams=STREAMS)


def test_the_model_finds_the_deadlock_of_streams_that_share_a_hardware_queue():
    programs = [recorder.program for recorder in recorded(case("gpipe", 8, 16, skips="unet"))]
    with pytest.raises(Deadlock):
        execute(programs, queues=1, streams=STREAMS)


@pytest.mark.parametrize(("world", "stages"), [(512, 8), (4096, 8), (4096, 64)])
def test_communicators_of_a_large_run_are_few(world, stages):
    run = case("1f1b", stages, 1, replicas=world // stages)
    pairs, per_rank = (
        run.communicators.pairs,
        Counter(rank for pair in run.communicators.pairs for rank in (pair.from_rank, pair.to_rank)),
    )
    assert len(pairs) == 2 * (stages - 1) * (world // stages)  # one in each direction between neighbours
    assert max(per_rank.values()) == 4
    assert not run.communicators.on_host


def test_a_communicator_is_asked_of_its_members_only():
    """A rank makes one call for each communicator of the run, and is a member of at most five."""
    run = case("1f1b", 8, 64, replicas=64)
    recorder = run.record(200)
    assert len(recorder.program.communicators) == 5  # two neighbours, two directions; the sum of the replicas
    assert recorder.calls == len(run.communicators.pairs) + 2 * len(run.groups)  # sums over gloo, too


@pytest.mark.parametrize("counts", [(16, 1), (1, 31), (17, 19)])
def test_messages_beyond_the_streams_of_torch_go_through_the_host(counts):
    layout = tuple(tuple(range(start, start + n)) for start, n in ((0, counts[0]), (counts[0], counts[1])))
    run = Run("1f1b", ScheduleSpec(layout, math.lcm(*counts)), StageEdges.chain(2))
    per_rank = Counter(rank for pair in run.communicators.pairs for rank in (pair.from_rank, pair.to_rank))
    assert run.communicators.on_host
    assert max(per_rank.values()) <= STREAMS - 2
    execute([recorder.program for recorder in recorded(run)], queues=32, streams=STREAMS)
    assert "go through host memory" in run.communicators.note


def test_a_device_gets_the_index_that_nccl_wants(monkeypatch):
    """The recorder refuses a device without one, as torch does."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    run = Run("1f1b", ScheduleSpec(layout(2), 2), edges(2))
    with in_place(Recorder(0, 2)):
        transport = ProcessTransport(run.channels, device=torch.device("cuda"), communicators=run.communicators)
    assert transport.device == CUDA


def test_a_message_of_several_values_is_one_operation():
    spec, several = ScheduleSpec(layout(4), 8), edges(4, "unet")
    one, three = (Run("1f1b", spec, several, values=values) for values in (1, 3))
    recorders = recorded(three)
    for single, recorder in zip(recorded(one), recorders, strict=True):
        assert len(three.messages_of(recorder)) == len(one.messages_of(single)) > 0
        assert {len(operation.tensor) for operation in three.messages_of(recorder)} == {3}
        # the host never waits for the device
        assert all(operation.stream is not None for operation in recorder.program.operations)
    execute([recorder.program for recorder in recorders], queues=8, streams=STREAMS)


@pytest.mark.parametrize("order", [(), (1, 0, 0, 0)])
def test_values_travel_packed_and_arrive_in_the_memory_order_of_the_plan(order):
    run = Run("1f1b", ScheduleSpec(layout(2), 2), edges(2), order=order)
    recorder = Recorder(1, 2)
    channel = next(c for c in run.channels if c.kind == "activation")
    with in_place(recorder):
        transport = ProcessTransport(run.channels, device=CUDA, communicators=run.communicators)
        (pending,) = transport.receive_message(channel, [Layout((4, 6), torch.float32, order)])
        arrived = pending.wait()
    assert arrived.is_cuda and arrived.shape == (4, 6)
    assert (() if arrived.is_contiguous() else tuple(memory_order(arrived))) == order
