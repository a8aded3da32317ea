"""The modules that user files import, over several methods of ``Pipeline`` in one process."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from autopipe import Pipeline
from autopipe.errors import RunError
from autopipe.user_modules import USER_MODULES, UserModules
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


def write(folder: Path, activation: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{HELPER}.py").write_text(f"from torch import {activation} as activation\n")
    (folder / "model.py").write_text(MODEL)
    return folder / "model.py"


def calls(model: Path) -> set[str]:
    result = Pipeline(model, work_dir=model.parent / "work").profile(estimate=True)
    return {node.target.rpartition(".")[2] for node in result.profile.graph.nodes}


def noting(path: Path) -> str:
    """Return code that adds to a file, but not in the processes that a command starts."""
    return f"import os\nif os.getpid() == {os.getpid()}:\n    with open({str(path)!r}, 'a') as file: file.write('x')\n"


def test_each_model_gets_the_module_of_its_own_folder(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    assert "relu" in calls(first)
    assert "tanh" in calls(second)
    assert "relu" in calls(first)


def test_an_edited_module_is_imported_again(tmp_path: Path) -> None:
    model, helper = write(tmp_path / "a", "relu"), tmp_path / "a" / f"{HELPER}.py"
    assert "relu" in calls(model)
    assert "relu" in linecache.getline(str(helper), 1)
    write(tmp_path / "a", "sigmoid")
    assert "sigmoid" in calls(model)
    assert "sigmoid" in linecache.getline(str(helper), 1)


def test_an_edited_model_file_is_imported_again(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    assert "relu" in calls(model)
    model.write_text(model.read_text().replace("activation(self", "torch.tanh(self"))
    assert "tanh" in calls(model)


def test_a_model_without_the_module_does_not_get_that_of_another(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    (tmp_path / "b" / f"{HELPER}.py").unlink()
    calls(first)
    with pytest.raises(Exception, match=f"No module named '{HELPER}'"):
        calls(second)


def test_modules_run_once_while_the_files_are_the_same(tmp_path: Path) -> None:
    model, other = write(tmp_path / "a", "relu"), write(tmp_path / "b", "tanh")
    helper, ran = tmp_path / "a" / f"{HELPER}.py", tmp_path / "ran"
    helper.write_text(f"{helper.read_text()}{noting(ran)}")
    calls(model)
    calls(model)
    Pipeline(model, work_dir=tmp_path / "other work").profile(estimate=True)
    assert "tanh" in calls(other)
    assert "relu" in calls(model)
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


def test_a_command_within_a_command_keeps_the_modules(tmp_path: Path) -> None:
    modules, model = UserModules(), Target(str(write(tmp_path / "a", "relu")), "")
    before = list(sys.path)
    with modules.command("files"):
        import_target(model)
        helper = sys.modules[HELPER]
        with modules.command("files"):
            import_target(model)
            assert sys.modules[HELPER] is helper
        assert sys.modules[HELPER] is helper
    assert sys.path == before
    with modules.command("files"):
        import_target(model)
        assert sys.modules[HELPER] is helper


def test_the_run_of_another_model_gets_modules_of_its_own(tmp_path: Path) -> None:
    first, second = (Target(str(write(tmp_path / name, name)), "") for name in ("relu", "tanh"))
    modules = UserModules()
    for model, name in ((first, "relu"), (second, "tanh")):
        with modules.command("files"):
            import_target(model)
            assert vars(sys.modules[HELPER])["activation"].__name__ == name
            other = second if model is first else first
            with modules.command("files"), pytest.raises(RunError, match="loads other files"):
                import_target(other)


def test_a_file_that_changes_during_its_command_is_imported_again(tmp_path: Path) -> None:
    modules, model = UserModules(), Target(str(write(tmp_path / "a", "relu")), "")
    for name in ("relu", "sigmoid", "sigmoid"):
        with modules.command("files"):
            import_target(model)
            assert vars(sys.modules[HELPER])["activation"].__name__ == name
            time.sleep(0.05)  # more than the clock of a file system needs to advance
            write(tmp_path / "a", "sigmoid")


def test_the_path_of_the_modules_is_there_with_them(tmp_path: Path) -> None:
    modules, model = UserModules(), write(tmp_path / "a", "relu")
    helper, before = tmp_path / "a" / f"{HELPER}.py", list(sys.path)
    helper.write_text(f"{helper.read_text()}import sys\nsys.path.append({str(tmp_path)!r})\n")
    for _ in range(2):
        with modules.command("files"):
            import_target(Target(str(model), ""))
            assert sys.path == [str(model.parent), *before, str(tmp_path)]
        assert sys.path == before


def test_a_module_that_the_script_imports_later_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "a", "relu")
    assert "relu" in calls(model)
    monkeypatch.syspath_prepend(tmp_path / "a")
    own = __import__(HELPER)
    sys.path.remove(str(tmp_path / "a"))
    vars(own)["activation"] = torch.tanh
    assert "tanh" in calls(model)
    assert sys.modules.pop(HELPER) is own


def test_a_folder_without_an_init_file_is_that_of_its_model(tmp_path: Path) -> None:
    models = [write(tmp_path / folder, name) for folder, name in (("a", "relu"), ("b", "tanh"))]
    for model in models:
        folder = model.parent / "folder_of_the_model"
        folder.mkdir()
        (model.parent / f"{HELPER}.py").rename(folder / "inner.py")
        (model.parent / f"{HELPER}.py").write_text("from folder_of_the_model.inner import activation\n")
    first, second = models
    assert [calls(model) & {"relu", "tanh"} for model in (first, first, second)] == [{"relu"}, {"relu"}, {"tanh"}]
    assert "folder_of_the_model" not in sys.modules


def test_modules_of_a_package_run_once_beside_the_model(tmp_path: Path) -> None:
    package, ran = tmp_path / "package_of_the_model", tmp_path / "ran"
    model = write(package, "relu")
    model.write_text(MODEL.replace(f"from {HELPER}", f"from .{HELPER}"))
    (package / "__init__.py").write_text(noting(ran))
    assert "relu" in calls(model)
    assert "relu" in calls(model)
    assert ran.read_text() == "x"
    assert package.name not in sys.modules


def test_a_registry_that_the_model_fills_has_the_model_once(tmp_path: Path) -> None:
    model = write(tmp_path / "a", "relu")
    helper = tmp_path / "a" / f"{HELPER}.py"
    helper.write_text(f"{helper.read_text()}REGISTRY = []\nimport sys\nsys.path.append({str(tmp_path)!r})\n")
    model.write_text(
        f"{MODEL}\nfrom {HELPER} import REGISTRY\nREGISTRY.append(Net)\nassert REGISTRY == [Net]\n"
        f"import sys\nassert sys.path.count({str(tmp_path)!r}) == 1\n"
    )
    for _ in range(3):
        assert "relu" in calls(model)


def test_a_second_thread_is_refused(tmp_path: Path) -> None:
    errors: list[RunError] = []

    def call() -> None:
        try:
            Pipeline(write(tmp_path / "a", "relu")).profile(estimate=True)
        except RunError as error:
            errors.append(error)

    with USER_MODULES.command("this thread"):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert [error.what for error in errors] == ["another thread of this process runs a method of a Pipeline"]


def test_a_thread_may_simulate_during_a_command(tmp_path: Path) -> None:
    pipe = Pipeline(write(tmp_path / "a", "relu"), work_dir=tmp_path / "work", device="cpu", gpus=2, batch_size=4)
    pipe.plan(link="1GB/s")
    results: list[object] = []
    with USER_MODULES.command("this thread"):
        thread = threading.Thread(target=lambda: results.append(pipe.simulate()))
        thread.start()
        thread.join()
    assert len(results) == 1
