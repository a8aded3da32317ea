"""The trials for GPUs: what they cover, and the page that they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.schedules import REGISTRY
from benchmarks.gpu_trial.__main__ import Setting, run
from benchmarks.gpu_trial.bench import Bench, TrialError
from benchmarks.gpu_trial.report import page, write
from benchmarks.gpu_trial.trials import Trial, trials


def test_every_schedule_trains_in_a_trial_of_its_own() -> None:
    names = [trial.name for trial in trials("cuda")]
    assert len(set(names)) == len(names)
    assert {f"train {name}" for name in REGISTRY} <= set(names)
    assert {"kill a rank", "suspend a rank", "resume", "memory", "prediction", "synchronizations"} <= set(names)


def test_the_page_has_a_row_for_every_outcome(tmp_path: Path) -> None:
    def ends(bench: Bench) -> str:
        return "as wanted"

    def differs(bench: Bench) -> str:
        raise TrialError("weights | differ")

    setting = Setting("cpu", ranks=2, seconds=60.0, logs=tmp_path / "logs")

    def fails(bench: Bench) -> str:
        raise KeyError("loss")

    outcomes = [run(Trial(f.__name__, "it ends", f), setting) for f in (ends, differs, fails)]
    outcomes.append(run(Trial("late", "it ends", ends), setting, end=0.0))
    assert "differs: weights | differ" in (tmp_path / "logs").read_text()
    write(tmp_path / "results" / "gpu.md", page(outcomes, [("torch", "2.13")], "GPUs"))
    text = (tmp_path / "results" / "gpu.md").read_text()
    assert "1 held, 2 did not hold, 1 not run." in text
    assert "| ends | it ends | held | as wanted | 0 |" in text
    assert "| differs | it ends | did not hold | weights / differ | 0 |" in text
    assert "| fails | it ends | did not hold | KeyError('loss') | 0 |" in text
    assert "| late | it ends | not run | the time for all trials is over | 0 |" in text


def test_a_command_that_does_not_end_is_killed_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "command.py"
    script.write_text("import subprocess, sys, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)\n")
    monkeypatch.setattr("benchmarks.gpu_trial.bench.COMMAND", script)
    bench = Bench(tmp_path, "cpu", 2, {}, seconds=0.5)
    with pytest.raises(TrialError, match="train: no end within the time"):
        bench.finish(bench.start("train"))
