"""What a test names as its model is remembered in a folder of the test run, not in the developer's own."""

import os
import shutil
import tempfile

STATE = tempfile.mkdtemp(prefix="autopipe-tests-state-")
os.environ["XDG_STATE_HOME"] = STATE


def pytest_sessionfinish() -> None:
    """Leave nothing."""
    shutil.rmtree(STATE, ignore_errors=True)
