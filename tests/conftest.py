"""The environment of all tests: default signal handlers, separate folders, and plans without replicas."""

import atexit
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile

import pytest
from support.slow import leave_two_thirds

# in a background job or under nohup these signals are ignored, which every child inherits; tests that interrupt a
# command need them
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
# one folder per pytest process for temporary files and for the state that commands keep per user; files in tmp_path
# are kept for inspection
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
FOLDER = tempfile.mkdtemp(prefix="autopipe-tests-")
# runs after the handlers that multiprocessing registers later, which remove its folder inside this one
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
os.environ["XDG_STATE_HOME"] = f"{FOLDER}/state"
# as in ranks: with more threads, sums and products round differently
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the models are so small that a single rank would be the fastest plan; commands cut them into stages unless a test
# requests otherwise
os.environ["AUTOPIPE_REPLICAS"] = "never"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of the long tables to `make test-all`."""
    leave_two_thirds(items)


def pytest_collection_finish() -> None:
    """Exempt all modules from garbage collection, which commands start whenever a model file has changed.

    Write no more bytecode: tests rewrite model files within a second, and bytecode files are compared by seconds. That
    of the test modules themselves, with rewritten assertions, is written: it takes as long as importing torch.
    """
    sys.dont_write_bytecode = True
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # the first optimizer imports it
    gc.collect()
    gc.freeze()
