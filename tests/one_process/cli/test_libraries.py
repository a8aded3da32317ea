"""Native libraries that load in a thread while the command imports: torch is the same, and what fails is left to it."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, sys, threading
from pathlib import Path

from autopipe.cli import libraries

if sys.argv[1] == "missing":
    libraries._LIBRARIES = (("libmissing.so", os.RTLD_NOW), *libraries._LIBRARIES)
with libraries.native_libraries():
    print(threading.active_count(), "torch" in sys.modules)
print(threading.active_count(), "libtorch_cpu" in Path("/proc/self/maps").read_text())

import torch

print(torch.ones(3).sum().item())
with libraries.native_libraries():  # torch is imported already
    print(threading.active_count())
"""


def run(how: str) -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


def test_the_libraries_load_in_a_thread_that_ends_before_torch_is_imported():
    assert run("present") == ["2 False", "1 True", "3.0", "1"]


def test_a_library_that_cannot_be_loaded_is_left_to_torch():
    first, second, *rest = run("missing")
    assert (first[2:], second, rest) == ("False", "1 False", ["3.0", "1"])
