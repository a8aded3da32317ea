"""The modules that user files import, over several methods of ``Pipeline`` in one process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe import Pipeline
from autopipe.commands.user_imports import USER_IMPORTS, UserImports
from autopipe.errors import RunError

MODEL = """
import torch
from torch import nn
from helper_of_the_model import activation

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.last(activation(self.first(x)))

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=4):
    yield torch.ones(batch_size, 4), torch.ones(batch_size, 1)
"""
HELPER = "helper_of_the_model"


@pytest.fixture(autouse=True)
def no_modules_left() -> Iterator[None]:
    yield
    with USER_IMPORTS.command("of another test"):
        pass


def write(folder: Path, activation: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{HELPER}.py").write_text(f"from torch import {activation} as activation\n")
    (folder / "model.py").write_text(MODEL)
    return folder / "model.py"


def calls(model: Path) -> set[str]:
    result = Pipeline(model, work_dir=model.parent / "work").profile(estimate=True)
    return {node.target.rpartition(".")[2] for node in result.profile.graph.nodes}


def test_each_model_gets_the_module_of_its_own_folder(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    assert "relu" in calls(first)
    assert "tanh" in calls(second)
    assert "relu" in calls(first)


def test_an_edited_module_is_imported_again(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    assert "relu" in calls(model)
    write(tmp_path / "a", "sigmoid")
    assert "sigmoid" in calls(model)


def test_a_model_without_the_module_does_not_get_that_of_another(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    (tmp_path / "b" / f"{HELPER}.py").unlink()
    calls(first)
    with pytest.raises(Exception, match=f"No module named '{HELPER}'"):
        calls(second)


def test_modules_stay_while_the_files_are_the_same(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    calls(model)
    before = sys.modules[HELPER]
    calls(model)
    assert sys.modules[HELPER] is before


def test_modules_that_the_process_imported_itself_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    monkeypatch.syspath_prepend(first.parent)
    own = __import__(HELPER)
    calls(first)
    calls(second)
    assert sys.modules.pop(HELPER) is own


def test_entries_of_the_path_go_with_their_modules(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    calls(first)
    assert os.fspath(first.parent) in sys.path
    calls(second)
    assert os.fspath(first.parent) not in sys.path


def test_a_command_within_a_command_keeps_the_modules(tmp_path: Path) -> None:
    imports = UserImports()
    (tmp_path / "module_of_a_command.py").write_text("")
    with imports.command("outer"):
        sys.path.insert(0, os.fspath(tmp_path))
        __import__("module_of_a_command")
        with imports.command("inner"):
            assert "module_of_a_command" in sys.modules
    with imports.command("outer"):
        assert "module_of_a_command" in sys.modules
    with imports.command("inner"):
        assert "module_of_a_command" not in sys.modules
    assert os.fspath(tmp_path) not in sys.path


def test_a_second_thread_is_refused(tmp_path: Path) -> None:
    errors: list[RunError] = []

    def call() -> None:
        try:
            Pipeline(write(tmp_path / "a", "relu")).profile(estimate=True)
        except RunError as error:
            errors.append(error)

    with USER_IMPORTS.command("this thread"):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert [error.what for error in errors] == ["another thread of this process runs a method of a Pipeline"]
