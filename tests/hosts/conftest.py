"""``hosts``: two hosts with a network of their own, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.hosts.two_hosts import Hosts, two_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as two:
        yield two
