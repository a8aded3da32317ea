"""A disk that is too small for the checkpoints of a run is refused before the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.stored_profiles import stored_profile

from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training.checkpoints import _bytes_of_a_checkpoint, refuse_full_disk
from autopipe.errors import RunError
from autopipe.planning.requests import PlanRequest


@pytest.mark.parametrize(
    ("options", "every", "checkpoints"),
    [
        ({"steps": 1000, "keep_checkpoints": 0, "start": 900}, 100, 1),
        ({"steps": 3}, 0, 1),
        ({"steps": 3}, 1, 3),
        ({"steps": 100}, 1, 4),  # three are kept, and a fourth is written
        ({"steps": 100, "keep_checkpoints": 1}, 1, 2),
        ({"steps": 100, "keep_checkpoints": 0}, 10, 10),
        ({}, 10, 1),  # the length of the data is not known
    ],
)
def test_the_checkpoints_of_a_run_must_fit_the_disk(
    options: dict[str, Any], every: int, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = stored_profile()
    prepared: Any = SimpleNamespace(graph=profile.graph, profile=profile, record=SimpleNamespace(request=PlanRequest()))
    each = _bytes_of_a_checkpoint(prepared)
    assert each == round(profile.trained_bytes * (1 + profile.optimizer_bytes_per_byte)) > 0
    options = dict(options)
    start = options.pop("start", 0)
    settings = TrainSettings(PlanSettings(ProfileSettings(ModelSettings(), tmp_path / "work")), **options)
    for free in (checkpoints * each, checkpoints * each - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        if free == checkpoints * each:
            refuse_full_disk(settings, prepared, None, every, start)
            continue
        with pytest.raises(RunError, match=r"will be written, but .* are free") as caught:
            refuse_full_disk(settings, prepared, None, every, start)
        assert ("--keep-checkpoints 1" in caught.value.remedy) == (checkpoints > 1)
