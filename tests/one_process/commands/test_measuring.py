"""What a measurement is made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.commands import measuring
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
