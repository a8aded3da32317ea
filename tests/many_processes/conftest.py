"""``commands``: runs commands in a folder with a model file, and ends all of them after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Commands, write_model
from support.warm import DATA_LIBRARY, brief

from autopipe.workers.fork_server import MODULES

# before any test starts the fork server of this process
MODULES.append(DATA_LIBRARY)


@pytest.fixture(autouse=True)
def warm_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands of this process wait less, unless ``NEW_PROCESSES`` of the module."""
    if not getattr(request.module, "NEW_PROCESSES", False):
        brief.shorten(monkeypatch.setattr)


@pytest.fixture
def commands(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Commands]:
    """Yield commands in a folder that holds ``FILES`` (name -> text) of the test module, or else a default model."""
    files = getattr(request.module, "FILES", None)
    if files is None:
        write_model(tmp_path)
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with Commands(tmp_path, new=getattr(request.module, "NEW_PROCESSES", False)) as commands:
        yield commands
