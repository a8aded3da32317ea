"""``commands``: commands in a folder with a model file, all of which end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Commands, write_model


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    write_model(tmp_path)
    found = Commands(tmp_path)
    yield found
    found.end()
