import contextlib
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import autopipe
from autopipe import users_code
from autopipe.users_code import AUTOPIPE, PYTHON, TORCH

TORCHS = str(Path(importlib.util.find_spec("torch").origin).parent / "functional.py")
OWNERS = {
    "/env/lib/python3.11/site-packages/einops/_backends.py": "einops",
    "/usr/lib/python3/dist-packages/six.py": "six.py",
    "/me/project/.venv/lib/python3.11/site-packages/torch/functional.py": TORCH,
    TORCHS: TORCH,
    str(Path(autopipe.__file__).parent / "ir" / "graph.py"): AUTOPIPE,
    textwrap.__file__: PYTHON,
    contextlib.__file__: PYTHON,
    "<frozen importlib._bootstrap>": PYTHON,
    "/home/me/model.py": "",
    "<string>": "",
}


@pytest.mark.parametrize("file", OWNERS)
def test_a_file_belongs_to_the_package_that_it_is_installed_in(file):
    assert users_code.library_of(file) == OWNERS[file]


def test_the_user_writes_files_that_belong_to_no_library():
    assert [file for file in OWNERS if users_code.is_own_file(file)] == ["/home/me/model.py"]
    assert not users_code.is_own_file("")


def test_a_model_is_in_own_files_or_in_packages():
    packages = ["/env/lib/python3.11/site-packages/einops/_backends.py", "/usr/lib/python3/dist-packages/six.py"]
    assert [file for file in OWNERS if users_code.is_model_file(file)] == [*packages, "/home/me/model.py"]
    assert [file for file in OWNERS if users_code.is_model_code(file)] == [*packages, "/home/me/model.py", "<string>"]


def test_torch_and_autopipe_are_packages_wherever_they_lie():
    assert {OWNERS[file] for file in OWNERS if users_code.is_package(file)} == {"einops", "six.py", TORCH, AUTOPIPE}


def test_a_source_file_of_a_compiled_extension_is_not_here(tmp_path):
    assert users_code.is_own_file("fast/loop.pyx") and not users_code.is_own_file_here("fast/loop.pyx")
    (tmp_path / "model.py").touch()
    assert users_code.is_own_file_here(str(tmp_path / "model.py"))


def test_any_object_may_stand_for_a_module(monkeypatch):
    assert users_code.is_own_module(SimpleNamespace(__file__="/home/me/model.py"))
    assert not users_code.is_own_module(SimpleNamespace(__file__=3))
    assert not users_code.is_own_module(None) and not users_code.is_own_module(textwrap)
    module = ModuleType("mine")
    module.__file__ = "/home/me/mine.py"
    monkeypatch.setitem(sys.modules, "mine", module)
    assert users_code.is_own_class(type("Mine", (), {"__module__": "mine"}))
    assert not users_code.is_own_class(textwrap.TextWrapper)


def test_a_module_of_a_model_is_of_the_user_or_of_a_model_library():
    names = ("__main__", "model", "transformers.models", "torch.nn", "numpy", "autopipe.ir", "builtins", "os.path")
    assert [name for name in names if users_code.is_model_module(name)] == ["__main__", "model", "transformers.models"]


def test_a_finder_may_ask_for_the_owner_of_what_it_finds() -> None:
    text = """
import sys
from autopipe.users_code import TORCH, library_of

class Finder:
    def find_spec(self, name, path=None, target=None):
        library_of(f"/{name}.py")

sys.meta_path.insert(0, Finder())
import torch.version
assert library_of(torch.version.__file__) == TORCH
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
