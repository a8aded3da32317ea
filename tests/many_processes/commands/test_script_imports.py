"""Modules of a script and of the files of its pipelines, each test in a process of its own."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from support.warm.programs import run_warm

MODEL = """
import torch
from torch import nn

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
    while True:
        yield torch.ones(batch_size, 4), torch.ones(batch_size, 1)
"""
BEGIN = """
import sys
from pathlib import Path
import autopipe

def call(file, **options):
    options = {"work_dir": Path(file).parent / "work", **options}
    nodes = autopipe.Pipeline(file, **options).profile(estimate=True).profile.graph.nodes
    return {node.target.rpartition(".")[2] for node in nodes} & {"relu", "sigmoid", "tanh"}

"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(tmp_path: Path, script: str) -> None:
    """Run a script in ``tmp_path``, which holds the models ``a/model.py`` (relu) and ``b/model.py`` (tanh)."""
    for folder, name in (("a", "relu"), ("b", "tanh")):
        write(tmp_path / folder / "model.py", f"from torch import {name} as activation\n{MODEL}")
    write(tmp_path / "script.py", BEGIN + script)
    done = run_warm("script.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_file_of_another_folder_imports_the_model_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "b" / "train.py", "from model import *")
    run(
        tmp_path,
        """
for _ in range(2):
    assert call("a/model.py") == {"relu"}
    assert call("a/model.py") == {"relu"}
    assert call("b/train.py") == {"tanh"}
    assert "model" not in sys.modules
""",
    )


def test_a_submodule_of_a_package_of_the_script_is_imported_again(tmp_path: Path) -> None:
    write(tmp_path / "c" / "pkg" / "__init__.py", "")
    write(tmp_path / "c" / "pkg" / "sub.py", "from torch import relu as activation\n")
    write(tmp_path / "c" / "model.py", f"import pkg.sub\nactivation = pkg.sub.activation\n{MODEL}")
    run(
        tmp_path,
        """
sys.path.insert(0, "c")
import pkg
assert call("c/model.py") == {"relu"}
assert not hasattr(pkg, "sub")
Path("c/pkg/sub.py").write_text("from torch import sigmoid as activation\\n")
assert call("c/model.py") == {"sigmoid"}
assert call("c/model.py") == {"sigmoid"}
assert sys.modules["pkg"] is pkg and not hasattr(pkg, "sub")
""",
    )


def test_the_path_holds_no_folder_of_another_command(tmp_path: Path) -> None:
    write(tmp_path / "c" / "loss.py", "def loss(output, target):\n    return (output - target).abs().mean()\n")
    write(tmp_path / "d" / "model.py", f"import loss\nactivation = loss\n{MODEL}")
    run(
        tmp_path,
        """
before = list(sys.path)
for _ in range(2):
    call("a/model.py", loss="c/loss.py")
    assert sys.path == before
try:
    call("d/model.py")
except autopipe.AutopipeError as error:
    assert "No module named 'loss'" in str(error), error
else:
    raise AssertionError("imported loss.py of another folder")
assert sys.path == before
""",
    )


def test_modules_of_the_script_and_of_libraries_stay(tmp_path: Path) -> None:
    name = "_heapq"
    origin = (spec := importlib.util.find_spec(name)) and spec.origin
    if not origin or not origin.endswith(".so"):
        pytest.skip(f"{name} has no file of its own in this Python")
    write(tmp_path / "libraries" / "library.py", "import sys\nsys.ran = getattr(sys, 'ran', 0) + 1\n")
    write(tmp_path / "a" / "helper.py", "import fractions, library, _heapq\n")
    shutil.copy(origin, tmp_path / "a" / Path(origin).name)
    write(tmp_path / "helper.py", "own = True\n")
    write(tmp_path / "a" / "train.py", "import helper\nfrom model import *\n")
    run(
        tmp_path,
        """
sys.path.append("libraries")
import library
sys.modules.pop("fractions", None), sys.modules.pop("_heapq", None)
assert call("a/train.py") == {"relu"}
fractions, compiled = sys.modules["fractions"], sys.modules["_heapq"]
assert Path(compiled.__file__).parent == Path("a").resolve()
import helper
assert helper.own
assert call("b/model.py") == {"tanh"}
assert sys.modules["helper"] is helper and sys.modules["library"] is library
del sys.modules["helper"]
assert call("a/train.py") == {"relu"}
assert sys.ran == 1 and sys.modules["library"] is library
assert sys.modules["fractions"] is fractions and sys.modules["_heapq"] is compiled
""",
    )


def test_an_edited_module_on_the_path_of_the_script_is_imported_again(tmp_path: Path) -> None:
    write(
        tmp_path / "common" / "layers.py",
        "import sys\nsys.ran = getattr(sys, 'ran', 0) + 1\nfrom torch import relu as f\n",
    )
    write(tmp_path / "models" / "model.py", f"from common.layers import f as activation\n{MODEL}")
    run(
        tmp_path,
        """
layers = Path("common/layers.py")
for _ in range(2):
    assert call("models/model.py") == {"relu"}
    assert sys.ran == 1
    assert "common.layers" not in sys.modules and "common" not in sys.modules
layers.write_text(layers.read_text().replace("relu", "sigmoid"))
for _ in range(2):
    assert call("models/model.py") == {"sigmoid"}
    assert sys.ran == 2
""",
    )


def test_a_library_on_the_path_of_the_script_keeps_nothing_of_another_model(tmp_path: Path) -> None:
    write(tmp_path / "libraries" / "settings_of_models.py", "names = ['relu']\n")
    begin = "import settings_of_models, torch\n"
    end = f"activation = getattr(torch, settings_of_models.names[-1])\n{MODEL}"
    write(tmp_path / "c" / "model.py", f"{begin}settings_of_models.names.append('tanh')\n{end}")
    write(tmp_path / "d" / "model.py", f"{begin}{end}")
    run(
        tmp_path,
        """
sys.path.append("libraries")
for _ in range(2):
    assert call("c/model.py") == {"tanh"}
    assert call("d/model.py") == {"relu"}
""",
    )


def test_a_library_that_cannot_run_twice_is_an_error_unless_the_script_imports_it(tmp_path: Path) -> None:
    write(
        tmp_path / "libraries" / "operators_of_models.py",
        "import torch\nlibrary = torch.library.Library('operators_of_models', 'DEF')\n"
        "library.define('same(Tensor x) -> Tensor')\nlibrary.impl('same', lambda x: x.clone(), 'CPU')\n"
        "from torch import relu as activation\n",
    )
    for folder in ("c", "d"):
        write(tmp_path / folder / "model.py", f"from operators_of_models import activation\n{MODEL}")
    run(
        tmp_path,
        """
sys.path.append("libraries")
for file in ("c/model.py", "c/model.py", "a/model.py", "c/model.py"):
    assert call(file) == {"relu"}
try:
    call("d/model.py")
except autopipe.AutopipeError as error:
    assert "operators_of_models" in str(error), error
else:
    raise AssertionError("registered an operator twice")
assert call("c/model.py") == {"relu"}
""",
    )
    run(
        tmp_path,
        """
sys.path.append("libraries")
import operators_of_models
for name in ("c", "d", "c"):
    assert call(f"{name}/model.py") == {"relu"}
""",
    )


METHODS = (
    "profile()",
    "plan()",
    "generate()",
    "simulate()",
    "check()",
    "train()",
    "evaluate()",
    "export('m.pt')",
    "plain()",
)


def test_every_method_is_refused_while_the_script_is_imported(tmp_path: Path) -> None:
    calls = "".join(
        f"try:\n    pipe.{call}\nexcept autopipe.RunError as error:\n    refused.append(str(error))\n"
        for call in METHODS
    )
    script = f"from torch import relu as activation\nimport autopipe\n{MODEL}\n"
    write(
        tmp_path / "unguarded.py",
        f"{script}refused, pipe = [], autopipe.Pipeline('unguarded.py')\nif __name__ != '__main__':\n"
        + "".join(f"    {line}\n" for line in calls.splitlines()),
    )
    run(
        tmp_path,
        f"""
from autopipe.workload.target.targets import Target, import_target
refused = import_target(Target("unguarded.py", "")).refused
assert len(refused) == {len(METHODS)}, refused
assert all("calls a method of Pipeline when it is imported" in text for text in refused), refused
""",
    )


def test_an_unguarded_script_that_defines_the_model_is_refused(tmp_path: Path) -> None:
    begin = f"from torch import relu as activation\nimport autopipe\n{MODEL}\n"
    write(tmp_path / "unguarded.py", f"{begin}autopipe.Pipeline(build_model, data=data).profile(estimate=True)\n")
    done = run_warm("unguarded.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 1
    assert "RunError: the calling script calls a method of Pipeline when it is imported" in done.stderr
    assert 'try: call it under `if __name__ == "__main__":`' in done.stderr
