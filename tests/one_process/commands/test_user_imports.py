"""The modules that user files import, over several methods of ``Pipeline`` in one process."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import py_compile
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from autopipe import Pipeline
from autopipe.commands.user_imports import USER_IMPORTS, UserImports
from autopipe.errors import RunError
from autopipe.workload.target.targets import Target, import_target

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


def test_modules_run_once_while_the_files_are_the_same(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    helper, ran = tmp_path / "a" / f"{HELPER}.py", tmp_path / "ran"
    helper.write_text(f"{helper.read_text()}with open({str(ran)!r}, 'a') as file:\n    file.write('x')\n")
    calls(model)
    calls(model)
    assert ran.read_text() == "x"


def test_modules_that_the_process_imported_itself_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    monkeypatch.syspath_prepend(first.parent)
    own = __import__(HELPER)
    calls(first)
    calls(second)
    assert sys.modules.pop(HELPER) is own


def test_the_path_and_the_modules_are_those_of_the_script_between_commands(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    before = list(sys.path)
    for model in (first, first, second, first):
        calls(model)
        assert sys.path == before
        assert HELPER not in sys.modules


def test_the_path_of_the_commands_is_there_during_the_next_one(tmp_path: Path) -> None:
    imports = UserImports()
    (tmp_path / "module_of_a_command.py").write_text("")
    before = list(sys.path)
    with imports.command("outer"):
        sys.path.append(os.fspath(tmp_path))
        __import__("module_of_a_command")
    assert sys.path == before
    with imports.command("outer"):
        assert sys.path == [*before, os.fspath(tmp_path)]
        assert "module_of_a_command" in sys.modules
    with imports.command("another"):
        assert sys.path == before
        assert "module_of_a_command" not in sys.modules


def test_a_command_within_a_command_keeps_the_modules(tmp_path: Path) -> None:
    imports = UserImports()
    (tmp_path / "module_of_a_command.py").write_text("")
    with imports.command("outer"):
        sys.path.insert(0, os.fspath(tmp_path))
        __import__("module_of_a_command")
        with imports.command("outer"):
            assert "module_of_a_command" in sys.modules
        assert "module_of_a_command" in sys.modules
    with imports.command("outer"):
        assert "module_of_a_command" in sys.modules
    assert os.fspath(tmp_path) not in sys.path


def test_a_command_within_a_command_that_loads_other_files_is_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    kinds = []

    def within(*_: object) -> None:
        with pytest.raises(RunError, match="called within another one, such as in its on_event, and loads other files"):
            calls(second)
        kinds.append("refused")

    Pipeline(first, work_dir=tmp_path / "work").profile(estimate=True, on_progress=within)
    assert kinds
    assert "tanh" in calls(second)


@pytest.mark.parametrize("file", [f"{HELPER}.py", "model.py"])
def test_an_edit_is_seen_that_leaves_the_size_and_the_time(file: str, tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    edited = model.parent / file
    edited.write_text(edited.read_text() + "# relu\nfrom torch import relu as activation\n")
    changed = edited.stat().st_mtime_ns
    py_compile.compile(os.fspath(edited))
    assert "relu" in calls(model)
    edited.write_text(edited.read_text().replace("relu", "tanh"))
    os.utime(edited, ns=(changed, changed))
    assert "tanh" in calls(model)


def test_a_new_file_that_hides_an_imported_one_is_imported(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    (tmp_path / "b").mkdir()
    (model.parent / f"{HELPER}.py").rename(tmp_path / "b" / f"{HELPER}.py")
    model.write_text(f"import sys\nsys.path.append({str(tmp_path / 'b')!r})\n{MODEL}")
    assert "relu" in calls(model)
    (model.parent / f"{HELPER}.py").write_text("from torch import tanh as activation\n")
    assert "tanh" in calls(model)


def test_a_submodule_that_a_package_creates_is_that_of_its_command(tmp_path: Path) -> None:
    models = []
    for folder, name in (("a", "relu"), ("b", "tanh")):
        models.append(write(tmp_path / folder, name))
        (tmp_path / folder / f"{HELPER}.py").write_text("from creating_package.created import activation\n")
        (tmp_path / folder / "creating_package").mkdir()
        (tmp_path / folder / "creating_package" / "__init__.py").write_text(
            f"import sys, torch, types\nname = __name__ + '.created'\nif name not in sys.modules:\n"
            f"    sys.modules[name] = types.ModuleType(name)\n    sys.modules[name].activation = torch.{name}\n"
        )
    first, second = models
    assert [calls(model) & {"relu", "tanh"} for model in (first, first, second, first)] == [
        {"relu"},
        {"relu"},
        {"tanh"},
        {"relu"},
    ]


def test_a_helper_that_imports_the_model_gets_the_one_of_its_command(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    (tmp_path / "a" / "losses.py").write_text(
        "import helper_of_losses\ndef loss(output, target):\n    return helper_of_losses.scaled(output, target)\n"
    )
    (tmp_path / "a" / "helper_of_losses.py").write_text(
        "import sys\nfrom model import Net\ndef scaled(output, target):\n"
        "    assert Net is sys.modules['model'].Net\n    return (output - target).abs().mean()\n"
    )
    for _ in range(2):
        Pipeline(model, loss=str(tmp_path / "a" / "losses.py"), work_dir=tmp_path).profile(estimate=True)


def test_the_run_of_another_model_gets_modules_of_its_own(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    imports = UserImports()
    for model, name in ((first, "relu"), (second, "tanh")):
        with imports.command("one key"):
            import_target(Target(str(model), ""))
            assert hasattr(sys.modules[HELPER], "activation")
            assert sys.modules[HELPER].activation.__name__ == name
    with imports.command("one key"):
        import_target(Target(str(second), ""))
        with imports.command("one key"), pytest.raises(RunError, match="loads other files"):
            import_target(Target(str(first), ""))


def test_a_module_of_the_process_that_a_command_runs_again_is_back_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_the_process"
    package.mkdir()
    (package / "__init__.py").write_text("from .layers import layers\n")
    (package / "layers.py").write_text(f"from . import other\ndef layers(): ...\n{MODEL}")
    (package / "other.py").write_text("")
    (package / f"{HELPER}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "a", "relu")
    monkeypatch.syspath_prepend(tmp_path / "a")
    own = importlib.import_module("package_of_the_process.layers")
    function = sys.modules["package_of_the_process"].layers
    assert callable(function)
    assert "relu" in calls(package / "layers.py")
    assert sys.modules.pop("package_of_the_process.layers") is own
    assert sys.modules.pop("package_of_the_process").layers is function
    assert sys.modules.pop("package_of_the_process.other")
    assert sys.modules.pop(HELPER)


class FinderOfAnEditableInstall(importlib.abc.MetaPathFinder):
    def __init__(self, file: Path) -> None:
        self.file = file

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.file) if name == HELPER else None


@pytest.mark.parametrize("first", [False, True])
def test_an_edited_module_of_an_editable_install_is_imported_again(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = write(tmp_path / "a", "relu"), write(tmp_path / "b", "relu").with_name(f"{HELPER}.py")
    (tmp_path / "a" / f"{HELPER}.py").unlink()
    finder = FinderOfAnEditableInstall(source)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path] if first else [*sys.meta_path, finder])
    ran = tmp_path / "ran"
    source.write_text(f"{source.read_text()}with open({str(ran)!r}, 'a') as file:\n    file.write('x')\n")
    assert "relu" in calls(model)
    assert "relu" in calls(model)
    assert ran.read_text() == "x"
    source.write_text(source.read_text().replace("relu", "sigmoid"))
    assert "sigmoid" in calls(model)
    assert ran.read_text() == "xx"
    assert HELPER not in sys.modules


def test_a_module_that_a_file_puts_into_sys_modules_is_that_of_its_command(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    source = tmp_path / "sources" / "source.py"
    source.parent.mkdir()
    (tmp_path / "a" / f"{HELPER}.py").rename(source)
    first.write_text(
        f"import importlib.util, sys\nif {HELPER!r} not in sys.modules:\n"
        f"    spec = importlib.util.spec_from_file_location({HELPER!r}, {str(source)!r})\n"
        f"    sys.modules[{HELPER!r}] = importlib.util.module_from_spec(spec)\n"
        f"    spec.loader.exec_module(sys.modules[{HELPER!r}])\n{MODEL}"
    )
    assert "relu" in calls(first)
    assert HELPER not in sys.modules
    assert "tanh" in calls(second)
    assert "relu" in calls(first)
    source.write_text(source.read_text().replace("relu", "sigmoid"))
    assert "sigmoid" in calls(first)


def test_a_file_that_changes_during_its_command_is_imported_again(tmp_path: Path) -> None:
    imports, source = UserImports(), tmp_path / "source.py"
    source.write_text("text = 'first'\n")
    with imports.command("one key"):
        spec = importlib.util.spec_from_file_location("module_of_a_command", source)
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
        time.sleep(0.05)  # more than the clock of a file system needs to advance
        source.write_text("text = 'second'\n")
    with imports.command("one key"):
        assert "module_of_a_command" not in sys.modules


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


def test_a_thread_may_simulate_during_a_command(tmp_path: Path) -> None:
    pipe = Pipeline(write(tmp_path / "a", "relu"), work_dir=tmp_path / "work", device="cpu", gpus=2, batch_size=4)
    pipe.plan(link="1GB/s")
    results: list[object] = []
    with USER_IMPORTS.command("this thread"):
        thread = threading.Thread(target=lambda: results.append(pipe.simulate()))
        thread.start()
        thread.join()
    assert len(results) == 1
