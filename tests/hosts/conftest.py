"""``hosts``: two hosts with a network of their own. ``folder``: a model, its plan, and a run on this machine alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts.launches import prepared
from support.hosts.two_hosts import Hosts, two_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as two:
        yield two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("work"))
