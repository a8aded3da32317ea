"""The records of a sweep's jobs: kept, continued, and the figures of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from autopipe.errors import RunError
from autopipe.report.results import SweepRow
from autopipe.sweep import state
from autopipe.sweep.file import SweepFile, SweepJob
from autopipe.sweep.halving import Halving
from autopipe.sweep.state import Folder, JobRecord, Metrics, SweepState, read_metrics

JOBS = [SweepJob(n, f"gpt-lr={n}", "job[0]", "gpt.py", {"lr": n}, {"lr": n}) for n in (1, 2, 3)]


def sweep_of(jobs: Sequence[SweepJob], **more: Any) -> SweepFile:
    fields: dict[str, Any] = {"metric": "loss", "halving": None, **more}
    return SweepFile(Path("sweep.toml"), tuple(jobs), None, 60.0, **fields)


def begin(folder: Folder, jobs: Sequence[SweepJob], *, resume: bool) -> list[JobRecord]:
    return list(state.begin(folder, sweep_of(jobs), resume=resume).jobs)


def save(folder: Folder, records: Sequence[JobRecord], rows: Sequence[SweepRow]) -> None:
    state.save(folder, SweepState.of(sweep_of(JOBS), records, 0), rows)


def row(job: SweepJob, **more: object) -> SweepRow:
    base = SweepRow(
        job.number, job.name, job.target, job.settings, "done", 5, 5, 1.5, None, 2.0, 3.0, 1, "0", None, "r", ""
    )
    return dataclasses.replace(base, **more)


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    records = begin(folder, JOBS, resume=False)
    assert [record.status for record in records] == ["waiting"] * 3
    records[0].status, records[0].leases = state.DONE, 2
    records[1].status, records[1].leases, records[1].step = state.RUNNING, 1, 7
    records[2].status, records[2].leases, records[2].error = state.FAILED, 1, "no\nmemory"
    save(folder, records, [row(JOBS[0])])
    with pytest.raises(RunError, match="already contains a sweep"):
        begin(folder, JOBS, resume=False)
    again = begin(folder, JOBS, resume=True)
    assert [(record.status, record.step, record.error) for record in again] == [
        ("done", 0, ""),
        ("waiting", 7, ""),
        ("waiting", 0, ""),
    ]


def test_jobs_that_wait_for_a_comparison_still_wait(tmp_path: Path) -> None:
    records = begin(Folder(tmp_path), JOBS, resume=False)
    for record, status in zip(records, (state.PAUSED, state.DROPPED, state.WAITING), strict=True):
        record.status, record.leases, record.rung, record.metric = status, 1, 2, 0.5
    save(Folder(tmp_path), records, [])
    again = begin(Folder(tmp_path), JOBS, resume=True)
    assert [(record.status, record.rung, record.metric) for record in again] == [
        ("paused", 2, 0.5),
        ("dropped", 2, 0.5),
        ("waiting", 2, 0.5),
    ]


def test_a_sweep_that_trained_nothing_can_begin_again(tmp_path: Path) -> None:
    save(Folder(tmp_path), [JobRecord("other", "digest")], [])
    assert [record.name for record in begin(Folder(tmp_path), JOBS, resume=False)] == [job.name for job in JOBS]


def test_only_the_same_jobs_are_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no sweep in"):
        begin(Folder(tmp_path), JOBS, resume=True)
    records = begin(Folder(tmp_path), JOBS[:2], resume=False)
    records[0].leases = 1
    save(Folder(tmp_path), records, [])
    changed = [dataclasses.replace(job, options={"lr": 9}) for job in JOBS]
    with pytest.raises(RunError, match="the options of gpt-lr=1 differ") as caught:
        begin(Folder(tmp_path), changed, resume=True)
    assert caught.value.where == "job[0]"
    # a job that was not trained may change, and jobs may be added
    assert len(begin(Folder(tmp_path), [JOBS[0], *changed[1:]], resume=True)) == 3


def test_a_job_keeps_its_number_because_its_folder_has_it(tmp_path: Path) -> None:
    records = begin(Folder(tmp_path), JOBS, resume=False)
    records[2].leases = 1
    save(Folder(tmp_path), records, [])
    swapped = [dataclasses.replace(JOBS[n], number=number) for number, n in enumerate((2, 0, 1), 1)]
    with pytest.raises(RunError, match="gpt-lr=3 is job 1 of the file, and was job 3"):
        begin(Folder(tmp_path), swapped, resume=True)
    assert len(begin(Folder(tmp_path), JOBS, resume=True)) == 3


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"metric": "loss"}, {"metric": "evaluation"}, "metric is 'evaluation', and the sweep began with 'loss'"),
        ({"halving": Halving((2, 4), 0.5)}, {}, "stop.at was removed after the sweep began"),
        ({}, {"halving": Halving((2,), 0.5)}, "stop.at was added after the sweep began"),
        ({"halving": Halving((2,), 0.5)}, {"halving": Halving((2,), 0.25)}, "stop.keep is 0.25"),
    ],
)
def test_jobs_are_compared_as_they_were(tmp_path: Path, before: Any, after: Any, what: str) -> None:
    first = sweep_of(JOBS, **before)
    records = state.begin(Folder(tmp_path), first, resume=False).jobs
    state.save(Folder(tmp_path), SweepState.of(first, records, 0), [])
    state.begin(Folder(tmp_path), sweep_of(JOBS, **after), resume=True)  # nothing was trained
    records[0].leases = 1
    state.save(Folder(tmp_path), SweepState.of(first, records, 0), [])
    with pytest.raises(RunError, match=what):
        state.begin(Folder(tmp_path), sweep_of(JOBS, **after), resume=True)
    assert state.begin(Folder(tmp_path), first, resume=True).metric == first.metric


def test_the_number_of_jobs_that_share_a_device_is_kept(tmp_path: Path) -> None:
    records = begin(Folder(tmp_path), JOBS, resume=False)
    state.save(Folder(tmp_path), SweepState.of(sweep_of(JOBS), records, 3), [])
    assert state.begin(Folder(tmp_path), sweep_of(JOBS), resume=True).jobs_per_device == 0  # nothing was trained
    records[0].leases = 1
    state.save(Folder(tmp_path), SweepState.of(sweep_of(JOBS), records, 3), [])
    assert state.begin(Folder(tmp_path), sweep_of(JOBS), resume=True).jobs_per_device == 3


def test_the_table_has_a_column_for_each_setting(tmp_path: Path) -> None:
    error = 'it "failed",\nbadly'
    save(Folder(tmp_path), [], [row(JOBS[0]), row(JOBS[1], settings={"arg.width": 8}, error=error)])
    frame = pd.read_csv(tmp_path / "results.csv")
    assert list(frame["name"]) == ["gpt-lr=1", "gpt-lr=2"]
    assert frame["lr"].tolist()[0] == 1 and frame["arg.width"].tolist()[1] == 8
    assert frame["error"][1] == error and frame["loss"][0] == 1.5


def test_the_metric_is_the_mean_of_the_last_losses(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == Metrics()
    lines = [{"step": step, "loss": float(step)} for step in range(20)]
    lines += [{"step": 19, "loss": 29.0}, {"step": 20, "evaluation_loss": 0.5, "samples": 3}, {"restart": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 20, "lo')
    assert read_metrics(path) == Metrics(20, 29.0, (sum(range(10, 19)) + 29.0) / 10, 0.5)
    with path.open("a") as file:
        file.write('\n{"step": 20, "loss": null}\n')
    assert read_metrics(path) == Metrics(21, None, None, 0.5)
