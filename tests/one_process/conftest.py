"""``load``: a model file from its text."""

import sys
import textwrap

import pytest

from autopipe.workload import LoadOptions, load_workload


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load_text(text, **options):
        path = tmp_path / "net_of_batches.py"
        path.write_text(textwrap.dedent(text))
        return load_workload(LoadOptions(str(path), **options))

    yield load_text
    sys.modules.pop("net_of_batches", None)
