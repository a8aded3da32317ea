"""One command at a time in a work directory, since plan, record and stage files belong together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pipelines import BATCH, build, captured, plan_for
from support.stored_profiles import stored_profile

from autopipe.commands import artifact_steps
from autopipe.commands.checking.checking import write_run
from autopipe.commands.locks import only_one
from autopipe.commands.planning import scaling, simulating
from autopipe.commands.settings import CheckSettings, ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.store import PlanRecord
from autopipe.commands.training import runs
from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning.requests import PlanRequest


def profile(work: Path) -> ProfileSettings:
    return ProfileSettings(ModelSettings("net.py"), work_dir=work)


def plan(work: Path) -> PlanSettings:
    return PlanSettings(profile(work), gpus=2, replicas="never")


def ignore(kind: str, fields: Mapping[str, Any]) -> None:
    pass


COMMANDS: dict[str, Callable[[Path], object]] = {
    "profile": lambda work: artifact_steps.profile(profile(work)),
    "plan": lambda work: artifact_steps.plan(plan(work)),
    "plan --sweep-gpus": lambda work: scaling.sweep_gpus(plan(work), (2, 4)),
    "generate": artifact_steps.generate,
    "simulate": simulating.simulate,
    "check": lambda work: runs.check(CheckSettings(plan(work))),
    "train": lambda work: runs.train(TrainSettings(plan(work)), ignore),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_command_in_a_work_directory_is_refused(command: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    with only_one(work, "prepares a run"), pytest.raises(RunError, match=r"work is in use: .* prepares a run in it"):
        COMMANDS[command](work)
    assert [path.name for path in work.iterdir()] == ["lock"]


def test_a_run_copies_only_stage_files_that_a_command_has_written(tmp_path: Path) -> None:
    subject = captured("resnet")
    cut = plan_for(subject, 2, "1f1b", 4, BATCH["resnet"])
    work = build(subject, cut, tmp_path / "work")
    for name in ("shape_1", "evaluation_1", "evaluation"):  # a received folder
        (work.run.stages / name).mkdir()
        (work.run.stages / name / "stage_0.py").write_text("raise SystemExit")
    cluster = Cluster((Level("host", 2, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    record = PlanRecord(cut.digest, "", PlanRequest(gpus=2), cluster)
    shared = {"profile": subject.profile, "cluster": cluster, "record": record}
    prepared: Any = SimpleNamespace(plan=cut, graph=subject.capture.graph, stages=work.run.stages, **shared)
    run = write_run(tmp_path / "run", work.job, prepared)
    copied = {path.name for path in run.stages.iterdir() if path.is_dir()}
    assert copied == {"evaluation"}  # part of what `untrusted_stages` compares
    assert (run.stages / "stage_0.py").read_text() == (work.run.stages / "stage_0.py").read_text()


def test_a_plan_warns_of_a_model_file_that_changed_after_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = dataclasses.replace(
        stored_profile().workload, target="model.py:build", arguments={"width": "8"}, hooks={"loss": ":criterion"}
    )
    artifact.save(dataclasses.replace(stored_profile(), workload=spec), tmp_path / "profile.json")

    def warnings() -> tuple[str, ...]:
        settings = ProfileSettings(ModelSettings(), work_dir=tmp_path)
        return artifact_steps.plan(PlanSettings(settings, gpus=2, replicas="never", schedule="1f1b")).warnings

    file = tmp_path / "model.py"
    file.write_text("raise SystemExit")  # it is not run
    os.utime(file, (0, 0))
    assert warnings() == ()
    os.utime(file)
    remedy = "`autopipe plan model.py:build --arg width=8 --loss :criterion` measures it again"
    assert warnings() == (f"model.py has changed since it was profiled; {remedy}",)
    file.unlink()
    assert warnings() == ()
