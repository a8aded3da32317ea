"""What a measurement is made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.commands import artifact_steps, measuring
from autopipe.commands.settings import ModelSettings, ProfileSettings
from autopipe.commands.store import Work


class LoadedError(Exception):
    pass


@pytest.mark.parametrize(
    ("device", "estimate", "wanted"), [(None, False, "auto"), ("cpu", False, "cpu"), (None, True, None)]
)
def test_a_model_is_captured_for_the_device_that_is_measured(
    device: str | None, estimate: bool, wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(settings: ProfileSettings, *_: Any, **options: Any) -> None:
        asked.append(settings.device)
        raise LoadedError

    monkeypatch.setattr(measuring, "load_model", load)
    settings = ProfileSettings(ModelSettings("net.py"), tmp_path, device=device, estimate=estimate)
    with pytest.raises(LoadedError):
        measuring.measure_anew(settings, Work.begin(tmp_path, None))
    assert asked == [wanted]


NORMALISED = """
import torch
from torch import nn

def model(): return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
def loss(output, target): return (output - target).square().mean()
def data(batch_size=8): return [(torch.ones(batch_size, 3), torch.ones(batch_size, 2))]
"""


def test_a_warning_about_batch_statistics_is_repeated_with_a_reused_profile(tmp_path: Path) -> None:
    (tmp_path / "normalised.py").write_text(NORMALISED)
    named = ModelSettings(str(tmp_path / "normalised.py"))
    settings = ProfileSettings(named, tmp_path, device="cpu", microbatch_sizes=(2,))
    for first in (True, False):
        work = Work.begin(tmp_path, None)
        model = measuring.ensure_profile(settings, work)[0]
        assert any(note.endswith("reused") for note in work.notes) != first
        assert [note for note in model.notes if note.startswith("batch statistics (module 1) are taken over")]


def test_a_reused_profile_says_that_its_capture_was_not_compared(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(NORMALISED.replace("nn.BatchNorm1d(4)", "nn.ReLU()"))
    model = ModelSettings(str(tmp_path / "plain.py"))
    for verify in (False, True):
        settings = ProfileSettings(model, tmp_path, device="cpu", microbatch_sizes=(2,), verify=verify)
        work = Work.begin(tmp_path, None)
        measuring.ensure_profile(settings, work)
    assert any("reused, whose capture was not compared with the model" in note for note in work.notes)


def test_a_large_minibatch_is_measured_in_larger_microbatches(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(NORMALISED.replace("nn.BatchNorm1d(4)", "nn.ReLU()"))
    settings = ProfileSettings(ModelSettings(str(tmp_path / "plain.py")), tmp_path, estimate=True)
    sizes = [
        [
            measurement.microbatch_size
            for measurement in artifact_steps.profile(settings, batch_size=size).profile.measurements
        ]
        for size in (None, 128)
    ]
    assert sizes[1] == [*sizes[0], 32]
