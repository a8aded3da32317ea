"""A run as at a later step is interrupted, whatever it catches."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autopipe.trace.state.isolation import OutOfTime, limited

CATCHING = """
import time
def run():
    while True:
        try:
            time.sleep(0.01)
        except:
            pass
def around():
    try:
        run()
    except BaseException as error:
        return type(error)
"""


def test_a_loop_that_catches_every_exception_is_interrupted(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(CATCHING, str(tmp_path / "user.py"), "exec"), names)
    start, tracing = time.monotonic(), sys.gettrace()
    with pytest.raises(OutOfTime), limited(0.05):
        names["run"]()
    assert time.monotonic() - start < 5
    with limited(0.05):
        assert names["around"]() is OutOfTime
    assert sys.gettrace() is tracing
