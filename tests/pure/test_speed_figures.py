"""The arithmetic of ``benchmarks.speed``: blocks of steps, ratios, and what a fresh clone can measure."""

import pytest

from benchmarks.speed.cases.planner import golden_cases
from benchmarks.speed.link import Link
from benchmarks.speed.meter import FOLDER, metered, readings
from benchmarks.speed.running import Run, same_losses
from benchmarks.speed.spread import BLOCKS, Spread, ratios, step_times, verdict

HEADER = "profile,level_sizes,bandwidths_GBps"


def test_a_step_is_a_mean_over_consecutive_steps_after_the_warm_up():
    ends = [100.0, 101.0]
    for index in range(20):  # steps that overlap take turns: 1 s and 3 s
        ends.append(ends[-1] + (3.0 if index % 2 else 1.0))
    assert step_times(ends, warm_up=1) == [2.0] * BLOCKS


def test_few_steps_are_fewer_blocks():
    assert step_times([0.0, 50.0, 51.0, 53.0], warm_up=1) == [1.0, 2.0]
    assert step_times([0.0, 2.0], warm_up=2) == [2.0]


def test_a_ratio_is_of_pairs():
    spread = ratios([2.0, 30.0, 400.0], [1.0, 10.0, 100.0])
    assert (spread.low, spread.middle, spread.high) == (2.5, 3.0, 3.5)
    assert spread.text(".1f") == "3.0 (2.5 to 3.5)"
    assert Spread.of([1.25]).text() == "1.250 (1.250 to 1.250)"


def test_a_bar_has_a_direction():
    assert verdict(0.97, 0.96, at_least=True) == ">= 0.96: yes"
    assert verdict(0.97, 0.96, at_least=False) == "<= 0.96: no"


def test_another_loss_ends_the_benchmark():
    same_losses(Run([], [1.0, 2.0], []), Run([], [1.0, 2.0 + 1e-6], []), 1e-5, "two systems")
    with pytest.raises(SystemExit, match="two systems: the losses differ"):
        same_losses(Run([], [1.0, float("nan")], []), Run([], [1.0, 2.0], []), 1e-5, "two systems")


def test_only_ranks_are_metered(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert list(metered("ab")) == ["a", "b"]
    assert readings(tmp_path) == []
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {"name": "rank 1"}))
    assert list(metered("ab")) == ["a", "b"]
    (rank,) = readings(tmp_path)
    assert len(rank) == 2
    assert rank[0].memory > 0 and rank[1].wall >= rank[0].wall


def test_a_message_takes_as_long_as_chosen():
    link = Link(latency=1e-4, bandwidth=2e9)
    numbers = link.numbers(1e-3)
    assert link.latency + 4 * numbers / link.bandwidth == pytest.approx(1e-3, rel=1e-5)
    assert link.numbers(0.0) == 1


def test_the_largest_machine_of_each_profile_is_planned(tmp_path):
    rows = ["a.txt,4,1", "a.txt,16,3.125", "a.txt,4x4,10/1.25", "a.txt,4x2x2,10/10/1.25", "b.txt,8,1"]
    (tmp_path / "golden.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    cases = golden_cases(tmp_path)
    assert [(case.profile, case.counts) for case in cases] == [("a.txt", (16,)), ("a.txt", (4, 4)), ("b.txt", (8,))]
    assert cases[1].cluster().count("[[level]]") == 2
