"""The memory of schedules, measured while they run: live weight versions and microbatches in flight per stage."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import torch
from support.pipelines import Pipeline, build, captured, minibatches
from support.schedule_cases import BATCH, SCHEDULES, Case

from autopipe.runtime.executor import Executor
from autopipe.runtime.session import RankSession
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.weights import WeightVersions
from autopipe.schedules import REGISTRY, make

STEPS = 6


def trained(case: Case, folder: Path) -> tuple[Pipeline, list[RankSession]]:
    subject = captured(case.model)
    pipeline = build(subject, case.plan(subject), folder)
    return pipeline, pipeline.train(minibatches(subject.workload, STEPS, BATCH))


def peak_versions(sessions: list[RankSession]) -> dict[int, int]:
    return {index: runner.versions.peak_versions for s in sessions for index, runner in s.executor.runners.items()}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the peak number of memory blocks of one parameter, by stage: its versions, and the optimizer's copy.

    They are counted by weak references, before every computation and in every step.
    """
    peaks: dict[int, int] = {}
    stage_of: dict[int, int] = {}
    seen: dict[int, list[weakref.ref[torch.nn.Parameter]]] = {}
    add, end, follow = WeightVersions._add, WeightVersions.end_step, Executor._microbatch

    def adding(self, version, tensors):
        add(self, version, tensors)
        name = next(iter(self._leaves[version]), None)
        if name is not None:
            refs = seen.setdefault(id(self), [weakref.ref(self.masters[name])])
            refs.append(weakref.ref(self._leaves[version][name]))

    def count(versions):
        parameters = [reference() for reference in seen.get(id(versions), ())]
        num_versions = len({p.data_ptr() for p in parameters if p is not None})
        peaks[stage_of[id(versions)]] = max(peaks.get(stage_of[id(versions)], 0), num_versions)

    def ending(self):
        count(self)  # the optimizer has stepped on separate memory
        end(self)

    def counting(self, step, offset):
        for index, runner in self.runners.items():
            stage_of[id(runner.versions)] = index
            count(runner.versions)
        return follow(self, step, offset)

    monkeypatch.setattr(WeightVersions, "end_step", ending)
    monkeypatch.setattr(WeightVersions, "_add", adding)
    monkeypatch.setattr(Executor, "_microbatch", counting)
    return peaks


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if REGISTRY[name].synchronous])
def test_a_synchronous_schedule_keeps_one_version(schedule: str, alive: dict[int, int], tmp_path: Path) -> None:
    _, sessions = trained(Case(schedule, "unet", (1, 1, 1), "2p"), tmp_path)
    assert peak_versions(sessions) == alive == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("recompute", ["never", "stage", "block"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1)])
def test_2bw_keeps_two_versions_at_every_stage(
    replicas: tuple[int, ...], recompute: str, alive: dict[int, int], tmp_path: Path
) -> None:
    _, sessions = trained(Case("2bw", "unet", replicas, "2p", (recompute,)), tmp_path)
    assert peak_versions(sessions) == alive == dict.fromkeys(range(len(replicas)), 2)


@pytest.mark.parametrize(
    ("m", "vertical", "expected"),
    [
        ("1", False, [4, 3, 2, 1]),  # p - 1 - s stale, and the newest
        ("2", False, [3, 2, 2, 1]),
        ("p", False, [2, 2, 2, 1]),
        ("1", True, [4, 4, 4, 4]),
        ("2", True, [3, 3, 3, 3]),
    ],
)
def test_pipedream_keeps_one_version_more_than_its_staleness(
    m: str, vertical: bool, expected: list[int], alive: dict[int, int], tmp_path: Path
) -> None:
    case = Case("pipedream", "unet", (1, 1, 1, 1), m, vertical_sync=vertical)
    _, sessions = trained(case, tmp_path)
    assert [delta + 1 for delta in case.staleness()] == expected
    assert peak_versions(sessions) == alive == dict(enumerate(expected))


def in_flight_by_hand(schedule: str, p: int, m: int) -> list[int]:
    """Return the formulas of the papers for one stage and one replica per rank."""
    if schedule in ("gpipe", "spilled"):
        return [m] * p
    if schedule == "zero-bubble":  # ZB-H1: no more than the first stage of 1F1B
        return [min(p, m)] * p
    if schedule == "eager-1f1b":
        return [min(2 * (p - 1 - s) + 1, m) for s in range(p)]
    if schedule == "interleaved":  # one stage per rank: Megatron-LM sends two more ahead for each hop to the end
        return [min(2 * (p - 1 - s) + 1, m) for s in range(p)]
    flushed = m if schedule == "1f1b" else m * STEPS
    return [min(p - s, flushed) for s in range(p)]


@pytest.mark.parametrize("m", ["p", "8"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_in_flight_equal_the_schedules(
    schedule: str, m: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: dict[int, int] = {}
    lock, original = threading.Lock(), StageRunner.forward

    def forward(self, *arguments):
        sent = original(self, *arguments)
        with lock:
            in_flight = len(self.in_flight) + len(self._pending)
            peaks[self.stage.INDEX] = max(peaks.get(self.stage.INDEX, 0), in_flight)
        return sent

    monkeypatch.setattr(StageRunner, "forward", forward)
    case = Case(schedule, "unet", (1, 1, 1), m)
    pipeline, _ = trained(case, tmp_path)
    in_flight = [peaks[stage] for stage in range(3)]
    bounds = make(schedule, pipeline.context.request).in_flight
    assert all(count <= bound for count, bound in zip(in_flight, bounds, strict=True))
    assert in_flight == in_flight_by_hand(schedule, 3, case.m)
