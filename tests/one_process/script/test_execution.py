"""The traceback of a script that Ctrl-C or an error of autopipe ends."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import autopipe
from autopipe.script.runner import INTERRUPTED, execute

WAITING = """
def wait():
    try:
        raise LookupError("autopipe looked for an answer")
    except LookupError:
        raise %s
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


@pytest.mark.parametrize(
    ("error", "code", "end"),
    [
        ("KeyboardInterrupt", INTERRUPTED, "KeyboardInterrupt"),
        ("__import__('autopipe.errors').errors.RunError('it cannot run')", 1, "Error: it cannot run"),
    ],
)
def test_the_traceback_ends_in_the_script(
    error: str, code: int, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    place = Path(autopipe.__file__).parent / "script/waiting.py"
    waiting = types.ModuleType("waiting")
    exec(compile(WAITING % error, str(place), "exec"), waiting.__dict__)
    for name, module in (("waiting", waiting), ("__main__", sys.modules["__main__"])):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT)
    assert execute(path, [], SCRIPT) == code
    shown = capsys.readouterr().err
    *_, line, last = shown.splitlines()
    assert (line.strip(), last) == ("waiting.wait()", end)
    assert ("ValueError: of the script" in shown) == (code == INTERRUPTED)
    assert "LookupError" not in shown and str(place.parent) not in shown
