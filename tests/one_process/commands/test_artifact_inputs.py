"""Why an artifact of a work directory is made again: the first of its inputs that has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopipe.commands import artifact_steps
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings
from autopipe.commands.store import Input, stale

MODEL = """
import torch
from torch import nn

def model(): return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
def loss(output, target): return (output - target).square().mean()
def data(batch_size=8): return [(torch.ones(batch_size, 3), torch.ones(batch_size, 2))]
"""

Prepare = Callable[..., list[str]]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Return a function that prepares a run and returns the notes on its profile, its plan and its stage files."""
    file = tmp_path / "net.py"
    file.write_text(MODEL)

    def notes(gpus: int | None = 2, sizes: tuple[int, ...] | None = (4,), text: str = MODEL) -> list[str]:
        file.write_text(text)
        profile = ProfileSettings(ModelSettings(str(file)), tmp_path / "work", device="cpu", microbatch_sizes=sizes)
        settings = PlanSettings(profile, gpus=gpus, replicas="never", schedule="gpipe", num_microbatches=2)
        prepared = artifact_steps.prepare(settings)
        return [note for note in prepared.notes if note.startswith(("profile", "plan", "wrote", "stage files"))]

    return notes


def test_the_first_input_that_differs_is_the_reason_and_later_ones_are_not_computed() -> None:
    def inputs() -> Iterator[Input]:
        yield Input(1, 1, "equal")
        yield Input("a{b}", "c", "it was {written}, and is {now}")
        raise AssertionError("computed an input after the reason")

    assert stale(inputs()) == "it was a{b}, and is c"
    assert stale([Input(1, 1, "equal")]) == ""


def test_everything_is_made_once(prepare: Prepare) -> None:
    profiled, planned, wrote = prepare()
    assert profiled.endswith("(no profile found)")
    assert planned.endswith("no plan was stored")
    assert wrote.endswith("none were stored")
    assert [note.split()[-1] for note in prepare()] == ["reused"] * 3


def test_another_request_makes_a_plan_and_its_stages_again(prepare: Prepare) -> None:
    prepare()
    profile, planned, wrote = prepare(gpus=1)
    assert profile.endswith("reused")
    assert planned.endswith("--gpus 2 -> 1")
    assert ": the plan changed (" in wrote


def test_another_model_makes_everything_again(prepare: Prepare) -> None:
    prepare()
    reasons = prepare(text=MODEL.replace("nn.ReLU()", "nn.Tanh()"))
    assert [reason.count("the model changed (") for reason in reasons] == [1, 1, 1]


def test_a_size_that_was_not_measured_makes_the_profile_again(prepare: Prepare) -> None:
    prepare()
    assert prepare(sizes=(4, 2))[0].endswith("(microbatch size 2 was not measured)")


@pytest.mark.parametrize("damage", ["# edited\n", None])
def test_a_changed_or_missing_stage_file_is_written_again(prepare: Prepare, tmp_path: Path, damage: str | None) -> None:
    prepare()
    file = tmp_path / "work" / "stages" / "stage_0.py"
    text = file.read_text()
    if damage is None:
        file.unlink()
    else:
        file.write_text(text + damage)
    assert prepare()[-1].endswith("they have changed since autopipe wrote them")
    assert file.read_text() == text
    assert prepare()[-1] == "stage files reused"


def test_stage_files_of_another_version_are_written_again(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    versions = artifact_steps.versions()
    monkeypatch.setattr(artifact_steps, "versions", lambda: ("0.0.1", *versions[1:]))
    *reused, wrote = prepare()
    assert [note.split()[-1] for note in reused] == ["reused"] * 2
    assert wrote.endswith("the version of autopipe, torch or Python changed")


def test_stage_files_without_a_record_are_written_again(prepare: Prepare, tmp_path: Path) -> None:
    prepare()
    (tmp_path / "work" / "stages-record.json").unlink()
    assert prepare()[-1].endswith("none were stored")
