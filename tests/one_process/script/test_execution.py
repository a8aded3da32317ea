"""The traceback of a script that Ctrl-C ends."""

import sys
import types
from pathlib import Path

import pytest

import autopipe
from autopipe.script.execution import INTERRUPTED, execute

WAITING = """
def wait():
    try:
        raise LookupError("autopipe looked for an answer")
    except LookupError:
        raise KeyboardInterrupt
"""
SCRIPT = b"""
import waiting

def train():
    waiting.wait()

try:
    raise ValueError("of the script")
except ValueError:
    train()
"""


def test_the_traceback_of_ctrl_c_ends_in_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    place = Path(autopipe.__file__).parent / "script/waiting.py"
    waiting = types.ModuleType("waiting")
    exec(compile(WAITING, str(place), "exec"), waiting.__dict__)
    for name, module in (("waiting", waiting), ("__main__", sys.modules["__main__"])):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT)
    assert execute(path, [], SCRIPT) == INTERRUPTED
    shown = capsys.readouterr().err
    *_, line, last = shown.splitlines()
    assert (line.strip(), last) == ("waiting.wait()", "KeyboardInterrupt")
    assert "ValueError: of the script" in shown
    assert "LookupError" not in shown and str(place.parent) not in shown
