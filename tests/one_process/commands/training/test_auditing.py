"""How often a run is audited by default, and when audits are skipped."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.pipelines import BATCH, captured, plan_for

from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training import auditing
from autopipe.errors import AuditError
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.runtime.audit.files import DIFFERENT, EQUAL, LEFT_OUT, AuditFiles, AuditResult
from autopipe.runtime.job import Job, RunDirectory


@dataclass(frozen=True)
class Prepared:
    """The result of the steps before a run, as far as audits use it."""

    plan: Plan
    graph: Graph
    profile: Profile


def prepared(seconds: float) -> Any:
    subject = captured("resnet")
    plan = plan_for(subject, 2, "1f1b", 4, BATCH["resnet"])
    plan = replace(plan, predicted=replace(plan.predicted, step_seconds=seconds))
    return Prepared(plan, subject.capture.graph, subject.profile)


def settings(**more: Any) -> TrainSettings:
    return TrainSettings(PlanSettings(ProfileSettings(ModelSettings("model.py"))), **more)


def test_default_audits_take_a_bounded_share_of_the_time() -> None:
    for seconds in (0.01, 0.1, 1.0, 60.0):
        run = prepared(seconds)
        every = auditing.interval(settings(), run)
        plan = run.plan
        plain = plan.num_microbatches * sum(s.forward_seconds + s.backward_seconds for s in plan.stages)
        assert every >= 1
        assert auditing.STARTUP_SECONDS + 2 * plain <= auditing.SHARE * every * seconds
    assert auditing.interval(settings(), prepared(60.0)) < auditing.interval(settings(), prepared(0.01))


def test_a_short_run_has_one_audit() -> None:
    run = prepared(0.1)
    every = auditing.interval(settings(), run)
    assert every > 1000
    assert auditing.interval(settings(steps=every), run) == 0
    assert auditing.interval(settings(steps=every + 1), run) == every
    assert [auditing.first(settings(steps=n), run, 0) for n in (1, 2, 9)] == [0, 1, 1]
    assert [auditing.first(settings(steps=n), run, 5) for n in (6, 9)] == [5, 5]
    assert auditing.first(settings(audit_every=0), run, 0) == auditing.first(settings(check_first=False), run, 0) == -1
    assert [auditing.interval(settings(audit_every=k, steps=5), run) for k in (0, 7)] == [0, 7]


def test_audits_are_skipped_if_the_plain_step_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auditing.memory_shortfall(prepared(0.1)) == ""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**16}))
    assert "audits are skipped: one step of the plain loop needs" in auditing.memory_shortfall(prepared(0.1))


class Ended:
    """A process that has ended."""

    ended = died = True
    process = SimpleNamespace(exitcode=3)

    def receive(self) -> list[Any]:
        return []


class RecordingAuditor(auditing.Auditor):
    """Keeps its results, and its events as (kind, fields)."""

    notes: list[Any]


@pytest.fixture
def auditor(tmp_path: Path) -> RecordingAuditor:
    model = tmp_path / "model.py"
    model.write_text("1")
    subject = captured("resnet")
    plan = plan_for(subject, 2, "1f1b", 4, BATCH["resnet"])
    plan = replace(plan, workload=replace(plan.workload, target=f"{model}:Net"))
    run = RunDirectory(tmp_path / "run")
    run.write(Job(1, 0, 4), plan, subject.capture.graph)
    events: list[Any] = []
    audits = RecordingAuditor(run, lambda kind, fields: events.append((kind, fields)), events.append)
    audits.notes = events
    audits.begin()
    return audits


def ended(auditor: RecordingAuditor, result: AuditResult | None) -> AuditFiles:
    files = AuditFiles(auditor.run.path, 5)
    for folder in (files.before, files.after, files.batch):
        folder.mkdir(parents=True)
    if result is not None:
        files.save(result)
    auditor._worker, auditor._files = Ended(), files  # type: ignore[assignment]
    return files


def test_an_equal_step_keeps_its_result_only(auditor: RecordingAuditor) -> None:
    result = AuditResult(5, EQUAL, True, tensors=9)
    files = ended(auditor, result)
    auditor.poll()
    assert auditor.notes == [result]
    assert [path.name for path in files.folder.iterdir()] == ["step-00000005.json"]


def test_replicas_that_differ_are_a_failed_audit(auditor: RecordingAuditor) -> None:
    with pytest.raises(AuditError, match=r"step 6 of the run .* the replicas of stage 1 are no longer equal") as error:
        auditor.failed(5, "the replicas of stage 1 are no longer equal")
    assert error.value.step == 5 and auditor.notes[0].status == DIFFERENT


def test_a_different_step_raises_and_keeps_its_files(auditor: RecordingAuditor) -> None:
    files = ended(auditor, AuditResult(5, DIFFERENT, False, "a.weight", 1, 3e-3, 4, 9))
    with pytest.raises(
        AuditError, match=r"step 6 of the run .* a\.weight differs by 3\.0e-03, and 3 more of \d+ tensors differ"
    ) as error:
        auditor.poll()
    assert error.value.step == 5
    assert error.value.where.startswith("stage 1; ")
    auditor.end()
    assert files.before.is_dir() and files.after.is_dir() and files.batch.is_dir()
    auditor.begin()
    assert not files.before.exists()


@pytest.mark.parametrize("name", ["model.py", "layers.py"])
def test_an_edited_model_file_skips_the_audit(
    auditor: RecordingAuditor, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text("1")
    imported = types.ModuleType("layers")
    imported.__file__ = str(tmp_path / "layers.py")
    monkeypatch.setitem(sys.modules, "layers", imported)
    auditor.begin()
    (tmp_path / name).write_text("2")
    ended(auditor, AuditResult(5, DIFFERENT, False, "a.weight", 1, 3e-3, 4, 9))
    auditor.poll()
    auditor.add(10, 0.5)
    text = f"an audit is skipped: {tmp_path / name} was edited since the run began"
    assert auditor.notes == [("note", {"text": text})]


def test_a_skipped_audit_is_reported_once(auditor: RecordingAuditor) -> None:
    for _ in range(2):
        files = ended(auditor, AuditResult(5, LEFT_OUT, reason="it does not fit"))
        auditor.poll()
        assert not files.before.exists()
    assert auditor.notes == [("note", {"text": "an audit is skipped: it does not fit"})]
    ended(auditor, None).result.unlink()
    auditor.poll()
    assert "its process ended with code 3; see" in auditor.notes[-1][1]["text"]
