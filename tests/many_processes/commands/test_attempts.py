"""A run that restarts neither uses nor changes what other commands have written to the work directory meanwhile."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from support.commands import Commands, training, wait_for_steps
from support.waiting import short_pause

from autopipe.commands import artifact_steps
from autopipe.commands.exporting import export
from autopipe.commands.settings import ExportSettings, ModelSettings, PlanSettings, ProfileSettings


@pytest.mark.parametrize(("more", "ranks"), [(["--max-restarts", "1"], 3), (["--elastic"], 2)])
def test_a_restart_ignores_a_plan_that_was_written_meanwhile(
    commands: Commands, tmp_path: Path, more: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = *training(3, steps=1_000_000), "--check", "--checkpoint-every", "5", *more, "--json"
    process = commands.start(*words)
    victim = wait_for_steps(tmp_path / "run", process)[1]
    work = tmp_path / ".autopipe"
    artifact_steps.plan(PlanSettings(ProfileSettings(ModelSettings(), work_dir=work), gpus=4, schedule="gpipe"))
    artifact_steps.generate(work)
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file() and path.name != "lock"}
    victim.kill()
    metrics = tmp_path / "run" / "metrics.jsonl"
    while metrics.read_text().partition('"restart"')[2].count("\n") < 3:
        assert process.poll() is None, process.communicate()
        short_pause()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    document = json.loads(out)
    assert [restart["ranks"] for restart in document["restarts"]] == [ranks]
    shown = commands.document("show", "run")
    assert (shown["state"], shown["step"], len(shown["losses"])) == ("stopped", document["step"], document["step"])
    assert [(r["rank"], r["ranks"]) for r in shown["attempts"][0]["restarts"]] == [(1, ranks)]
    # another plan is compared with plain training like the first one
    assert err.count("compared with plain training: equal") == (1 if ranks == 3 else 2), err
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file() and path.name != "lock"} == before
    commands.run(*training(3, steps=document["step"], run="whole"))
    for run in ("run", "whole"):
        export(ExportSettings(tmp_path / f"{run}.pt", run=tmp_path / run))
    ours, expected = (torch.load(tmp_path / f"{run}.pt") for run in ("run", "whole"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
