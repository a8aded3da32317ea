"""The environment of all tests: a folder for what they name as models, and plans without replicas."""

import os
import shutil
import tempfile

STATE = tempfile.mkdtemp(prefix="autopipe-tests-state-")
os.environ["XDG_STATE_HOME"] = STATE
# the models of tests are so small that one rank alone would be the fastest plan: commands cut them into stages, unless
# a test says otherwise
os.environ["AUTOPIPE_REPLICAS"] = "never"


def pytest_sessionfinish() -> None:
    """Leave nothing."""
    shutil.rmtree(STATE, ignore_errors=True)
