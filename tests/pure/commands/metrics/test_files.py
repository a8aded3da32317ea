"""The metrics files of a run: what a kill, a resume and a full disk leave."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autopipe.commands.metrics.files import COLUMNS, MetricsFiles
from autopipe.errors import RunError
from autopipe.runtime.job import RunDirectory


def step(number: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / (number + 1) if loss is None else loss, "time": 1e9 + number, **more}


def evaluation(number: int) -> dict[str, Any]:
    return {"step": number, "evaluation_loss": 2.0 / number, "samples": 8}


def files(folder: Path) -> MetricsFiles:
    return MetricsFiles(RunDirectory(folder))


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def written(folder: Path, steps: int, every: int = 2) -> MetricsFiles:
    metrics = files(folder)
    for number in range(steps):
        metrics.write(step(number))
        if (number + 1) % every == 0:
            metrics.write(evaluation(number + 1))
            metrics.write({"audit": number, "equal": True})
    return metrics


def test_a_row_is_in_both_files_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = files(tmp_path)
    metrics.write(step(0, learning_rate=1e-3, skipped=False))
    metrics.write(evaluation(1))
    metrics.write({"restart": 1, "from_step": 0, "ranks": 2})
    assert rows(tmp_path) == [
        {**step(0), "learning_rate": 1e-3, "skipped": False, "schema_version": 1},
        {**evaluation(1), "schema_version": 1},
        {"restart": 1, "from_step": 0, "ranks": 2, "schema_version": 1},
    ]
    first, second = table(tmp_path)
    assert tuple(first) == COLUMNS
    assert (first["step"], float(first["loss"]), float(first["learning_rate"]), first["skipped"]) == ("0", 1, 1e-3, "0")
    assert (first["evaluation_loss"], first["gradient_norm"]) == ("", "")
    assert (second["step"], second["loss"], second["evaluation_loss"]) == ("1", "", "2.0")


def test_a_resume_from_an_earlier_checkpoint_repeats_no_step(tmp_path: Path) -> None:
    metrics = written(tmp_path, 6)
    metrics.keep_before(4)
    for number in range(4, 7):
        metrics.write(step(number, loss=9.0))
    losses = [(row["step"], row["loss"]) for row in rows(tmp_path) if "loss" in row]
    assert losses == [(n, 1.0 / (n + 1)) for n in range(4)] + [(n, 9.0) for n in range(4, 7)]
    assert [row["step"] for row in rows(tmp_path) if "evaluation_loss" in row] == [2, 4]
    assert [row["audit"] for row in rows(tmp_path) if "audit" in row] == [1, 3]
    assert [(int(row["step"]), float(row["loss"])) for row in table(tmp_path) if row["loss"]] == losses
    abandoned = [(row.get("step", row.get("audit")), set(row) & {"loss", "evaluation_loss", "audit"})
                 for row in rows(tmp_path, "metrics.abandoned.jsonl")]  # fmt: skip
    assert abandoned == [(4, {"loss"}), (5, {"loss"}), (6, {"evaluation_loss"}), (5, {"audit"})]


def test_a_resume_where_the_run_ended_keeps_every_byte(tmp_path: Path) -> None:
    written(tmp_path, 4).close()
    before = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv")]
    files(tmp_path).keep_before(4)
    assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv")] == before
    assert not (tmp_path / "metrics.abandoned.jsonl").exists()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, cut: int) -> None:
    written(tmp_path, 3, every=9).close()
    for name in ("metrics.jsonl", "metrics.csv"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) - cut])
    metrics = files(tmp_path)
    metrics.keep_before(2)
    metrics.write(step(2, loss=5.0))
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(0, 1.0), (1, 0.5), (2, 5.0)]
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("0", "1.0"), ("1", "0.5"), ("2", "5.0")]


def test_a_new_run_keeps_nothing_of_one_that_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    metrics = written(tmp_path, 2)
    metrics.write({"restart": 1, "from_step": 0, "ranks": 2})
    metrics.keep_before(None)
    assert rows(tmp_path) == [] and table(tmp_path) == []
    metrics.write(step(0))
    assert len(rows(tmp_path)) == len(table(tmp_path)) == 1


def test_a_restart_stays_in_the_file(tmp_path: Path) -> None:
    metrics = written(tmp_path, 2, every=9)
    metrics.write({"restart": 1, "from_step": 0, "ranks": 2})
    metrics.keep_before(0)
    assert [row.get("restart") for row in rows(tmp_path)] == [1]


def test_numbers_that_are_not_finite_are_valid_json_and_nan_in_the_table(tmp_path: Path) -> None:
    metrics = files(tmp_path)
    metrics.write(step(0, loss=float("nan"), gradient_norm=float("inf")))
    assert (rows(tmp_path)[0]["loss"], rows(tmp_path)[0]["gradient_norm"]) == (None, None)
    live = (tmp_path / "metrics.csv").read_bytes()
    assert (table(tmp_path)[0]["loss"], table(tmp_path)[0]["gradient_norm"]) == ("nan", "nan")
    metrics.keep_before(1)
    assert (tmp_path / "metrics.csv").read_bytes() == live


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match="the metrics cannot be written: the disk is full") as caught:
        files(tmp_path).write(step(0))
    assert "metrics.jsonl" in caught.value.where and "--run-dir" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="the metrics cannot be written: Permission denied"):
        files(tmp_path).write(step(0))
