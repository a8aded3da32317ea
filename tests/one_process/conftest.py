"""``load``: a workload from its text. ``run``: a command in an empty folder. ``one_thread``: one CPU thread."""

import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from support.warm import brief

from autopipe.cli.main import autopipe
from autopipe.workers.fork_server import preload
from autopipe.workload import LoadOptions, load_workload


@pytest.fixture(autouse=True, scope="session")
def warm_processes():
    """Let the commands of this process wait less."""
    with pytest.MonkeyPatch.context() as patch:
        brief.shorten(patch.setattr)
        yield


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
    """Run a command line in an empty folder, in a process with a fork server, as that of a command has."""
    preload()
    monkeypatch.chdir(tmp_path)

    def call(*args, env=None):
        return CliRunner().invoke(autopipe, list(args), env=env)

    return call
