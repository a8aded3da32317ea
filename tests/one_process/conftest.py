"""``load``: a workload from its text. ``run``: a command in an empty folder. ``one_thread``: one CPU thread."""

import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

from autopipe.cli.main import autopipe
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


@pytest.fixture
def one_thread():
    """Run on one thread, as a rank does: with more threads, sums and products round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*args, env=None):
        return CliRunner().invoke(autopipe, list(args), env=env)

    return call
