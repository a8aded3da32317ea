"""Model files that have the name of a package or belong to one are imported as Python would run them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.warm.programs import run_warm

from autopipe.errors import ModelFileError
from autopipe.workload import LoadOptions, Workload, load_workload
from autopipe.workload.target.files import files_of
from autopipe.workload.target.targets import Target

NET = "from torch import nn\ndef make():\n    return nn.Linear(3, 2)\n"
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("toykit", "helping", "pack", "autopipe_model_toykit", "shadowed"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


def load(path: Path) -> Workload:
    return load_workload(LoadOptions(str(path)))


def runs_as_a_script(path: Path) -> bool:
    return run_warm(str(path), cwd=Path.cwd()).returncode == 0


WAYS = {
    "a module of it": "from toykit.net import make",
    "its module, bound": "import toykit.net\nmake = toykit.net.make",
    "a name of it": "from toykit import make",
    "an attribute of it": "import toykit\nmake = toykit.make",
    "inside a function": "def make():\n    from toykit.net import make\n    return make()",
    "by a neighbour": "from helping import make",
    "an attribute, by a neighbour": "import helping\nmake = helping.kit.make",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_may_have_the_name_of_a_package_that_it_imports(write: Write, way: str) -> None:
    write("lib/toykit/__init__.py", "from toykit.net import make\n")
    write("lib/toykit/net.py", NET)
    write("run/helping.py", "from toykit.net import make\nimport toykit as kit\n")
    head = "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parents[1] / 'lib'))\n"
    path = write("run/toykit.py", head + WAYS[way] + "\nbuild_model = make\nbuild_model()\n")
    assert runs_as_a_script(path)
    assert load(path).build_model().out_features == 2
    assert Path(sys.modules["toykit"].__file__ or "").name == "__init__.py"


def test_a_file_outside_a_package_fails_as_it_does_as_a_script(write: Write) -> None:
    path = write("toykit.py", "from toykit.net import make\nbuild_model = make\n")
    assert not runs_as_a_script(path)
    with pytest.raises(ModelFileError, match="'toykit' is not a package") as refused:
        load(path)
    assert "toykit.py:1" in refused.value.where


def test_the_folder_of_the_file_comes_before_every_other_place(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("installed/shadowed.py", "WIDTH = 9\n")
    write("run/shadowed.py", "WIDTH = 3\n")
    path = write("run/net.py", "import shadowed\nfrom torch import nn\nmodel = nn.Linear(shadowed.WIDTH, 2)\n")
    monkeypatch.setattr(sys, "path", [str(path.parents[1] / "installed"), str(path.parent), *sys.path])
    assert load(path).build_model().in_features == 3


def test_a_file_with_relative_imports_is_a_module_of_its_package(write: Write) -> None:
    write("pack/__init__.py", "ORDER = ['pack']\n")
    write("pack/common.py", "WIDTH = 4\n")
    write("pack/nets/__init__.py", "from .. import ORDER\nORDER.append('nets')\n")
    text = "from torch import nn\nfrom ..common import WIDTH\nfrom .. import ORDER\nORDER.append('model')\n"
    path = write("pack/nets/model.py", text + "model = nn.Linear(WIDTH, 2)\n")
    workload = load(path)
    assert workload.build_model().in_features == 4
    assert sys.modules["pack"].ORDER == ["pack", "nets", "model"]
    write("pack/nets/model.py", text + "model = nn.Linear(WIDTH, 7)\n")
    assert load(path).build_model().out_features == 7
    names = [str(file.relative_to(path.parents[2])) for file in files_of(Target.parse(str(path)))]
    assert names == ["pack/__init__.py", "pack/nets/__init__.py", "pack/nets/model.py"]


def test_a_script_next_to_an_init_file_stays_a_script(write: Write) -> None:
    write("pack/__init__.py", "raise RuntimeError('not to be imported')\n")
    write("pack/helping.py", "WIDTH = 5\n")
    path = write("pack/run.py", "import helping\nfrom torch import nn\nmodel = nn.Linear(helping.WIDTH, 2)\n")
    assert load(path).build_model().in_features == 5


def test_a_relative_import_without_an_init_file_is_refused_with_a_remedy(write: Write) -> None:
    write("pack/other.py", "WIDTH = 6\n")
    path = write("pack/part.py", "from torch import nn\nfrom .other import WIDTH\nmodel = nn.Linear(WIDTH, 2)\n")
    with pytest.raises(ModelFileError) as refused:
        load(path)
    assert refused.value.remedy.endswith(f"name it as pack.part, from the folder {path.parents[1]}")
    sys.path.insert(0, str(path.parents[1]))
    assert load_workload(LoadOptions("pack.part")).build_model().in_features == 6


HOOKS = """
import torch
build_model = make
def loss(output, target):
    return (output - target).pow(2).mean()
def data(batch_size=4):
    yield torch.ones(batch_size, 3), torch.zeros(batch_size, 2)
"""


@pytest.mark.parametrize("kind", ["named like a package", "in a package"])
def test_the_plain_loop_imports_a_module_of_a_package(write: Write, tmp_path: Path, run: Any, kind: str) -> None:
    if kind == "in a package":
        write("pack/__init__.py")
        write("pack/net.py", NET)
        path = write("pack/model.py", "from .net import make\n" + HOOKS)
    else:
        write("lib/toykit/__init__.py", NET)
        head = "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parents[1] / 'lib'))\n"
        path = write("run/toykit.py", head + "from toykit import make\n" + HOOKS)
    done = run("plain", str(path), "--batch-size", "4", "--num-microbatches", "2", "--steps", "1", "-o", "loop.py")
    assert done.exit_code == 0, done.stderr
    assert "next: python loop.py\n" in done.output  # no run, so there are no exported weights to compare with
    printed = run_warm(str(tmp_path / "loop.py"), cwd=tmp_path)
    assert printed.stdout.startswith("step 1: loss "), printed.stderr
